"""Orders a step by simulation so that computing hides communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..cost.simulation import Clock, arrivals_after, start
from ..cost.stack import Fills
from ..errors import RankMismatchError
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.loop import named_bodies, put_bodies
from ..graph.nodes import copy_graph, is_collective, is_wait, node_at, operands
from ..graph.op_kinds import FREE, PRODUCTS
from ..hardware.hardware import Hardware
from ..partition.accumulators import ACCUMULATORS
from .base import InPlace, Pass, batch_dependent, meets_stages

_NEVER = float("inf")


@dataclass(frozen=True)
class Overlap(InPlace):
    """Starts collectives when their last input exists, and waits for them at the last moment. Bitwise the same.

    Arithmetic of the forward and backward keeps its order, but for gradients of weights, which are computed while the
    rank would wait for activations, as `fills` says (`Stack`); with "all" where that is simulated to gain, and while
    what they read is at most `in_flight_bytes`. Gathers of parameters start ahead of their use, in order of
    use, while at most `in_flight_bytes` of gathered parameters, or `in_flight` of them (by the program's sizes), wait
    for it. Optimizer updates that feed a parameter all-gather are issued as soon as
    their gradients have arrived; all other updates run last, in dependency order. Reductions that are carried to the
    next call start in the order in which that call reads their parameters.

    Ranks whose batches differ in size may get different orders; `SameOrder` makes them equal.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    fills: Fills = "all"

    must_follow: ClassVar[tuple[str, ...]] = ("SizeBuckets",)
    orders: ClassVar[bool] = True

    def change(self, local: LocalGraph) -> LocalGraph:
        """Reorder the nodes of `local`."""
        assert local.sizes is not None, "SizeBuckets came before"
        fills = self.fills if local.sizes.puts_off else "none"
        work = self._worked(local, fills)
        if work.exchanges and fills == "all":
            work = min(self._worked(local, "none"), work, key=lambda one: one.clock.now)
        _order(local.graph, _stages_in_turn(local, work.order))
        return local if local.across is None else in_one_order(local)

    def _worked(self, local: LocalGraph, fills: Fills) -> _Work:
        work = _Work(local, self.hardware, {}, fills)
        work.run()
        if any(i.role is Role.CARRY for i in local.inputs):
            work = _Work(local, self.hardware, arrivals_after(local, work.clock), fills)
            work.run()
        return work


@dataclass(frozen=True)
class SameOrder:
    """Gives all ranks the order of collectives that `ask` returns for a program; without `ask` nothing changes.
    `Overlap` may order collectives differently on ranks whose batches differ in size: they would deadlock.
    """

    ask: Callable[[LocalGraph], Sequence[str]] | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True
    keeps_nothing: ClassVar[bool] = True

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The program with its collectives in that order."""
        if self.ask is None:
            return local
        local = with_collectives_in(local, self.ask(local))
        return local if local.across is None else in_one_order(local)


@dataclass
class CallOrder:
    """Gives programs with the same calls one order: that of the first one that it is called with. Prices decide an
    order, and passes behind it number what they add.
    """

    names: list[dict[str, int]] = field(default_factory=list[dict[str, int]])

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The program with its calls in that order; as it is if it has others."""
        programs = [one.graph for one in (local, *(local.across or ()))]
        calls = [[node for node in graph.nodes if node.op == "call_function"] for graph in programs]
        if not self.names:
            self.names = [{node.name: place for place, node in enumerate(each)} for each in calls]
        if [{node.name for node in each} for each in calls] != [each.keys() for each in self.names]:
            return local
        pairs = zip(programs, calls, self.names, strict=True)
        made = [_in_order(graph, sorted(each, key=lambda n: places[n.name])) for graph, each, places in pairs]
        if local.across is None:
            return replace(local, graph=made[0])
        first, flush = (replace(one, graph=graph) for one, graph in zip(local.across, made[1:], strict=True))
        return replace(local, graph=made[0], across=(first, flush))


def with_calls_in(passes: Sequence[Pass], calls: CallOrder) -> tuple[Pass, ...]:
    """`passes` with `calls` behind `SameOrder`."""
    return tuple(each for one in passes for each in ((one, calls) if isinstance(one, SameOrder) else (one,)))


def with_order_from(passes: Sequence[Pass], ask: Callable[[LocalGraph], Sequence[str]]) -> tuple[Pass, ...]:
    """`passes` whose `SameOrder` gets the order of collectives from `ask`."""
    return tuple(SameOrder(ask) if isinstance(one, SameOrder) else one for one in passes)


def with_collectives_in(local: LocalGraph, names: Sequence[str]) -> LocalGraph:
    """The graph with its collectives, and those of the bodies that it runs for pieces, in the order `names`; other
    nodes keep their order as far as possible. Raises RankMismatchError if the graph has other collectives, or they
    cannot run in that order.
    """
    found = collectives_of(local)
    if found == list(names):
        return local
    if sorted(found) != sorted(names):
        raise _other_order(len(found), len(names))
    place = {name: number for number, name in enumerate(names)}
    made = replace(local, graph=_with_collectives_in(local.graph, place, ""))
    bodies = named_bodies(made.graph).items()
    put_bodies(made.graph, {body: _with_collectives_in(body, place, f"{name}/") for name, body in bodies})
    return made


def _with_collectives_in(graph: Graph, place: Mapping[str, int], label: str) -> Graph:
    """A copy of a graph, or of the body that `label` begins the names of, with its collectives in order."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    order = _sorted(calls, sorted((n for n in calls if is_collective(n)), key=lambda n: place[label + n.name]))
    if len(order) < len(calls):
        raise _other_order(len(place), len(place))
    return _in_order(graph, order)


def _other_order(found: int, wanted: int) -> RankMismatchError:
    return RankMismatchError(
        f"this rank cannot run its {found} collectives in the order of the first rank's {wanted}",
        "ranks whose programs differ only in sizes of the batch",
        "pass schedule=None, or batches for which the step is the same",
    )


def in_one_order(steady: LocalGraph) -> LocalGraph:
    """The three programs of a step across calls, with their collectives in the order of `steady`.

    Collectives that complete the last call precede those of this call: a rank that runs `flush`, then `first`, has the
    same sequence as a rank that runs `steady`.
    """
    assert steady.across is not None, "CrossStep split the program"
    first, flush = steady.across
    of_flush, of_first = set(collectives_of(flush)), set(collectives_of(first))
    order = collectives_of(steady)
    late, body = [n for n in order if n in of_flush], [n for n in order if n in of_first]
    ends = with_collectives_in(first, body), with_collectives_in(flush, late)
    return replace(with_collectives_in(steady, [*late, *body]), across=ends)


def collectives_of(local: LocalGraph) -> list[str]:
    """Names of the collectives of `local`, in order, then those of the bodies that it runs for pieces."""
    found = [n.name for n in local.graph.nodes if is_collective(n)]
    bodies = named_bodies(local.graph).items()
    return found + [f"{name}/{n.name}" for name, body in bodies for n in body.nodes if is_collective(n)]


def _stages_in_turn(local: LocalGraph, order: list[Node]) -> list[Node]:
    """`order`, in which a stage of a pipeline exchanges with others what it did before, in that order."""
    if local.stage is None:
        return order
    return _sorted(order, [node for node in local.graph.nodes if meets_stages(local, node)])


def _sorted(calls: Sequence[Node], chain: Sequence[Node]) -> list[Node]:
    """`calls` in a topological order that has `chain` in its order, and keeps positions as far as possible; a cycle is
    left out.
    """
    before = {node: [given for given in operands(node) if given.op == "call_function"] for node in calls}
    for first, second in pairwise(chain):
        before[second].append(first)
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
    """Simulates the step and places nodes.

    `arrivals`: when each carried input is complete, in microseconds since the start. `order`: the new order; `placed`
    has the nodes in it. `in_flight`: started gathers that nothing waited for yet, in bytes. `queue`: reductions that
    are carried to the next call, by urgency. `first_use`: position of the first reader of a node in the forward and
    backward. `carried`: updates with carried gradients, and when they can run. `exchanges`: waits for activations.
    `waiting`: products for gradients of weights, and what ends these gradients, to run beside an exchange; those in
    `left` have waited for one already. `beside`: of such a product, the exchange of its own linear; `alike`: of the
    product that gives to that exchange, those for weights, whose gathers start in front of it.
    """

    local: LocalGraph
    hardware: Hardware
    arrivals: Mapping[str, float]
    fills: Fills
    order: list[Node] = field(default_factory=list[Node])
    placed: set[Node] = field(default_factory=set[Node])
    in_flight: dict[Node, int] = field(default_factory=dict[Node, int])
    queue: list[tuple[int, int, Node]] = field(default_factory=list[tuple[int, int, Node]])
    first_use: dict[Node, int] = field(default_factory=dict[Node, int])
    carried: dict[Node, float] = field(default_factory=dict[Node, float])
    exchanges: set[Node] = field(default_factory=set[Node])
    waiting: list[Node] = field(default_factory=list[Node])
    left: set[Node] = field(default_factory=set[Node])
    beside: dict[Node, Node] = field(default_factory=dict[Node, Node])
    alike: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])

    def run(self) -> None:
        calls = [n for n in self.local.graph.nodes if n.op == "call_function"]
        self.placed = {n for n in self.local.graph.nodes if n.op == "placeholder"}
        self.clock = start(self.local, Clock(self.hardware, self.local.mesh), self.arrivals)
        varying, main = forward_backward(self.local, later_stages=False)
        self.urgency = self._urgency([n for n in calls if n in main and n in varying])
        gathers = [n for n in calls if n in main and is_collective(n) and n not in varying]
        self.ahead = {n: _cone(n, self.placed) for n in sorted(gathers, key=self.first_use.__getitem__)}
        self.assigned = self.placed.union(*self.ahead.values())  # placed, or placed with a gather
        tail = [n for n in calls if n not in main]
        self.tail = _Tail(tail)
        for node in [*self.placed, *(n for n in tail if not operands(n))]:
            self.tail.learn(node, self.clock)
        self._learn_carried([n for n in calls if n not in varying])
        spare = _spare(calls, main, self.urgency)
        self.exchanges = {n for n in calls if is_wait(n) and n in main and n in varying and n not in spare}
        if self.fills != "none":
            self.beside, self.alike = _beside(calls, spare, self.exchanges)
        exchanges = 0 if self.fills == "none" else len(self.exchanges)
        for node in calls:
            if node in spare and exchanges:
                self._defer(node, spare)
            elif node in main and (node in varying or _carries_stages(self.local, node)):
                self._place_main(node)
            if node in self.exchanges and exchanges:
                exchanges -= 1
                while self.waiting and not exchanges:
                    self._compute_first()
            while self.queue and self.clock.links_free <= self.clock.now:
                self._place_all(_cone(heappop(self.queue)[2], self.placed))
        while self.queue:
            self._place_all(_cone(heappop(self.queue)[2], self.placed))
        while (late := self.tail.next(_NEVER, lambda _: True)) is not None:
            self._place_all(_cone(late, self.placed))
        self._place_all(sorted((n for n in tail if n not in self.placed), key=self.tail.lateness))

    def _place_main(self, node: Node) -> None:
        if node in self.urgency:
            heappush(self.queue, (self.urgency[node], len(self.queue), node))
            return
        again = [one for product in self.alike.get(node, ()) for one in _cone(product, self.placed)]
        for gather in filter(is_collective, again):
            self._place_all(_cone(gather, self.placed))
        for needed in _cone(node, self.assigned):
            self._gather_ahead(needed)
            while (late := self.tail.next(self.clock.now, self._has_links)) is not None:
                self._place_all(_cone(late, self.placed))
            self._place_all(_cone(needed, self.placed))

    def _defer(self, node: Node, spare: set[Node]) -> None:
        """Let a product wait for an exchange, with what ends its gradient; the first go where all read too much."""
        if node.target not in PRODUCTS and not spare.isdisjoint(node.users):
            return  # it comes with its reader
        self.waiting.append(node)
        while self.waiting and (self.waiting[0].target not in PRODUCTS or self._cannot_wait()):
            self._compute_first()

    def _cannot_wait(self) -> bool:
        """True if the first product may fill no exchange, or the products that wait read more than the bounds allow."""
        if self.fills == "own":
            return self.waiting[0] not in self.beside
        sizes, products = self.local.sizes, [node for node in self.waiting if node.target in PRODUCTS]
        assert sizes is not None, "SizeBuckets came before"
        held = sum(map(meta.size_bytes, {_source(given) for node in products for given in operands(node)}))
        return len(products) > sizes.in_flight and held > sizes.in_flight_bytes

    def _compute_first(self) -> None:
        """Compute the product that has waited longest, and end its gradient."""
        self._place_main(self.waiting.pop(0))
        while self.waiting and self.waiting[0].target not in PRODUCTS:
            self._place_main(self.waiting.pop(0))

    def _fill(self, wait: Node) -> None:
        """Compute the products that an earlier wait has left, whose operands are held; then others, as long as the rank
        would be idle until `wait` ends, or those of the same linear.
        """
        until = self.clock.done.get(node_at(wait, 0), 0.0)
        while self.waiting:
            first = self.waiting[0]
            idle = self.beside.get(first, wait) is wait if self.fills == "own" else self.clock.now < until
            if not idle and first not in self.left:
                break
            self._compute_first()
        self.left = set(self.waiting)

    def _urgency(self, main: list[Node]) -> dict[Node, int]:
        """Reductions to be carried to the next call, with the position at which that call first needs their results."""
        seen = set(self.placed)
        for place, node in enumerate(main):
            for needed in _cone(node, seen):
                self.first_use[needed] = place
                seen.add(needed)
        needed_at = {
            i.name: min((self.first_use[u] for u in n.users if u in self.first_use), default=len(main))
            for i, n in self.local.placeholders()
            if i.role is Role.CARRY
        }
        carried = [(out, n) for out, n in self.local.results() if out.kind == "carry" and is_collective(n)]
        return {node: needed_at[out.target] for out, node in carried if out.target in needed_at}

    def _learn_carried(self, calls: list[Node]) -> None:
        """Find when nodes that depend on carried inputs can run, without those behind a collective, in order of use."""
        ready = {n: self.arrivals.get(i.name, 0.0) for i, n in self.local.placeholders() if i.role is Role.CARRY}
        for node in calls:
            known = [ready[n] for n in node.all_input_nodes if n in ready]
            if known and node in self.first_use:
                ready[node] = _NEVER if is_collective(node) else max(known)
        able = [n for n, when in ready.items() if n.op == "call_function" and when < _NEVER]
        self.carried = {n: ready[n] for n in sorted(able, key=self.first_use.__getitem__)}

    def _update_carried(self, until: float) -> None:
        """Place updates whose carried gradients have arrived, as long as the rank would only wait."""
        for node, when in list(self.carried.items()):
            if self.clock.now >= until:
                return
            if node in self.placed or when <= self.clock.now:
                del self.carried[node]
                self._place_all(_cone(node, self.placed))

    def _place_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node not in self.placed:
                if self.waiting and node in self.exchanges:
                    self._fill(node)
                if is_wait(node) and self.carried:
                    self._update_carried(self.clock.done.get(node_at(node, 0), 0.0))
                self.clock.run(node)
                self.order.append(node)
                self.placed.add(node)
                self.assigned.add(node)
                if is_wait(node):
                    self.in_flight.pop(node_at(node, 0), None)
                if node not in self.tail.place or is_collective(node):
                    self.tail.learn(node, self.clock)
                self._place_all([n for n in node.users if self._accumulates(n)])

    def _accumulates(self, node: Node) -> bool:
        """True for the sum of two gradients that are there: it is computed at once, as it frees one of them. Without
        that, the gradients of all micro-batches would be kept until the last reduction starts.
        """
        if node.target is not torch.ops.aten.add.Tensor or node not in self.tail.place:
            return False
        given = operands(node)
        return len(given) == 2 and self.placed.issuperset(given)

    def _gather_ahead(self, node: Node) -> None:
        """Start gathers while the bounds allow, and at least the gathers that `node` reads."""
        needed = {n for n in node.all_input_nodes if n in self.ahead}
        while self.ahead:
            gather = next(iter(self.ahead))
            if not needed and self._must_wait(gather):
                return
            needed.discard(gather)
            self._place_all(self.ahead.pop(gather))
            self.in_flight[gather] = meta.size_bytes(gather)

    def _has_links(self, node: Node) -> bool:
        """True unless a collective along another axis is on the links that `node` needs: it would slow that down."""
        axis, mesh = str(node.args[-1]), self.local.mesh
        busy = [other for other, until in self.clock.link_free.items() if other != axis and until > self.clock.now]
        return not any(self.hardware.shares_links(mesh, axis, other) for other in busy)

    def _must_wait(self, gather: Node) -> bool:
        """True if `gather` would exceed the bounds, or its operand has not arrived."""
        sizes = self.local.sizes
        assert sizes is not None, "SizeBuckets came before"
        held = sum(self.in_flight.values()) + meta.size_bytes(gather)
        if len(self.in_flight) >= sizes.in_flight and held > sizes.in_flight_bytes:
            return True
        arrives = [self.clock.done[node_at(n, 0)] for n in self.ahead[gather] if is_wait(n) and n not in self.placed]
        return max(arrives, default=0.0) > self.clock.now


class _Tail:
    """Nodes that depend on complete gradients, and the earliest start of each once it is known."""

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
        """`node` ran or, for a collective, started: collectives whose operands are all known may start."""
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
        """The collective with the earliest start, if that is at most `now`, and `may` is true of it."""
        if not self.starts or self.starts[0][0] > now or not may(self.nodes[self.starts[0][1]]):
            return None
        return self.nodes[heappop(self.starts)[1]]

    def lateness(self, node: Node) -> tuple[float, int]:
        """Sort key: earliest start, then position. Sorted nodes are in dependency order."""
        return self.ready[node], self.place[node]


def forward_backward(local: LocalGraph, later_stages: bool = True) -> tuple[set[Node], set[Node]]:
    """The nodes that depend on the batch or on random numbers; and the nodes of the forward and the backward.

    The latter are the batch-dependent nodes that do not depend on complete gradients, their operands, and the
    collectives on them; with `later_stages` also the later stages of hierarchical collectives.
    """
    varying = batch_dependent(local)
    gradients, communicated = set[Node](), set[Node]()
    todo: list[Node] = []
    for node in local.graph.nodes:
        if node.op == "call_function" and _carries_stages(local, node):
            todo.append(node)
            continue
        if node.op != "call_function" or node not in varying:
            continue
        given = [n for n in node.all_input_nodes if n in varying]
        piece = _torch.is_getitem(node.target) or meta.value(node) is None
        if meta.is_batch_invariant(node) or (piece and all(n in gradients for n in given)):
            gradients.add(node)
        elif (
            meta.value(node) is not None
            or _sums_pieces(node, communicated)
            or (is_collective(node) and (later_stages or not communicated.issuperset(given)))
        ):
            todo.append(node)
        elif is_wait(node) or communicated.issuperset(given):
            communicated.add(node)
    main = set[Node]()
    while todo:
        node = todo.pop()
        if node not in main:
            main.add(node)
            todo += [n for n in node.all_input_nodes if n.op == "call_function"]
    return varying, main


def _spare(calls: Sequence[Node], main: Collection[Node], carried: Collection[Node]) -> set[Node]:
    """What only sums over pieces, complete gradients or reductions that are carried need of the backward. Gathers of
    activations start at their place all the same, and are waited for with what reads them.
    """
    found = set[Node]()
    for node in reversed(calls):
        read = [user for user in node.users if user in main or user.op == "output"]
        alone = meta.is_backward(node) and bool(node.users) and found.issuperset(read)
        ends = node.target in ACCUMULATORS or node in carried
        if node in main and (ends or (alone and not (read and is_collective(node)))):
            found.add(node)
    return found


def _beside(
    calls: Sequence[Node], spare: Collection[Node], exchanges: Collection[Node]
) -> tuple[dict[Node, Node], dict[Node, list[Node]]]:
    """Of products for gradients of weights, the exchange of what the same linear gives to its input; of the products
    that give to that exchange, which read the same gradient, those for weights.
    """
    seen, found, alike = dict[Node, list[Node]](), dict[Node, Node](), dict[Node, list[Node]]()
    for node in calls:
        if node in spare and node.target in PRODUCTS:
            for given in operands(node):
                seen.setdefault(_source(given), []).append(node)
        todo = [node_at(node_at(node, 0), 0)] if node in exchanges else []
        while todo:
            given = todo.pop()
            if given.target in PRODUCTS:
                alike[given] = [one for read in operands(given) for one in seen.get(_source(read), ())]
                found |= dict.fromkeys(alike[given], node)
            elif meta.is_backward(given) and not is_wait(given):
                todo += operands(given)
    return found, alike


def _source(node: Node) -> Node:
    """What `node` is a view of."""
    while node.target in FREE and operands(node):
        node = node_at(node, 0)
    return node


def _sums_pieces(node: Node, communicated: Collection[Node]) -> bool:
    """True for what adds up a value of a piece that ranks have not exchanged: it frees that value."""
    return node.target in ACCUMULATORS and not any(given in communicated for given in node.all_input_nodes)


def _carries_stages(local: LocalGraph, node: Node) -> bool:
    """True for what moves the pieces of the batch from stage to stage, which has a place in the forward and backward
    even where nothing reads it.
    """
    return meets_stages(local, node) and not is_collective(node)


def _cone(node: Node, outside: set[Node]) -> list[Node]:
    """`node` and all nodes that it depends on, without `outside`, in dependency order."""
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
