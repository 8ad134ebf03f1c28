"""Data-parallel styles: each is a choice of where parameters and optimizer state rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..capture.precision import MixedPrecision
from ..errors import PlanError
from ..graph.graph import Input, Role, TrainGraph
from ..layout import Layout, replicated, sharded
from ..mesh import Mesh

Style = Literal["replicate", "zero1", "zero2", "fully_shard", "default", "hybrid"]


@dataclass(frozen=True)
class Resting:
    """Where one parameter rests, and where its optimizer state (and so its reduced gradient) does."""

    param: Layout
    state: Layout


@dataclass(frozen=True)
class DataParallel:
    """Every rank runs the step on its own batch; gradients are averaged over ranks.

    Args:
        style: where parameters and optimizer state rest: `replicate` (DDP), `zero1`, `zero2`, `fully_shard` (ZeRO-3,
            FSDP), `default` (shard what divides evenly, replicate the rest), `hybrid` (shard on the last axis,
            replicate on the others).
        axis: the mesh axis or axes to use; all of them by default.
        reshard_after_forward: gather sharded parameters again for the backward (True), keep them (False), or keep up to
            `keep_gathered_bytes` of them, those that the backward needs first (None).
        keep_gathered_bytes: see above.
        semantics: `per_rank`, what DDP and FSDP compute.
        reduce: `mean` over ranks, as DDP, or `sum`.
        sync_state: start from the first rank's parameters, buffers and optimizer state, as DDP does.
        broadcast_buffers: every call starts from the first rank's buffers.
        mixed_precision: dtypes for computing and for reducing gradients.
        input_batch_dim: the dim of batch tensors that counts samples.
    """

    style: Style = "fully_shard"
    axis: str | tuple[str, ...] | None = None
    reshard_after_forward: bool | None = None
    keep_gathered_bytes: int = 64 << 20
    semantics: Literal["per_rank"] = "per_rank"
    reduce: Literal["mean", "sum"] = "mean"
    sync_state: bool = True
    broadcast_buffers: bool = False
    mixed_precision: MixedPrecision | None = None
    input_batch_dim: int = 0

    def __post_init__(self) -> None:
        choices = {"style": tuple(STYLES), "semantics": ("per_rank",), "reduce": ("mean", "sum")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"DataParallel({name}={getattr(self, name)!r})",
                    f"{name} one of {', '.join(map(repr, allowed))}",
                    "correct the name",
                )

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes used on `mesh`.

        Raises:
            MeshError: an axis does not exist.
            PlanError: `hybrid` on fewer than two axes.
        """
        names = mesh.names if self.axis is None else (self.axis,) if isinstance(self.axis, str) else self.axis
        for name in names:
            mesh.axis_size(name)
        if self.style == "hybrid" and len(names) < 2:
            raise PlanError(
                f"style 'hybrid' on mesh {mesh} with axes {', '.join(names)}",
                "two axes: one to replicate on and one to shard on",
                'give mesh="replicate=2,shard=2"',
            )
        return names

    def resting(self, graph: TrainGraph, mesh: Mesh) -> dict[str, Resting]:
        """Where each parameter and its optimizer state rest."""
        return {i.name: STYLES[self.style](i, mesh, self.axes(mesh)) for i in graph.inputs if i.role is Role.PARAM}


def _split(given: Input, axes: tuple[str, ...]) -> Layout:
    """Dim 0 cut by all axes; a 0-dim tensor stays whole."""
    ndim = len(given.meta.shape)
    return sharded(ndim, 0, *axes) if ndim else replicated(0)


def _whole(given: Input) -> Layout:
    return replicated(len(given.meta.shape))


def _replicate(given: Input, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(_whole(given), _whole(given))


def _zero(given: Input, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(_whole(given), _split(given, axes))


def _fully_shard(given: Input, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(_split(given, axes), _split(given, axes))


def _default(given: Input, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    ranks = 1
    for axis in axes:
        ranks *= mesh.axis_size(axis)
    even = bool(given.meta.shape) and given.meta.shape[0] % ranks == 0
    return _fully_shard(given, mesh, axes) if even else _replicate(given, mesh, axes)


def _hybrid(given: Input, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return _fully_shard(given, mesh, axes[-1:])


STYLES: dict[str, Callable[[Input, Mesh, tuple[str, ...]], Resting]] = {
    "replicate": _replicate,
    "zero1": _zero,
    "zero2": _zero,
    "fully_shard": _fully_shard,
    "default": _default,
    "hybrid": _hybrid,
}
