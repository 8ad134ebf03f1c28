"""Calls of other sizes: what their sizes are, whether a program that was made with symbols is right for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _torch
from ..sizes import SizeGuard, SizeGuards, evaluator
from .step_inputs import BatchSharder, BatchSizes, StepInputs

_MOST_PROVED = 4096  # kinds of sizes that are known to fit; more are compared again
Dims = Mapping[str, tuple[int, ...]]
"""Dims of batch tensors, by name."""


class SizeCheck:
    """Compares the sizes of calls with the guards of one program. `dims` are those that a call may choose, by leaf.
    `besides` says what else stands against sizes that are new; empty if nothing does.

    `prove` reads the guards, once all stages have compared what they compare.
    """

    def __init__(self, symbols: _torch.Symbols, inputs: StepInputs) -> None:
        self._symbols, self.record = symbols, symbols.record
        record = self.record
        at = {name: i for i, name in enumerate(inputs.names)}
        self.dims: dict[int, tuple[int, ...]] = {}
        for name, dim in record.dims.values():
            self.dims[at[name]] = (*self.dims.get(at[name], ()), dim)
        self._names, self._leaves, self._sharder = inputs.names, tuple(self.dims), inputs.sharder
        self._places = [(at[name], name, dim) for name, dim in record.dims.values()]
        chosen = set(record.dims.values())
        self._fixed = [
            (name, dim, size)
            for name, shape in inputs.global_shapes.items()
            for dim, size in enumerate(shape)
            if (name, dim) not in chosen
        ]
        self._own = [
            (i, dim, size)
            for i, dims in self.dims.items()
            for dim, size in enumerate(inputs.leaves[i].shape)
            if dim not in dims
        ]
        self.batch_sizes = inputs.sizes
        self._proved: dict[Any, tuple[int, ...]] = {}
        self._last: Any = None
        self.besides: Callable[[Mapping[str, int]], str] | None = None
        self._terms: list[SizeGuard] = []
        self._step_holds = _holding(symbols.traced, record)

    def prove(self) -> None:
        """Read the guards of the program, which now is complete."""
        self._terms, self._last = self._symbols.guards(), None
        self._proved.clear()
        self._holds = _holding(self._terms, self.record)

    def check(self, leaves: Sequence[Any], sizes: BatchSizes | None) -> str:
        """Why the program is not right for these sizes; empty where it is, and then it runs with them."""
        key = (sizes, *[leaves[i].shape for i in self._leaves])
        if key == self._last:
            return ""
        now = self._proved.get(key)
        if now is None:
            for i, dim, size in self._own:
                if leaves[i].shape[dim] != size:
                    return f"dim {dim} of argument {self._names[i]} is {leaves[i].shape[dim]}, it was {size}"
            shapes = self._whole(leaves, sizes)
            for name, dim, size in self._fixed:
                if shapes[name][dim] != size:
                    return f"dim {dim} of the whole of {name} is {shapes[name][dim]}, it was {size}"
            now = tuple(shapes[name][dim] if name in shapes else leaves[i].shape[dim] for i, name, dim in self._places)
            if (broken := self.broken(now)) is not None:
                where = f", at {broken.where}" if broken.where else ""
                return f"sizes break the guard {self.record.shown(broken.text)}{where}"
            if self.besides and (why := self.besides(dict(zip(self.record.dims, now, strict=True)))):
                return why
            if len(self._proved) >= _MOST_PROVED:
                self._proved.clear()
            self._proved[key] = now
        self.record.now, self.batch_sizes, self._last = now, sizes, key
        return ""

    def broken(self, now: Sequence[int]) -> SizeGuard | None:
        """The first guard that does not hold for the sizes of all symbols."""
        outcomes = self._holds(*now)
        return next((term for term, holds in zip(self._terms, outcomes, strict=True) if not holds), None)

    def broken_at(self, lengths: Mapping[tuple[str, int], int]) -> SizeGuard | None:
        """The first comparison of the step that ends otherwise where these dims have other lengths than in the call
        that was checked. Ranks agree on that; what their programs compare besides may differ.
        """
        pairs = zip(self.record.dims.values(), self.record.now, strict=True)
        outcomes = self._step_holds(*(lengths.get(place, size) for place, size in pairs))
        return next((term for term, holds in zip(self._symbols.traced, outcomes, strict=True) if not holds), None)

    def _whole(self, leaves: Sequence[Any], sizes: BatchSizes | None) -> Mapping[str, tuple[int, ...]]:
        sharder: BatchSharder | None = self._sharder
        return sharder.global_shapes(leaves, sizes) if sharder is not None and sizes else {}

    def row_major(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves of a call that was checked, row-major where sizes differ; this rank's part of a shared batch."""
        if self._sharder is not None and self.batch_sizes:
            leaves = self._sharder.shard(leaves, self.batch_sizes)
        if all(leaves[i].is_contiguous() for i in self._leaves):
            return leaves
        return [leaf.contiguous() if i in self.dims else leaf for i, leaf in enumerate(leaves)]


def _holding(terms: Sequence[SizeGuard], record: SizeGuards) -> Callable[..., tuple[bool, ...]]:
    """A function from sizes to whether each guard holds."""
    return evaluator([f"({term.text})" for term in terms], list(record.dims))


def other_dims(before: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]]) -> Dims:
    """The dims in which batch tensors of as many dims differ, by name; empty if one has other dims."""
    if before.keys() != now.keys() or any(len(before[name]) != len(shape) for name, shape in now.items()):
        return {}
    changed = {n: tuple(d for d, size in enumerate(shape) if size != before[n][d]) for n, shape in now.items()}
    return {name: dims for name, dims in changed.items() if dims}
