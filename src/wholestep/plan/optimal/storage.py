"""Where data-parallel ranks keep a parameter and its state, and what a step sends and holds for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...hardware.hardware import Hardware
from ...mesh import Mesh
from .prices import bulk_us, copy_us
from .problem import Load

_FORWARD, _BACKWARD, _UPDATE = range(3)


@dataclass(frozen=True)
class Storage:
    """One way to keep a parameter over data-parallel ranks: `whole` parameters, or parts of them; `whole_state`, or
    parts of it; parts are gathered once and kept, or `again` for the backward. `grouped`: parts over the last axis
    only, alike on the others.
    """

    name: str
    whole: bool = False
    whole_state: bool = False
    again: bool = False
    grouped: bool = False

    def load(self, sizes: Sizes, hardware: Hardware, mesh: Mesh, axes: Sequence[str]) -> Load:
        """What a parameter of these sizes adds to a step of a rank, its axis of tensor parallelism left out."""
        inside, across = (axes[-1:], axes[:-1]) if self.grouped else (axes, ())
        ranks = prod(mesh.axis_size(a) for a in inside)
        sent = [0.0, 0.0, 0.0]
        if self.whole_state:
            sent[_BACKWARD] += sum(bulk_us(hardware, "all_reduce", sizes.grad, mesh, a) for a in inside)
        elif sizes.grad:
            sent[_BACKWARD] += _through(hardware, "reduce_scatter", sizes.grad, mesh, inside)
            sent[_BACKWARD] += sum(bulk_us(hardware, "all_reduce", sizes.grad / ranks, mesh, a) for a in across)
        if self.whole and not self.whole_state and sizes.grad:
            sent[_UPDATE] += _through(hardware, "all_gather", sizes.param, mesh, inside)
        if not self.whole:
            gathered = _through(hardware, "all_gather", sizes.param, mesh, inside)
            sent[_FORWARD] += gathered
            sent[_BACKWARD] += gathered if self.again else 0.0
        state_share = 1 if self.whole_state else ranks
        rest = sizes.param / (1 if self.whole else ranks) + sizes.state / state_share
        kept = 0.0 if self.whole or self.again or ranks == 1 else sizes.param
        copied = copy_us(hardware, sizes.param) if any(sent) else 0.0
        spent = (copied if sent[0] else 0.0, copied, copied if sent[2] else 0.0)
        return Load(spent, stored=(sent[0], sent[1], sent[2]), rest=rest, kept=kept, made=sizes.grad / state_share)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one parameter, its optimizer state and its gradient."""

    param: float
    state: float
    grad: float


REPLICATE = Storage("replicate", whole=True, whole_state=True)
ZERO1 = Storage("zero1", whole=True)
KEPT = Storage("fully_shard, kept")
AGAIN = Storage("fully_shard, gathered again", again=True)
GROUPED = Storage("hybrid, kept", grouped=True)
GROUPED_AGAIN = Storage("hybrid, gathered again", again=True, grouped=True)
STORAGES = (REPLICATE, ZERO1, KEPT, AGAIN, GROUPED, GROUPED_AGAIN)


def of_style(style: str, again: bool | None) -> Storage:
    """How a style of `DataParallel` keeps most parameters."""
    if style == "replicate":
        return REPLICATE
    if style == "hybrid":
        return GROUPED_AGAIN if again else GROUPED
    return ZERO1 if style in ("zero1", "zero2") else AGAIN if again else KEPT


def share_of(storage: Storage, mesh: Mesh, axes: Sequence[str]) -> int:
    """In how many parts the update of a parameter is divided."""
    over = axes[-1:] if storage.grouped else axes
    return 1 if storage.whole_state else prod(mesh.axis_size(a) for a in over)


def _through(hardware: Hardware, kind: str, size: float, mesh: Mesh, axes: Sequence[str]) -> float:
    """Along one axis after the other, the last first: what is left is a part of it."""
    total = 0.0
    for axis in reversed(axes):
        total += bulk_us(hardware, kind, size, mesh, axis)
        size /= mesh.axis_size(axis)
    return total
