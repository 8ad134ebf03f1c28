"""Fits a deep step into a budget of memory by short ones: what is made again of a layer is made again of its equals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import numpy as np
import torch
from torch.fx import Node

from ..cost.memory import peak_memory
from ..cost.simulation import simulate
from ..graph import meta
from ..graph.graph import LocalGraph, operands
from ..passes.base import Pass, run_passes
from ..passes.bucket_sizes import resized, tighter
from ..passes.recompute import held_by
from ..passes.remat_frontier import choices
from ..passes.rematerialize import made_again
from ..passes.saved_tensors import SavedTensors
from ..tuning import TUNING
from .fit import Finish
from .short import Short

_NEARLY = TUNING.nearly_fits
_COPY = torch.ops.aten.clone.default
Kind = int


@dataclass
class Values:
    """The saved values of one program by kind: values of equal layers that are equals are of one kind."""

    short: Short
    local: LocalGraph
    gathers: bool
    saved: SavedTensors = field(init=False)

    def __post_init__(self) -> None:
        self.saved = SavedTensors(self.local, gathers=self.gathers)

    @cached_property
    def places(self) -> dict[Node, tuple[int, Kind]]:
        """Block and kind of each node."""
        return _kinds(self.local, self.short)

    @cached_property
    def kinds(self) -> dict[Kind, list[tuple[int, str]]]:
        """Of each kind, the block (-1 outside) and the name of every value."""
        found: dict[Kind, list[tuple[int, str]]] = {}
        for value in self.saved.candidates:
            block, kind = self.places[value.storage.node]
            found.setdefault(hash((kind, value.storage.index)), []).append((block, value.name))
        return found

    @cached_property
    def of(self) -> dict[str, Kind]:
        """The kind of each value."""
        return {name: kind for kind, values in self.kinds.items() for _, name in values}

    def names(self, kinds: Sequence[Kind], partly: Sequence[Kind] = (), blocks: int = 0) -> list[str]:
        """Of all values of `kinds`, and of those of `partly` in the first so many blocks."""
        found = [name for kind in kinds for _, name in self.kinds.get(kind, ())]
        return found + [name for kind in partly for block, name in self.kinds.get(kind, ()) if block < blocks]


def _kinds(local: LocalGraph, short: Short) -> dict[Node, tuple[int, Kind]]:
    """Block and kind of each node: of the captured step by slot, of what partitioning made by what it reads."""
    places = {node.name: at for node, at in short.repeats.places.items()}
    found: dict[Node, tuple[int, Kind]] = {}
    seen: dict[tuple[int, Kind], int] = {}
    for node in local.graph.nodes:
        if node.op == "output":
            break
        whole, _, part = node.name.partition("__")
        captured = node.target is not _COPY  # what partitioning copies takes the names of copies that were captured
        at = (places.get(node.name) or places.get(whole)) if captured else None
        reads = [found[n] for n in operands(node)]
        if at is not None:
            block, kind = at[0], hash((at[1], part))
        else:
            block = next((b for b, _ in reads if b >= 0), -1)
            kind = hash((str(node.target), *(k for _, k in reads), meta.tensors(node), meta.is_backward(node)))
        number = seen[block, kind] = seen.get((block, kind), -1) + 1
        found[node] = block, hash((kind, number))
    return found


@dataclass(frozen=True)
class Fit:
    """What is made again: all values of `kinds`, and those of `partly` in the first `blocks` of all equal layers; in
    the order of `passes`. `step_us` and `peak_bytes` are extrapolated.
    """

    passes: tuple[Pass, ...]
    kinds: tuple[Kind, ...]
    partly: tuple[Kind, ...]
    blocks: int
    step_us: float
    peak_bytes: float


@dataclass
class ShortFit:
    """Looks for the values to be made again on two short programs, with so many blocks each."""

    short: Short
    pair: tuple[int, int]
    programs: tuple[LocalGraph, LocalGraph]
    finish: Finish
    gathers: bool
    known: dict[object, tuple[float, float]] = field(default_factory=dict[object, tuple[float, float]])

    def __post_init__(self) -> None:
        few, more = self.programs
        self.few, self.more = Values(self.short, few, self.gathers), Values(self.short, more, self.gathers)

    def longest_us(self, budget_bytes: int) -> float | None:
        """What a step that fits takes at most: with all made again that helps; None where that does not fit either."""
        for way in (tighter(self.finish.passes)[0], self.least().passes):
            us, peak = self._costs(way, self.chain[-1])
            if peak <= budget_bytes:
                return us
        return None

    def best(self, budget_bytes: int) -> Fit:
        """The shortest step that fits, where one does, in the first order that allows one: others hold less and wait
        longer.
        """
        found = (self._within(way, budget_bytes) for way in tighter(self.finish.passes))
        return next(one for one in found if one is not None)

    def least(self) -> Fit:
        """All made again that helps, in the order that holds the least."""
        way = tighter(self.finish.passes)[-1]
        us, peak = self._costs(way, self.chain[-1])
        return Fit(way, self.chain[-1], (), 0, us, peak)

    @cached_property
    def chain(self) -> list[tuple[Kind, ...]]:
        """Sets of kinds, each with more than the one before, in the order in which a search on the longer one goes in
        which the second block stands for all that are left out: what it keeps weighs as much as what they keep.
        """
        saved, times = self.more.saved, self.short.count - self.pair[1] + 1
        held = np.array(held_by(self.more.local), dtype=np.int64)
        for storage in saved.storages:
            node, last = storage.node, storage.last
            kept = saved.last_segment[id(storage)] > saved.segment.get(node, 0)
            if self.more.places[node][0] == 1 and kept and storage.first >= 0 and last is not None:
                held[storage.first : last + 1] += storage.size_bytes * (times - 1)
                storage.size_bytes *= times
        alike = {node: times for node, (block, _) in self.more.places.items() if block == 1}
        path = choices(saved, held.tolist(), self.short.hardware, times=alike)
        found: list[tuple[Kind, ...]] = [()]
        for name in path[-1].names:
            kind = self.more.of[name]
            if kind not in found[-1] and kind in self.few.kinds:
                found.append((*found[-1], kind))
        return found

    def _within(self, passes: tuple[Pass, ...], budget_bytes: int) -> Fit | None:
        """The first of `chain` that fits; of what it has more than the one before, as many layers as must be."""
        chain, low, high = self.chain, -1, len(self.chain) - 1
        if self._costs(passes, chain[high])[1] > budget_bytes:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._costs(passes, chain[middle])[1] <= budget_bytes
            low, high = (low, middle) if fits else (middle, high)
        us, peak = self._costs(passes, chain[high])
        if low < 0:
            return Fit(passes, chain[high], (), 0, us, peak)
        before_us, before = self._costs(passes, chain[low])
        wanted = (before - budget_bytes * _NEARLY) / max(before - peak, 1.0)
        blocks = min(ceil(wanted * self.short.count), self.short.count)
        part = blocks / self.short.count
        more = tuple(kind for kind in chain[high] if kind not in chain[low])
        us, peak = before_us + part * (us - before_us), before + part * (peak - before)
        return Fit(passes, chain[low], more, blocks, us, peak)

    def _costs(self, passes: tuple[Pass, ...], kinds: tuple[Kind, ...]) -> tuple[float, float]:
        """Microseconds and peak of the whole step with these made again."""
        key = passes, kinds
        if key not in self.known:
            self.known[key] = self._simulated(passes, kinds)
        return self.known[key]

    def _simulated(self, passes: tuple[Pass, ...], kinds: tuple[Kind, ...]) -> tuple[float, float]:
        made = [made_again(v.saved, v.names(kinds)) for v in (self.few, self.more)]
        passes = resized(passes, whole=self.short.carried(self.pair, made))
        done = [run_passes(local, passes) for local in made]
        took, peaks = (
            [simulate(p, self.short.hardware).step_us for p in done],
            [peak_memory(p).size_bytes for p in done],
        )
        return self.short.whole(self.pair, (took[0], took[1])), self.short.whole(self.pair, (peaks[0], peaks[1]))

    def whole(self, local: LocalGraph, fit: Fit) -> tuple[LocalGraph, tuple[str, ...]] | None:
        """The whole step `local` with what `fit` says made again, and the names of that; None where its values are not
        those of the short ones, as many times as there are layers.
        """
        values = Values(self.short, local, self.gathers)
        for kind in (*fit.kinds, *fit.partly):
            sizes = [len(one.kinds.get(kind, ())) for one in (self.few, self.more, values)]
            if sizes[2] != round(self.short.whole(self.pair, (sizes[0], sizes[1]))):
                return None
        names = values.names(fit.kinds, fit.partly, fit.blocks)
        made = made_again(values.saved, names)
        return run_passes(made, fit.passes), tuple(names)
