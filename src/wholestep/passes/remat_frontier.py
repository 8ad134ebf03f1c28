"""A rematerialization frontier: drops saved values one by one, the fewest added microseconds per byte first.

A dropped value is recomputed from tensors that are alive: parameters, the batch, kept values. An operand that several
dropped values need is recomputed once, and stays alive from its first reader to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from torch.fx import Node

from ..cost.compute import node_us
from ..cost.memory import bytes_held
from ..cost.simulation import host_us, sent_us
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, operands
from ..graph.storage import Storage
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .reinplace import Reinplace
from .saved_tensors import SavedTensor, SavedTensors

Array = np.ndarray[Any, np.dtype[np.int64]]
Span = tuple[int, int]
_Spot = tuple[int, int]  # id of a storage, and the segment in which it is recomputed; -1 for the original


@dataclass(frozen=True)
class RematChoice:
    """Names of values to rematerialize, and the expected peak."""

    names: tuple[str, ...]
    peak_bytes: int


def choices(
    saved: SavedTensors, curve: Sequence[int], hardware: Hardware, wire_price: float = 1.0,
    times: Mapping[Node, int] | None = None, among: Sequence[SavedTensor] | None = None,
    load: Callable[[Array], Array] | None = None,
) -> list[RematChoice]:  # fmt: skip
    """The frontier, cheapest choice first; `curve` is the live bytes at each call of the unchanged step.

    A gather costs `wire_price` of the time for which it occupies the link. `times`: how many equal calls a call of a
    layer-folded step represents. `among`: the values to choose from, by default all candidates. `load`: what a rank
    holds at each call, from what the calls of one piece hold.
    """
    among = saved.candidates if among is None else among
    search = _Search(saved, hardware, wire_price, np.array(curve, dtype=np.int64), times or {}, among, load or _alone)
    frontier = [search.choice()]
    first, rest = frontier[0].peak_bytes, sum(s.size_bytes for s in saved.storages if s.first < 0)
    for stage in range(1, TUNING.remat_stages + 1):
        target = first - (first - rest) * stage // TUNING.remat_stages
        frontier += search.reach(target)
        if search.excess(search.curve, target):
            break
    return frontier


def held_by(local: LocalGraph) -> list[int]:
    """Live bytes at each call of the functional graph `local` with its updates in place."""
    after = Reinplace()(local)
    calls = [n.name for n in after.graph.nodes if n.op == "call_function"]
    at = dict(zip(calls, bytes_held(after), strict=True))
    curve, last = list[int](), 0
    for node in local.graph.nodes:
        if node.op == "call_function":
            last = at.get(node.name, last)
            curve.append(last)
    return curve


def _alone(curve: Array) -> Array:
    return curve


@dataclass
class _Search:
    saved: SavedTensors
    hardware: Hardware
    wire_price: float
    curve: Array
    times: Mapping[Node, int]
    among: Sequence[SavedTensor]
    load: Callable[[Array], Array]
    names: list[str] = field(default_factory=list[str])
    dropped: set[int] = field(default_factory=set[int])
    spans: dict[_Spot, Span] = field(default_factory=dict[_Spot, Span])
    copies: dict[tuple[Node, int], int] = field(default_factory=dict[tuple[Node, int], int])
    leaning: dict[int, list[tuple[Node, int, int]]] = field(default_factory=dict[int, list[tuple[Node, int, int]]])

    def choice(self) -> RematChoice:
        return RematChoice(tuple(self.names), int(self.load(self.curve).max(initial=0)))

    def excess(self, curve: Array, target: int) -> int:
        """Bytes above `target`, summed over all calls."""
        return int(np.maximum(self.load(curve) - target, 0).sum())

    def reach(self, target: int) -> Iterator[RematChoice]:
        """Drop values until nothing is above `target` or no value helps; yields the choice after each."""
        remaining = [v for v in self.among if id(v.storage) not in self.dropped]
        before = self.excess(self.curve, target)
        if not before:
            return
        heap = [(self._score(v, target, before)[0], i) for i, v in enumerate(remaining)]
        heapify(heap)
        while heap and before:
            _, number = heappop(heap)
            score, trial = self._score(remaining[number], target, before)
            if trial is None:
                continue
            if heap and score > heap[0][0]:
                heappush(heap, (score, number))
                continue
            trial.commit()
            self.names.append(remaining[number].name)
            before = self.excess(self.curve, target)
            yield self.choice()

    def _score(self, value: SavedTensor, target: int, before: int) -> tuple[float, _Trial | None]:
        """Added microseconds per byte (summed over calls) of excess that dropping `value` removes; None if none is."""
        trial = _Trial(self, value, {*self.dropped, id(value.storage)})
        trial.drop()
        gained = before - self.excess(trial.after(), target)
        return (max(trial.us, TUNING.remat_least_us) / gained, trial) if gained > 0 else (float("inf"), None)

    def cost_us(self, node: Node) -> float:
        if is_wait(node):
            return 0.0
        if is_collective(node):
            sent = self.wire_price * sent_us(node, self.hardware, self.saved.local.mesh)
            handled = sum(host_us(node, self.hardware, self.saved.local.mesh))
            return (handled + sent) * self.times.get(node, 1)
        segment = self.saved.segment[node]
        moves = all(user.op == "call_function" and self.saved.segment[user] > segment for user in node.users)
        return 0.0 if moves else node_us(node, self.hardware) * self.times.get(node, 1)


@dataclass
class _Trial:
    """The change by dropping one more value; `commit` applies it."""

    base: _Search
    value: SavedTensor
    dropped: set[int]
    us: float = 0.0
    spans: dict[_Spot, Span] = field(default_factory=dict[_Spot, Span])
    copies: dict[tuple[Node, int], int] = field(default_factory=dict[tuple[Node, int], int])
    leaning: list[tuple[int, Node, int, int]] = field(default_factory=list[tuple[int, Node, int, int]])
    sizes: dict[_Spot, int] = field(default_factory=dict[_Spot, int])

    def drop(self) -> None:
        value, key = self.value, (id(self.value.storage), -1)
        self.spans[key], self.sizes[key] = (value.storage.first, value.last_read), value.storage.size_bytes
        for segment, reads in value.reads.items():
            for at, member in reads:
                self._need(member, segment, at)
        for member, segment, at in self.base.leaning.get(id(value.storage), ()):
            self._need(member, segment, at)

    def _need(self, node: Node, segment: int, at: int) -> None:
        """Make `node` available at call `at`: kept alive until then, or recomputed there or earlier."""
        saved, todo = self.base.saved, [(node, at)]
        while todo:
            node, at = todo.pop()
            if node.op != "call_function":
                continue
            twin = saved.twin(node, segment)
            if twin is not None:
                for storage in saved.of.get(twin, ()):
                    self._extend(storage, -1, at)
            elif saved.is_alive(node, segment, self.dropped):
                for storage in saved.of.get(node, ()):
                    self._extend(storage, -1, at)
                    self.leaning.append((id(storage), node, segment, at))
            else:
                todo += self._copy(node, segment, at)

    def _copy(self, node: Node, segment: int, at: int) -> list[tuple[Node, int]]:
        key = (node, segment)
        first = self.copies.get(key, self.base.copies.get(key))
        for storage in self.base.saved.of.get(node, ()):
            self._extend(storage, segment, at)
        if first is not None and first <= at:
            return []
        if first is None:
            self.us += self.base.cost_us(node)
        self.copies[key] = at
        return [(operand, at) for operand in operands(node)]

    def _extend(self, storage: Storage, segment: int, at: int) -> None:
        """Let the lifetime of `storage` in `segment` include call `at`."""
        if storage.first < 0 or storage.last is None:
            return
        key = (id(storage), segment)
        first = self.base.saved.natural.get(key[0]) if segment == -1 else None
        now = self.spans.get(key) or self.base.spans.get(key) or first
        new = (at, at) if now is None else (min(now[0], at), max(now[1], at))
        if new != now:
            self.spans[key], self.sizes[key] = new, storage.size_bytes

    def after(self) -> Array:
        """Live bytes at each call."""
        steps = np.zeros(len(self.base.curve) + 1, dtype=np.int64)
        for key, (first, last) in self.spans.items():
            size = self.sizes[key]
            old = self.base.spans.get(key)
            if old is None and key[1] == -1:
                old = self.base.saved.natural.get(key[0])
            if old is not None:
                steps[old[0]] -= size
                steps[old[1] + 1] += size
            steps[first] += size
            steps[last + 1] -= size
        return self.base.curve + np.cumsum(steps[:-1])

    def commit(self) -> None:
        self.base.curve = self.after()
        self.base.dropped = self.dropped
        self.base.spans |= self.spans
        self.base.copies |= self.copies
        for storage, node, segment, at in self.leaning:
            self.base.leaning.setdefault(storage, []).append((node, segment, at))
