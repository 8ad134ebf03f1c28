"""Orders a step so that communication hides behind arithmetic, by simulating it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import ClassVar

from torch.fx import Graph, Node

from .. import _torch
from ..cost.schedule import Clock, left, start
from ..errors import RankMismatchError
from ..graph import meta
from ..graph.graph import LocalGraph, Role, copy_graph, node_at, operands
from ..graph.verify import is_collective, is_wait
from ..hardware.hardware import Hardware
from ..rules.registry import is_random
from .base import InPlace

_NEVER = float("inf")


@dataclass(frozen=True)
class Overlap(InPlace):
    """Starts collectives when their last input exists, and waits for them at the last moment. Bitwise the same.

    Arithmetic of the forward and backward keeps its order. Gathers of parameters start ahead of their use, in the order
    of their use, while no more than `in_flight_bytes` of gathered parameters, or `in_flight` of them, wait for it; with
    None, as `SizeBuckets` decided. Optimizer updates that feed a parameter all-gather are issued as soon as their
    gradients have arrived; all other updates run last, in dependency order. Reductions that are carried to the next
    call go in the order in which that reads their parameters.
    Ranks whose batches differ in size may find different orders: `SameOrder` gives them that of one.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    in_flight_bytes: int | None = 64 << 20
    in_flight: int | None = 1

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True

    @property
    def must_follow(self) -> tuple[str, ...]:
        """What decides how much is in flight."""
        return ("SizeBuckets",) if self.in_flight_bytes is None else ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Put the nodes of `local` into another order."""
        most = most_in_flight(local, self.in_flight_bytes, self.in_flight)
        work = _Work(local, self.hardware, most, {})
        work.run()
        if any(i.role is Role.CARRY for i in local.inputs):
            work = _Work(local, self.hardware, most, left(local, work.clock))
            work.run()
        _order(local.graph, work.order)
        return local if local.across is None else in_one_order(local)


@dataclass(frozen=True)
class SameOrder:
    """Gives all ranks one order of collectives: that which `ask` gives for a program; without it, each keeps its own.

    Ranks whose batches differ in size may be given different orders by `Overlap`, and would wait for each other.
    """

    ask: Callable[[LocalGraph], Sequence[str]] | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The program with its collectives in that order."""
        if self.ask is None:
            return local
        local = with_collectives_in(local, self.ask(local))
        return local if local.across is None else in_one_order(local)


def most_in_flight(local: LocalGraph, given_bytes: int | None, given: int | None) -> tuple[int, int]:
    """Bytes that may be in flight, or how many collectives: as given, or as `SizeBuckets` decided."""
    if given_bytes is not None:
        return given_bytes, 1 if given is None else given
    assert local.sizes is not None, "SizeBuckets came before"
    return local.sizes.in_flight_bytes, local.sizes.in_flight


def with_collectives_in(local: LocalGraph, names: Sequence[str]) -> LocalGraph:
    """The graph with its collectives in the order `names`, and else in its own, as far as that allows.

    Raises:
        RankMismatchError: it has other collectives, or they cannot run in that order.
    """
    calls = [n for n in local.graph.nodes if n.op == "call_function"]
    own = {n.name: n for n in calls if is_collective(n)}
    if list(own) == list(names):
        return local
    before: dict[Node, list[Node]] = {n: [g for g in operands(n) if g.op == "call_function"] for n in calls}
    if sorted(own) == sorted(names):
        for first, second in pairwise(names):
            before[own[second]].append(own[first])
        order = _sorted(calls, before)
        if len(order) == len(calls):
            return replace(local, graph=_in_order(local.graph, order))
    raise RankMismatchError(
        f"this rank cannot run its {len(own)} collectives in the order of the first rank's {len(names)}",
        "ranks whose programs differ in sizes of the batch at most",
        "give schedule=None, or batches for which the step is the same",
    )


def in_one_order(steady: LocalGraph) -> LocalGraph:
    """The same with the collectives of its three programs in the order of `steady`.

    Collectives that complete the last call come before those of this one: a rank that flushes and then runs `first`
    has the same sequence as one that runs `steady`.
    """
    assert steady.across is not None, "the end of the step is left to the next call"
    first, flush = steady.across
    of_flush, of_first = set(collectives_of(flush)), set(collectives_of(first))
    order = collectives_of(steady)
    late, body = [n for n in order if n in of_flush], [n for n in order if n in of_first]
    ends = with_collectives_in(first, body), with_collectives_in(flush, late)
    return replace(with_collectives_in(steady, [*late, *body]), across=ends)


def collectives_of(local: LocalGraph) -> list[str]:
    """The names of its collectives, in order."""
    return [n.name for n in local.graph.nodes if is_collective(n)]


