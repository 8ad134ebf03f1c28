"""Where data-parallel ranks keep a parameter and its state, and what a step sends and holds for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...hardware.hardware import Hardware
from ...mesh import Mesh
from ..storage_styles import STYLES, StorageStyle
from .prices import bulk_us, copy_us
from .problem import Load

_FORWARD, _BACKWARD, _UPDATE = range(3)


@dataclass(frozen=True)
class Storage:
    """How data-parallel ranks store a parameter: as `style` does; gathered parameters are kept, or gathered `again` for
    the backward.
    """

    name: str
    style: StorageStyle
    again: bool = False

    @property
    def whole(self) -> bool:
        """Every rank (of a group) stores the whole parameter."""
        return not self.style.gathers_parameters

    @property
    def whole_state(self) -> bool:
        """Every rank stores the whole state."""
        return not self.style.shards_state

    @property
    def grouped(self) -> bool:
        """Parts over the last axis only."""
        return self.style.grouped

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


def _storages() -> dict[str, Storage]:
    """Those of the styles that `Auto` tries. Styles that differ in gradients alone store a parameter alike."""
    found: dict[str, Storage] = {}
    for style in (style for style in STYLES.values() if style.searched and not style.shards_gradients):
        gathered = [Storage(f"{style.name}, kept", style), Storage(f"{style.name}, gathered again", style, again=True)]
        found |= {one.name: one for one in (gathered if style.gathers_parameters else [Storage(style.name, style)])}
    return found


_BY_NAME = _storages()
STORAGES = tuple(_BY_NAME.values())


def storage_named(name: str) -> Storage:
    """One of `STORAGES`."""
    return _BY_NAME[name]


def storages_of(style: StorageStyle) -> tuple[Storage, ...]:
    """How a style keeps most parameters: gathered parameters kept, or gathered again."""
    flags = (not style.gathers_parameters, not style.shards_state, style.grouped)
    return tuple(one for one in STORAGES if (one.whole, one.whole_state, one.grouped) == flags)


def of_style(style: StorageStyle, again: bool | None) -> Storage:
    """How a style keeps most parameters; `again`: `reshard_after_forward`."""
    return storages_of(style)[-1 if again else 0]


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
