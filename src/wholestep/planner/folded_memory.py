"""Fits a step with many equal layers into a budget on its folded steps.

Tensors are chosen by class: a tensor that is rematerialized in one layer is rematerialized in every equal layer. The
choice becomes a `Fitting` of the whole step, which `FitMemory` applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import numpy as np
import torch
from torch.fx import Node

from ..cost.simulation import simulate
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import operands
from ..passes.base import run_passes
from ..passes.bucket_sizes import smaller_buckets
from ..passes.context import Context, Fitting
from ..passes.fit_memory import FitMemory
from ..passes.remat_frontier import choices, held_by
from ..passes.rematerialize import rematerialized
from ..passes.saved_tensors import SavedTensors
from ..tuning import TUNING
from .folded_step import FoldedStep

_COPY = torch.ops.aten.clone.default
TensorClass = int


@dataclass
class SavedByClass:
    """The saved tensors of one program by class: equal tensors of equal layers are in one class."""

    folded: FoldedStep
    local: LocalGraph
    gathers: bool

    def __post_init__(self) -> None:
        self.saved = SavedTensors(self.local, gathers=self.gathers, activations=True)

    @cached_property
    def places(self) -> dict[Node, tuple[int, TensorClass]]:
        """Block (-1 outside) and class of each node: by its slot, or by its operands if partitioning made it."""
        places = {node.name: at for node, at in self.folded.repeats.places.items()}
        by_node: dict[Node, tuple[int, TensorClass]] = {}
        seen: dict[tuple[int, TensorClass], int] = {}
        for node in self.local.graph.nodes:
            if node.op == "output":
                break
            base, _, part = node.name.partition("__")
            captured = node.target is not _COPY  # partitioning gives its copies the names of captured copies
            at = (places.get(node.name) or places.get(base)) if captured else None
            reads = [by_node[n] for n in operands(node)]
            if at is not None:
                block, kind = at[0], hash((at[1], part))
            else:
                block = next((b for b, _ in reads if b >= 0), -1)
                kind = hash((str(node.target), *(k for _, k in reads), meta.tensors(node), meta.is_backward(node)))
            number = seen[block, kind] = seen.get((block, kind), -1) + 1
            by_node[node] = block, hash((kind, number))
        return by_node

    @cached_property
    def classes(self) -> dict[TensorClass, list[tuple[int, str]]]:
        """The block and the name of every tensor of a class."""
        by_class: dict[TensorClass, list[tuple[int, str]]] = {}
        for value in self.saved.candidates:
            block, kind = self.places[value.storage.node]
            by_class.setdefault(hash((kind, value.storage.index)), []).append((block, value.name))
        return by_class

    @cached_property
    def class_of(self) -> dict[str, TensorClass]:
        """The class of each tensor."""
        return {name: kind for kind, tensors in self.classes.items() for _, name in tensors}

    def names(self, classes: Sequence[TensorClass], partly: Sequence[TensorClass] = (), blocks: int = 0) -> list[str]:
        """All tensors of `classes`, and those of `partly` in the first `blocks`."""
        names = [name for kind in classes for _, name in self.classes.get(kind, ())]
        return names + [name for kind in partly for block, name in self.classes.get(kind, ()) if block < blocks]


@dataclass(frozen=True)
class FoldedFitting:
    """A `Fitting` by class: `classes` are rematerialized in all layers, `partly` in the first `blocks` equal ones.

    `way` is the number of the `smaller_buckets` passes; `step_us` and `peak_bytes` of the whole step are extrapolated.
    """

    way: int
    classes: tuple[TensorClass, ...]
    partly: tuple[TensorClass, ...]
    blocks: int
    step_us: float
    peak_bytes: float


@dataclass
class FoldedFit:
    """Chooses classes on the two folded programs of `pair` blocks; `fit` has the budget and the passes."""

    folded: FoldedStep
    pair: tuple[int, int]
    programs: tuple[LocalGraph, LocalGraph]
    fit: FitMemory
    costs: dict[object, tuple[float, float]] = field(default_factory=dict[object, tuple[float, float]])

    def __post_init__(self) -> None:
        self.smaller, self.larger = (SavedByClass(self.folded, local, self.fit.gathers) for local in self.programs)
        self.ways = range(len(smaller_buckets(self.fit.after)))

    def longest_us(self) -> float | None:
        """The time of the step with all classes rematerialized; None where that is over the budget."""
        for way in (0, self.ways[-1]):
            us, peak = self._costs(way, self.chain[-1])
            if peak <= self.fit.budget_bytes:
                return us
        return None

    def best(self) -> FoldedFitting:
        """The shortest step within the budget, where there is one, with the largest buckets that allow one."""
        return next(fitting for fitting in map(self._within, self.ways) if fitting is not None)

    def least(self) -> FoldedFitting:
        """All classes rematerialized, with the smallest buckets."""
        us, peak = self._costs(self.ways[-1], self.chain[-1])
        return FoldedFitting(self.ways[-1], self.chain[-1], (), 0, us, peak)

    @cached_property
    def chain(self) -> list[tuple[TensorClass, ...]]:
        """Sets of classes, each a superset of the one before, in the order of the rematerialization frontier of the
        longer program. Its second block has the weight of all blocks that are folded away.
        """
        saved, times = self.larger.saved, self.folded.count - self.pair[1] + 1
        held_bytes = np.array(held_by(self.larger.local), dtype=np.int64)
        for storage in saved.storages:
            node, last = storage.node, storage.last
            outlives = saved.last_segment[id(storage)] > saved.segment.get(node, 0)
            if self.larger.places[node][0] == 1 and outlives and storage.first >= 0 and last is not None:
                held_bytes[storage.first : last + 1] += storage.size_bytes * (times - 1)
                storage.size_bytes *= times
        weights = {node: times for node, (block, _) in self.larger.places.items() if block == 1}
        path = choices(saved, held_bytes.tolist(), self.folded.hardware, times=weights)
        class_sets: list[tuple[TensorClass, ...]] = [()]
        for name in path[-1].names:
            kind = self.larger.class_of[name]
            if kind not in class_sets[-1] and kind in self.smaller.classes:
                class_sets.append((*class_sets[-1], kind))
        return class_sets

    def _within(self, way: int) -> FoldedFitting | None:
        """The first of `chain` within the budget; its last class in as many layers as the budget needs."""
        chain, low, high, budget = self.chain, -1, len(self.chain) - 1, self.fit.budget_bytes
        if self._costs(way, chain[high])[1] > budget:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._costs(way, chain[middle])[1] <= budget
            low, high = (low, middle) if fits else (middle, high)
        us, peak = self._costs(way, chain[high])
        if low < 0:
            return FoldedFitting(way, chain[high], (), 0, us, peak)
        before_us, before = self._costs(way, chain[low])
        needed_share = (before - budget * TUNING.nearly_fits) / max(before - peak, 1.0)
        blocks = min(ceil(needed_share * self.folded.count), self.folded.count)
        part = blocks / self.folded.count
        partly = tuple(kind for kind in chain[high] if kind not in chain[low])
        us, peak = before_us + part * (us - before_us), before + part * (peak - before)
        return FoldedFitting(way, chain[low], partly, blocks, us, peak)

    def _costs(self, way: int, classes: tuple[TensorClass, ...]) -> tuple[float, float]:
        """Microseconds and peak bytes of the whole step with `classes` rematerialized."""
        if (way, classes) not in self.costs:
            programs = [rematerialized(step.saved, step.names(classes)) for step in (self.smaller, self.larger)]
            folded, passes = self.folded, smaller_buckets(self.fit.after)[way]
            context = Context(traffic=folded.carried(self.pair, programs))
            a, b = (run_passes(local, passes, context=context) for local in programs)
            a_us, b_us = (simulate(local, folded.hardware, folded.software).step_us for local in (a, b))
            peaks = self.fit.peak(a).size_bytes, self.fit.peak(b).size_bytes
            self.costs[way, classes] = folded.whole(self.pair, (a_us, b_us)), folded.whole(self.pair, peaks)
        return self.costs[way, classes]

    def unfolded(self, local: LocalGraph, fitting: FoldedFitting) -> Fitting | None:
        """The fitting of the whole step `local`; None where a class does not have a tensor for each equal layer."""
        full = SavedByClass(self.folded, local, self.fit.gathers)
        for kind in (*fitting.classes, *fitting.partly):
            smaller, larger, in_full = (len(step.classes.get(kind, ())) for step in (self.smaller, self.larger, full))
            if in_full != self.folded.whole(self.pair, (smaller, larger)):
                return None
        return Fitting(fitting.way, tuple(full.names(fitting.classes, fitting.partly, fitting.blocks)))