def _sorted(calls: Sequence[Node], before: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """`calls` with each behind what is `before` it, and else by their place; without those that are in a circle."""
    place = {node: i for i, node in enumerate(calls)}
    left = {node: len(before[node]) for node in calls}
    after: dict[Node, list[Node]] = {node: [] for node in calls}
    for node in calls:
        for given in before[node]:
            after[given].append(node)
    ready = [place[node] for node in calls if not left[node]]
    heapify(ready)
    order: list[Node] = []
    while ready:
        node = calls[heappop(ready)]
        order.append(node)
        for reader in after[node]:
            left[reader] -= 1
            if not left[reader]:
                heappush(ready, place[reader])
    return order


@dataclass
class _Work:
    """`arrivals`: when what was carried here is complete, in microseconds since the start. `settled`: what is placed,
    or will be for a gather.
    """

    local: LocalGraph
    hardware: Hardware
    most: tuple[int, int]
    arrivals: Mapping[str, float]
    order: list[Node] = field(default_factory=list[Node])
    placed: set[Node] = field(default_factory=set[Node])
    flying: dict[Node, int] = field(default_factory=dict[Node, int])
    held: list[tuple[int, int, Node]] = field(default_factory=list[tuple[int, int, Node]])
    first: dict[Node, int] = field(default_factory=dict[Node, int])
    carried: dict[Node, float] = field(default_factory=dict[Node, float])

    def run(self) -> None:
        calls = [n for n in self.local.graph.nodes if n.op == "call_function"]
        self.placed = {n for n in self.local.graph.nodes if n.op == "placeholder"}
        self.clock = start(self.local, self.hardware, self.arrivals)
        moving, main = parts(self.local, hops=False)
        urgency = self._urgency([n for n in calls if n in main and n in moving])
        gathers = [n for n in calls if n in main and is_collective(n) and n not in moving]
        self.ahead = {n: _cone(n, self.placed) for n in sorted(gathers, key=self.first.__getitem__)}
        self.settled = self.placed.union(*self.ahead.values())
        tail = [n for n in calls if n not in main]
        self.tail = _Tail(tail)
        for node in [*self.placed, *(n for n in tail if not operands(n))]:
            self.tail.learn(node, self.clock)
        self._learn_carried([n for n in calls if n not in moving])
        for node in calls:
            if node in urgency:
                heappush(self.held, (urgency[node], len(self.held), node))
            elif node in main and node in moving:
                for needed in _cone(node, self.settled):
                    self._gather_ahead(needed)
                    while (late := self.tail.next(self.clock.now, self._has_links)) is not None:
                        self._place_all(_cone(late, self.placed))
                    self._place_all(_cone(needed, self.placed))
            while self.held and self.clock.wire <= self.clock.now:
                self._place_all(_cone(heappop(self.held)[2], self.placed))
        while self.held:
            self._place_all(_cone(heappop(self.held)[2], self.placed))
        while (late := self.tail.next(_NEVER, lambda _: True)) is not None:
            self._place_all(_cone(late, self.placed))
        self._place_all(sorted((n for n in tail if n not in self.placed), key=self.tail.lateness))

    def _urgency(self, main: list[Node]) -> dict[Node, int]:
        """Reductions that are carried away, with the place of the first node that reads what follows from them."""
        seen = set(self.placed)
        for place, node in enumerate(main):
            for needed in _cone(node, seen):
                self.first[needed] = place
                seen.add(needed)
        came = {
            i.name: min((self.first[u] for u in n.users if u in self.first), default=len(main))
            for i, n in self.local.placeholders()
            if i.role is Role.CARRY
        }
        carried = [(out, n) for out, n in self.local.results() if out.kind == "carry" and is_collective(n)]
        return {node: came[out.target] for out, node in carried if out.target in came}

    def _learn_carried(self, calls: list[Node]) -> None:
        """When what follows from what was carried here can run, if no collective stands between.

        Microseconds since the start, in the order in which it is read.
        """
        ready = {n: self.arrivals.get(i.name, 0.0) for i, n in self.local.placeholders() if i.role is Role.CARRY}
        for node in calls:
            known = [ready[n] for n in node.all_input_nodes if n in ready]
            if known and node in self.first:
                ready[node] = _NEVER if is_collective(node) else max(known)
        able = [n for n, when in ready.items() if n.op == "call_function" and when < _NEVER]
        self.carried = {n: ready[n] for n in sorted(able, key=self.first.__getitem__)}

    def _fill(self, until: float) -> None:
        """Updates with what has arrived run while something else is waited for."""
        for node, when in list(self.carried.items()):
            if self.clock.now >= until:
                return
            if node in self.placed or when <= self.clock.now:
                del self.carried[node]
                self._place_all(_cone(node, self.placed))

    def _place_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node not in self.placed:
                if is_wait(node) and self.carried:
                    self._fill(self.clock.done.get(node_at(node, 0), 0.0))
                self.clock.run(node)
                self.order.append(node)
                self.placed.add(node)
                self.settled.add(node)
                if is_wait(node):
                    self.flying.pop(node_at(node, 0), None)
                if node not in self.tail.place or is_collective(node):
                    self.tail.learn(node, self.clock)

    def _gather_ahead(self, node: Node) -> None:
        """Start gathers while there is room, and at least those that `node` reads."""
        needed = {n for n in node.all_input_nodes if n in self.ahead}
        while self.ahead:
            gather = next(iter(self.ahead))
            if not needed and self._must_wait(gather):
                return
            needed.discard(gather)
            self._place_all(self.ahead.pop(gather))
            self.flying[gather] = _bytes(gather)

    def _has_links(self, node: Node) -> bool:
        """True unless collectives along another axis are on the links that it needs: it would slow them down."""
        axis, mesh = str(node.args[-1]), self.local.mesh
        busy = [other for other, until in self.clock.wires.items() if other != axis and until > self.clock.now]
        return not any(self.hardware.shares_links(mesh, axis, other) for other in busy)

    def _must_wait(self, gather: Node) -> bool:
        """True when there is no room for it, or what it gathers has not arrived."""
        size_bytes, count = self.most
        if len(self.flying) >= count and sum(self.flying.values()) + _bytes(gather) > size_bytes:
            return True
        arrives = [self.clock.done[node_at(n, 0)] for n in self.ahead[gather] if is_wait(n) and n not in self.placed]
        return max(arrives, default=0.0) > self.clock.now


class _Tail:
    """What follows from complete gradients: from when on each node could run, as soon as that is known."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.place = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.ready = dict.fromkeys(nodes, 0.0)
        self.unknown = {node: len(node.all_input_nodes) for node in nodes}
        self.readers: dict[Node, list[Node]] = {}
        self.starts: list[tuple[float, int]] = []
        for node in nodes:
            for given in node.all_input_nodes:
                self.readers.setdefault(given, []).append(node)

    def learn(self, node: Node, clock: Clock) -> None:
        """The result of `node` exists, or is on the wire. Collectives that nothing else holds up may start."""
        todo = [node]
        while todo:
            known = todo.pop()
            for reader in self.readers.get(known, ()):
                arrives = clock.done[known] if is_wait(reader) else self.ready.get(known, 0.0)
                self.ready[reader] = max(self.ready[reader], arrives)
                self.unknown[reader] -= 1
                if self.unknown[reader]:
                    continue
                if is_collective(reader):
                    heappush(self.starts, self.lateness(reader))
                else:
                    todo.append(reader)

    def next(self, now: float, may: Callable[[Node], bool]) -> Node | None:
        """The collective that can start first, if it can by `now`, and `may`."""
        if not self.starts or self.starts[0][0] > now or not may(self.nodes[self.starts[0][1]]):
            return None
        return self.nodes[heappop(self.starts)[1]]

    def lateness(self, node: Node) -> tuple[float, int]:
        """When a node can run, then its place: an order that dependencies allow."""
        return self.ready[node], self.place[node]


def parts(local: LocalGraph, hops: bool = True) -> tuple[set[Node], set[Node]]:
    """What depends on the batch or on chance; and forward and backward: of those, what does not follow from complete
    gradients, all that this needs, and the collectives on it; with `hops` those too that send on what others brought.
    """
    moving = {n for i, n in local.placeholders() if i.role in (Role.BATCH, Role.GRAD)}
    settled, brought = set[Node](), set[Node]()
    todo: list[Node] = []
    for node in local.graph.nodes:
        given = [n for n in node.all_input_nodes if n in moving]
        if node.op != "call_function" or not (given or is_random(node)):
            continue
        moving.add(node)
        piece = _torch.is_getitem(node.target) or meta.value(node) is None
        if meta.is_batch_invariant(node) or (piece and all(n in settled for n in given)):
            settled.add(node)
        elif meta.value(node) is not None or (is_collective(node) and (hops or not brought.issuperset(given))):
            todo.append(node)
        elif is_wait(node) or brought.issuperset(given):
            brought.add(node)
    main = set[Node]()
    while todo:
        node = todo.pop()
        if node not in main:
            main.add(node)
            todo += [n for n in node.all_input_nodes if n.op == "call_function"]
    return moving, main


def _cone(node: Node, outside: set[Node]) -> list[Node]:
    """`node` and all that it needs but for `outside`, in an order that dependencies allow."""
    found: dict[Node, None] = {}
    todo = [(node, False)]
    while todo:
        at, complete = todo.pop()
        if complete:
            found[at] = None
        elif at not in found and at not in outside:
            todo.append((at, True))
            todo += [(n, False) for n in operands(at)]
    return list(found)


def _bytes(gather: Node) -> int:
    made = meta.tensor(gather)
    return made.size_bytes if made else 0


def _in_order(graph: Graph, order: list[Node]) -> Graph:
    """A copy with the call nodes in `order`."""
    copied = copy_graph(graph)
    twin = dict(zip(graph.nodes, copied.nodes, strict=True))
    _order(copied, [twin[node] for node in order])
    return copied


def _order(graph: Graph, order: list[Node]) -> None:
    """Put the call nodes of `graph` into `order`."""
    output = next(iter(reversed(graph.nodes)))
    for node in order:
        output.prepend(node)
