"""Which saved values to make again: a path from none to as many as help, the cheapest microseconds for a byte first.

A value that is dropped is made again from what is still there: parameters, the batch, values that are kept. What it is
made of counts once, however many dropped values need it, and is held from its first reader to its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from torch.fx import Node

from ..cost.compute import node_us
from ..cost.schedule import host_us, sent_us
from ..graph.graph import operands
from ..graph.storage import Storage
from ..graph.verify import is_collective, is_wait
from ..hardware.hardware import Hardware
from .saved_tensors import SavedTensor, SavedTensors

_STAGES = 32
_LEAST_US = 0.01
Array = np.ndarray[Any, np.dtype[np.int64]]
Span = tuple[int, int]
_Spot = tuple[int, int]  # memory by id, and the stretch it is made again in; -1 for where it was made first


@dataclass(frozen=True)
class RematChoice:
    """Values to be made again by name, what that adds in microseconds, and the peak that is expected in bytes."""

    names: tuple[str, ...]
    added_us: float
    peak_bytes: int


def choices(
    saved: SavedTensors,
    held: Sequence[int],
    hardware: Hardware,
    wire_price: float = 1.0,
    times: Mapping[Node, int] | None = None,
) -> list[RematChoice]:
    """The path, cheapest first; `held` is what the step holds at each call now.

    A gather costs `wire_price` of the time for which it keeps the wire. `times`: calls that stand for several.
    """
    search = _Search(saved, hardware, wire_price, np.array(held, dtype=np.int64), times or {})
    found = [search.choice()]
    first, rest = int(search.held.max(initial=0)), sum(s.size_bytes for s in saved.storages if s.first < 0)
    for stage in range(1, _STAGES + 1):
        target = first - (first - rest) * stage // _STAGES
        found += search.reach(target)
        if search.excess(search.held, target):
            break
    return found


@dataclass
class _Search:
    saved: SavedTensors
    hardware: Hardware
    wire_price: float
    held: Array
    times: Mapping[Node, int]
    us: float = 0.0
    names: list[str] = field(default_factory=list[str])
    dropped: set[int] = field(default_factory=set[int])
    spans: dict[_Spot, Span] = field(default_factory=dict[_Spot, Span])
    copies: dict[tuple[Node, int], int] = field(default_factory=dict[tuple[Node, int], int])
    leaning: dict[int, list[tuple[Node, int, int]]] = field(default_factory=dict[int, list[tuple[Node, int, int]]])

    def choice(self) -> RematChoice:
        return RematChoice(tuple(self.names), self.us, int(self.held.max(initial=0)))

    def excess(self, held: Array, target: int) -> int:
        """Bytes above `target`, added up over all calls."""
        return int(np.maximum(held - target, 0).sum())

    def reach(self, target: int) -> Iterator[RematChoice]:
        """Drop values until nothing is above `target`, or none helps; a choice after each."""
        left = [v for v in self.saved.candidates if id(v.storage) not in self.dropped]
        before = self.excess(self.held, target)
        if not before:
            return
        heap = [(self._score(v, target, before)[0], i) for i, v in enumerate(left)]
        heapify(heap)
        while heap and before:
            _, number = heappop(heap)
            score, trial = self._score(left[number], target, before)
            if trial is None:
                continue
            if heap and score > heap[0][0]:
                heappush(heap, (score, number))
                continue
            trial.commit()
            self.names.append(left[number].name)
            before = self.excess(self.held, target)
            yield self.choice()

    def _score(self, value: SavedTensor, target: int, before: int) -> tuple[float, _Trial | None]:
        """Microseconds for each byte (times calls) of what is too much, the least first; None if nothing is gained."""
        trial = _Trial(self)
        trial.drop(value)
        gained = before - self.excess(trial.after(), target)
        return (max(trial.us, _LEAST_US) / gained, trial) if gained > 0 else (float("inf"), None)

    def cost_us(self, node: Node) -> float:
        if is_wait(node):
            return 0.0
        if is_collective(node):
            sent = self.wire_price * sent_us(node, self.hardware, self.saved.local.mesh)
            handled = sum(host_us(node, self.hardware, self.saved.local.mesh))
            return (handled + sent) * self.times.get(node, 1)
        here = self.saved.stretch[node]
        moves = all(user.op == "call_function" and self.saved.stretch[user] > here for user in node.users)
        return 0.0 if moves else node_us(node, self.hardware) * self.times.get(node, 1)


@dataclass
class _Trial:
    """What dropping one value more would change."""

    base: _Search
    us: float = 0.0
    value: SavedTensor | None = None
    spans: dict[_Spot, Span] = field(default_factory=dict[_Spot, Span])
    copies: dict[tuple[Node, int], int] = field(default_factory=dict[tuple[Node, int], int])
    leaning: list[tuple[int, Node, int, int]] = field(default_factory=list[tuple[int, Node, int, int]])
    sizes: dict[_Spot, int] = field(default_factory=dict[_Spot, int])

    def drop(self, value: SavedTensor) -> None:
        self.value = value
        key = (id(value.storage), -1)
        self.spans[key], self.sizes[key] = (value.storage.first, value.own_last), value.storage.size_bytes
        for stretch, reads in value.reads.items():
            for at, member in reads:
                self._need(member, stretch, at)
        for member, stretch, at in self.base.leaning.get(id(value.storage), ()):
            self._need(member, stretch, at)

    def _need(self, node: Node, stretch: int, at: int) -> None:
        """`node` is read at `at`: it is there, is made again there or earlier, or is kept until then."""
        saved, todo = self.base.saved, [(node, at)]
        while todo:
            node, at = todo.pop()
            if node.op != "call_function":
                continue
            twin = saved.twin(node, stretch)
            if twin is not None:
                for storage in saved.of.get(twin, ()):
                    self._stretch(storage, -1, at)
            elif self._is_there(node, stretch):
                for storage in saved.of.get(node, ()):
                    self._stretch(storage, -1, at)
                    self.leaning.append((id(storage), node, stretch, at))
            else:
                todo += self._copy(node, stretch, at)

    def _copy(self, node: Node, stretch: int, at: int) -> list[tuple[Node, int]]:
        key = (node, stretch)
        first = self.copies.get(key, self.base.copies.get(key))
        for storage in self.base.saved.of.get(node, ()):
            self._stretch(storage, stretch, at)
        if first is not None and first <= at:
            return []
        if first is None:
            self.us += self.base.cost_us(node)
        self.copies[key] = at
        return [(given, at) for given in operands(node)]

    def _is_there(self, node: Node, stretch: int) -> bool:
        saved = self.base.saved
        if not saved.repeatable(node):
            return True
        held = saved.of.get(node, ())
        if len(held) != 1 or id(held[0]) in self.base.dropped:
            return False
        return saved.last_stretch[id(held[0])] >= stretch and (self.value is None or held[0] is not self.value.storage)

    def _stretch(self, storage: Storage, stretch: int, at: int) -> None:
        if storage.first < 0 or storage.last is None:
            return
        key = (id(storage), stretch)
        first = self.base.saved.natural.get(key[0]) if stretch == -1 else None
        now = self.spans.get(key) or self.base.spans.get(key) or first
        new = (at, at) if now is None else (min(now[0], at), max(now[1], at))
        if new != now:
            self.spans[key], self.sizes[key] = new, storage.size_bytes

    def after(self) -> Array:
        """Bytes held at each call."""
        steps = np.zeros(len(self.base.held) + 1, dtype=np.int64)
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
        return self.base.held + np.cumsum(steps[:-1])

    def commit(self) -> None:
        assert self.value is not None, "something was dropped"
        self.base.held = self.after()
        self.base.us += self.us
        self.base.dropped.add(id(self.value.storage))
        self.base.spans |= self.spans
        self.base.copies |= self.copies
        for storage, node, stretch, at in self.leaning:
            self.base.leaning.setdefault(storage, []).append((node, stretch, at))
