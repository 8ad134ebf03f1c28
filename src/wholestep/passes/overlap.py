"""Orders a step by simulation so that computing hides communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

import torch
from torch.fx import Node

from ..cost.compute import alone_us
from ..cost.simulation import Clock, arrivals_after, start
from ..cost.software import Fills
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.messages import STARTED
from ..graph.nodes import cone, is_collective, is_wait, node_at, operands, reached
from ..graph.op_kinds import FREE, PRODUCTS
from ..graph.region import region_of
from ..hardware.hardware import Hardware
from ..partition.accumulators import ACCUMULATORS
from .base import InPlace, meets_stages
from .forward_backward import carries_stages, forward_backward
from .order_collectives import in_one_order, put_in_order, sorted_with

_NEVER = float("inf")


@dataclass(frozen=True)
class Overlap(InPlace):
    """Starts collectives when their last input exists, and waits for them at the last moment. Bitwise the same.

    Arithmetic of the forward and backward keeps its order, but for gradients of weights, which are computed while the
    rank would wait for activations, as `fills` says (`Software`); with "all" where that is simulated to gain, and while
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
        times = alone_us(local.graph, self.hardware)
        work = self._worked(local, fills, times)
        if work.exchanges and fills == "all":
            work = min(self._worked(local, "none", times), work, key=lambda candidate: candidate.clock.now)
        put_in_order(local.graph, _stages_in_turn(local, work.order))
        return local if local.across is None else in_one_order(local)

    def _worked(self, local: LocalGraph, fills: Fills, times: Mapping[Node, float]) -> _Work:
        work = _Work(local, self.hardware, times, {}, fills)
        work.run()
        if any(i.role is Role.CARRY for i in local.inputs):
            work = _Work(local, self.hardware, times, arrivals_after(local, work.clock), fills)
            work.run()
        return work


def _stages_in_turn(local: LocalGraph, order: list[Node]) -> list[Node]:
    """`order`, in which a stage of a pipeline exchanges with others what it did before, in that order."""
    if local.stage is None:
        return order
    return sorted_with(order, [node for node in local.graph.nodes if meets_stages(local, node)])


@dataclass
class _Work:
    """Simulates the step and places nodes.

    `arrivals`: when each carried input is complete, in microseconds since the start. `order`: the new order; `placed`
    has the nodes in it. `in_flight`: started gathers that nothing waited for yet, in bytes. `queue`: reductions that
    are carried to the next call, by urgency. `first_use`: position of the first reader of a node in the forward and
    backward. `carried`: updates with carried gradients, and when they can run. `exchanges`: waits for activations.
    `waiting`: products for gradients of weights, and what ends these gradients, to run beside an exchange; those in
    `postponed` have waited for one already. `beside`: of such a product, the exchange of its own linear; `alike`: of
    the product that gives to that exchange, those for weights, whose gathers start in front of it.
    """

    local: LocalGraph
    hardware: Hardware
    times: Mapping[Node, float]
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
    postponed: set[Node] = field(default_factory=set[Node])
    beside: dict[Node, Node] = field(default_factory=dict[Node, Node])
    alike: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])

    def run(self) -> None:
        calls = [n for n in self.local.graph.nodes if n.op == "call_function"]
        self.placed = {n for n in self.local.graph.nodes if n.op == "placeholder"}
        self.clock = start(self.local, Clock(self.hardware, self.local.mesh, times=self.times), self.arrivals)
        varying, main = forward_backward(self.local, later_stages=False)
        self.urgency = self._urgency([n for n in calls if n in main and n in varying])
        gathers = [n for n in calls if n in main and is_collective(n) and n not in varying]
        self.ahead = {n: cone(n, self.placed) for n in sorted(gathers, key=self.first_use.__getitem__)}
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
        run_behind = _run_behind_messages(calls)
        for node in calls:
            if node in spare and exchanges:
                self._defer(node, spare)
            elif node in main and (node in varying or carries_stages(self.local, node)):
                for operand in operands(run_behind[node]) if node in run_behind else ():
                    if operand not in varying:  # it is ready while the message is under way
                        self._place_main(operand)
                self._place_main(node)
            if node in self.exchanges and exchanges:
                exchanges -= 1
                while self.waiting and not exchanges:
                    self._compute_first()
            while self.queue and self.clock.links_free <= self.clock.now:
                self._place_all(cone(heappop(self.queue)[2], self.placed))
        while self.queue:
            self._place_all(cone(heappop(self.queue)[2], self.placed))
        while (late := self.tail.next(_NEVER, lambda _: True)) is not None:
            self._place_all(cone(late, self.placed))
        self._place_all(sorted((n for n in tail if n not in self.placed), key=self.tail.lateness))

    def _place_main(self, node: Node) -> None:
        if node in self.urgency:
            heappush(self.queue, (self.urgency[node], len(self.queue), node))
            return
        again = [ancestor for product in self.alike.get(node, ()) for ancestor in cone(product, self.placed)]
        for gather in filter(is_collective, again):
            self._place_all(cone(gather, self.placed))
        for needed in cone(node, self.assigned):
            self._gather_ahead(needed)
            while (late := self.tail.next(self.clock.now, self._has_links)) is not None:
                self._place_all(cone(late, self.placed))
            self._place_all(cone(needed, self.placed))

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
        read_bytes = sum(map(meta.size_bytes, {_source(operand) for node in products for operand in operands(node)}))
        return len(products) > sizes.in_flight and read_bytes > sizes.in_flight_bytes

    def _compute_first(self) -> None:
        """Compute the product that has waited longest, and end its gradient."""
        self._place_main(self.waiting.pop(0))
        while self.waiting and self.waiting[0].target not in PRODUCTS:
            self._place_main(self.waiting.pop(0))

    def _fill(self, wait: Node) -> None:
        """Compute the products that an earlier wait has left, whose operands are held; then others, as long as the rank
        would be idle until `wait` ends, or those of the same linear.
        """
        until = self.clock.ends.get(node_at(wait, 0), 0.0)
        while self.waiting:
            first = self.waiting[0]
            idle = self.beside.get(first, wait) is wait if self.fills == "own" else self.clock.now < until
            if not idle and first not in self.postponed:
                break
            self._compute_first()
        self.postponed = set(self.waiting)

    def _urgency(self, main: list[Node]) -> dict[Node, int]:
        """Reductions to be carried to the next call, with the position at which that call first needs their results."""
        seen = set(self.placed)
        for place, node in enumerate(main):
            for needed in cone(node, seen):
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
            ready_times = [ready[n] for n in node.all_input_nodes if n in ready]
            if ready_times and node in self.first_use:
                ready[node] = _NEVER if is_collective(node) else max(ready_times)
        able = [n for n, when in ready.items() if n.op == "call_function" and when < _NEVER]
        self.carried = {n: ready[n] for n in sorted(able, key=self.first_use.__getitem__)}

    def _update_carried(self, until: float) -> None:
        """Place updates whose carried gradients have arrived, as long as the rank would only wait."""
        for node, when in list(self.carried.items()):
            if self.clock.now >= until:
                return
            if node in self.placed or when <= self.clock.now:
                del self.carried[node]
                self._place_all(cone(node, self.placed))

    def _place_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node not in self.placed:
                if self.waiting and node in self.exchanges:
                    self._fill(node)
                if is_wait(node) and self.carried:
                    self._update_carried(self.clock.ends.get(node_at(node, 0), 0.0))
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
        terms = operands(node)
        return len(terms) == 2 and self.placed.issuperset(terms)

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
        total_bytes = sum(self.in_flight.values()) + meta.size_bytes(gather)
        if len(self.in_flight) >= sizes.in_flight and total_bytes > sizes.in_flight_bytes:
            return True
        arrives = [self.clock.ends[node_at(n, 0)] for n in self.ahead[gather] if is_wait(n) and n not in self.placed]
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
            for source in node.all_input_nodes:
                self.readers.setdefault(source, []).append(node)

    def learn(self, node: Node, clock: Clock) -> None:
        """`node` ran or, for a collective, started: collectives whose operands are all known may start."""
        todo = [node]
        while todo:
            source = todo.pop()
            for reader in self.readers.get(source, ()):
                arrives = clock.ends[source] if is_wait(reader) else self.ready.get(source, 0.0)
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


