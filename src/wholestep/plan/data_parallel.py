"""Data-parallel styles: each is a choice of where parameters and optimizer state rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from ..errors import PlanError
from ..graph.graph import Input, Role, TrainGraph
from ..layout import Layout
from ..mesh import Mesh
from .plan import Decision
from .strategy import BatchCut, Pins, Resting

Style = Literal["replicate", "zero1", "zero2", "fully_shard", "default", "hybrid"]


BatchDim = int | Mapping[str, int | None]


@dataclass(frozen=True)
class DataParallel:
    """Batches are cut over ranks. `per_rank`: each rank runs the step on its own, gradients are averaged, as under DDP
    and FSDP. `global`: the step computes what one device computes on the whole batch.

    Args:
        style: where parameters and optimizer state rest: `replicate` (DDP), `zero1`, `zero2`, `fully_shard` (ZeRO-3,
            FSDP), `default` (shard what divides evenly, replicate the rest), `hybrid` (shard on the last axis,
            replicate on the others).
        axis: the mesh axis or axes to use; all of them by default.
        reshard_after_forward: gather sharded parameters again for the backward (True), keep them (False), or keep up to
            `keep_gathered_bytes` of them, those that the backward needs first (None).
        keep_gathered_bytes: see above.
        semantics: `per_rank` or `global`, see above.
        inputs: what a rank is given: its `local` part of the batch, or the `global` batch, of which it takes its part
            (`global` semantics only). Parts may differ in size.
        uneven_batches: under `global` with local inputs, ranks tell each other their batch sizes at every call. Give
            False where they are always equal: sizes are then taken to be the same on all ranks.
        reduce: `mean` over ranks, as DDP, or `sum` (`per_rank` only: `global` needs neither).
        sync_state: start from the first rank's parameters, buffers and optimizer state, as DDP does.
        broadcast_buffers: every call starts from the first rank's buffers.
        input_batch_dim: the dim of batch tensors that counts samples; or by argument, globs allowed, None for tensors
            that are the same on all ranks: `{"mask": None, "*": 0}`. Tensors without that dim are the same everywhere.

    Example:
        >>> plan = ws.plan(graph, "dp=8", ws.DataParallel("zero1", semantics="global"))
        >>> step = ws.compile(train_step, parallel=ws.DataParallel("fully_shard", reshard_after_forward=True))
    """

    style: Style = "fully_shard"
    axis: str | tuple[str, ...] | None = None
    reshard_after_forward: bool | None = None
    keep_gathered_bytes: int = 64 << 20
    semantics: Literal["per_rank", "global"] = "per_rank"
    inputs: Literal["local", "global"] = "local"
    uneven_batches: bool = True
    reduce: Literal["mean", "sum"] = "mean"
    sync_state: bool = True
    broadcast_buffers: bool = False
    input_batch_dim: BatchDim = 0

    def __post_init__(self) -> None:
        choices = {
            "style": tuple(STYLES), "semantics": ("per_rank", "global"), "reduce": ("mean", "sum"),
            "inputs": ("local", "global"),
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"DataParallel({name}={getattr(self, name)!r})",
                    f"{name} one of {', '.join(map(repr, allowed))}",
                    "correct the name",
                )

        if self.semantics == "per_rank" and self.inputs == "global":
            raise PlanError(
                'inputs="global" with semantics="per_rank"',
                "a batch of its own for each rank, or global semantics",
                'give semantics="global"',
            )
        if self.semantics == "global" and (self.reduce != "mean" or self.broadcast_buffers):
            option = "reduce" if self.reduce != "mean" else "broadcast_buffers"
            raise PlanError(
                f'{option}={getattr(self, option)!r} with semantics="global"',
                "nothing: the step computes what one device computes, buffers are the same on all ranks",
                f"drop {option}",
            )

    @property
    def shares_batches(self) -> bool:
        """Under `global`."""
        return self.semantics == "global"

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """Under `global`, the dim that counts samples."""
        dim = batch_dim(self.input_batch_dim, name, ndim) if self.semantics == "global" else None
        return None if dim is None else BatchCut(dim, self.axes(mesh))

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

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Where each parameter and its optimizer state rest."""
        choose, axes = STYLES[self.style], self.axes(mesh)
        params = (i for i in graph.inputs if i.role is Role.PARAM)
        return {i.name: choose(i, before[i.name].param, mesh, axes) for i in params}

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """None: activations stay where the batch puts them."""
        return Pins()

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Nothing more is promised."""

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"{self.style} on {', '.join(self.axes(mesh))}, {self.how}"

    @property
    def how(self) -> str:
        """What becomes of gradients, in words."""
        return "global" if self.semantics == "global" else f"{self.reduce} over ranks"

    @property
    def gathered_again(self) -> tuple[str, ...]:
        """Parameters that are gathered again for the backward, whatever is kept of others: none by name."""
        return ()


def batch_dim(wanted: BatchDim, name: str, ndim: int) -> int | None:
    """The dim of the batch tensor `name` that counts samples; None when it is the same on all ranks.

    Raises:
        PlanError: a dim given for this tensor by name that it does not have.
    """
    if isinstance(wanted, int):
        return wanted % ndim if -ndim <= wanted < ndim else None
    key = next((k for k in wanted if fnmatchcase(name, k)), None)
    dim = None if key is None else wanted[key]
    if dim is not None and not -ndim <= dim < ndim and key == name:
        raise PlanError(
            f"input_batch_dim={dim} is out of range for {name!r} with {ndim} dims",
            "a dim it has, or None",
            "correct it",
        )
    return dim % ndim if dim is not None and -ndim <= dim < ndim else None


def _split(have: Layout, axes: tuple[str, ...]) -> Layout:
    """Dim 0 cut by all axes, inside what cuts it already; a 0-dim tensor stays whole."""
    return Layout(((*have.dims[0], *axes), *have.dims[1:])) if have.dims else have


def _replicate(given: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(have, have)


def _zero(given: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(have, _split(have, axes))


def _fully_shard(given: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return Resting(_split(have, axes), _split(have, axes))


def _default(given: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    ranks = prod(mesh.axis_size(axis) for axis in axes)
    rows = have.local_shape(given.meta.shape, mesh, mesh.coordinate(0))[:1]
    return _fully_shard(given, have, mesh, axes) if rows and rows[0] % ranks == 0 else Resting(have, have)


def _hybrid(given: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Resting:
    return _fully_shard(given, have, mesh, axes[-1:])


STYLES: dict[str, Callable[[Input, Layout, Mesh, tuple[str, ...]], Resting]] = {
    "replicate": _replicate,
    "zero1": _zero,
    "zero2": _zero,
    "fully_shard": _fully_shard,
    "default": _default,
    "hybrid": _hybrid,
}