def _run_behind_messages(calls: Sequence[Node]) -> dict[Node, Node]:
    """The call of a region that follows each message of a micro-batch."""
    follows, run = dict[Node, Node](), None
    for node in reversed(calls):
        run = node if region_of(node) else run
        if run and node.target in STARTED:
            follows[node] = run
    return follows


def _spare(calls: Sequence[Node], main: Collection[Node], carried: Collection[Node]) -> set[Node]:
    """What only sums over pieces, complete gradients or reductions that are carried need of the backward. Gathers of
    activations start at their place all the same, and are waited for with what reads them.
    """
    spare = set[Node]()
    for node in reversed(calls):
        readers = [user for user in node.users if user in main or user.op == "output"]
        alone = meta.is_backward(node) and bool(node.users) and spare.issuperset(readers)
        ends = node.target in ACCUMULATORS or node in carried
        if node in main and (ends or (alone and not (readers and is_collective(node)))):
            spare.add(node)
    return spare


def _beside(
    calls: Sequence[Node], spare: Collection[Node], exchanges: Collection[Node]
) -> tuple[dict[Node, Node], dict[Node, list[Node]]]:
    """Of products for gradients of weights, the exchange of what the same linear gives to its input; of the products
    that give to that exchange, which read the same gradient, those for weights.
    """
    seen, exchange_of, alike = dict[Node, list[Node]](), dict[Node, Node](), dict[Node, list[Node]]()
    for node in calls:
        if node in spare and node.target in PRODUCTS:
            for operand in operands(node):
                seen.setdefault(_source(operand), []).append(node)
        for sender in reached([node_at(node_at(node, 0), 0)] if node in exchanges else [], _leads_there):
            if sender.target in PRODUCTS:
                alike[sender] = [product for factor in operands(sender) for product in seen.get(_source(factor), ())]
                exchange_of |= dict.fromkeys(alike[sender], node)
    return exchange_of, alike


def _leads_there(node: Node) -> list[Node]:
    return operands(node) if node.target not in PRODUCTS and meta.is_backward(node) and not is_wait(node) else []


def _source(node: Node) -> Node:
    """What `node` is a view of."""
    while node.target in FREE and operands(node):
        node = node_at(node, 0)
    return node
