"""Gives programs the order of collectives of another one: ranks and schedules that differ would deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import ClassVar

from torch.fx import Graph, Node

from ..errors import RankMismatchError
from ..graph.graph import LocalGraph
from ..graph.loop import named_bodies, put_bodies
from ..graph.nodes import copy_graph, is_collective, operands
from .base import InContext
from .context import Choice, Context

ORDER: Choice[tuple[str, ...]] = Choice("order", "in which order collectives run", tuple[str, ...])
"""Names of the collectives of a program, in order: ranks whose batches differ in size may prefer others."""


@dataclass(frozen=True)
class SameOrder(InContext):
    """Gives all ranks the order of collectives that they decided on; without ranks nothing changes. `Overlap` may order
    collectives differently on ranks whose batches differ in size: they would deadlock.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True
    keeps_nothing: ClassVar[bool] = True

    def within(self, local: LocalGraph, context: Context) -> LocalGraph:
        """The program with its collectives, and then its calls, in that order."""
        if context.decide is not None:
            order = context.decide(ORDER, lambda: tuple(collectives_of(local)), local)
            local = with_collectives_in(local, order)
            local = local if local.across is None else in_one_order(local)
        return local if context.calls is None else context.calls(local)


@dataclass
class CallOrder:
    """Gives programs with the same calls one order: that of the first one that it is called with. Prices decide an
    order, and passes behind it number what they add.
    """

    names: list[dict[str, int]] = field(default_factory=list[dict[str, int]])

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The program with its calls in that order; as it is if it has others."""
        graphs = [program.graph for program in (local, *(local.across or ()))]
        calls = [[node for node in graph.nodes if node.op == "call_function"] for graph in graphs]
        if not self.names:
            self.names = [{node.name: place for place, node in enumerate(each)} for each in calls]
        if [{node.name for node in each} for each in calls] != [each.keys() for each in self.names]:
            return local
        pairs = zip(graphs, calls, self.names, strict=True)
        reordered = [_in_order(graph, sorted(each, key=lambda n: places[n.name])) for graph, each, places in pairs]
        if local.across is None:
            return replace(local, graph=reordered[0])
        first, flush = (replace(end, graph=graph) for end, graph in zip(local.across, reordered[1:], strict=True))
        return replace(local, graph=reordered[0], across=(first, flush))


def with_collectives_in(local: LocalGraph, names: Sequence[str]) -> LocalGraph:
    """The graph with its collectives, and those of the bodies that it runs for pieces, in the order `names`; other
    nodes keep their order as far as possible. Raises RankMismatchError if the graph has other collectives, or they
    cannot run in that order.
    """
    collectives = collectives_of(local)
    if collectives == list(names):
        return local
    if sorted(collectives) != sorted(names):
        raise _other_order(len(collectives), len(names))
    place = {name: number for number, name in enumerate(names)}
    reordered = replace(local, graph=_with_collectives_in(local.graph, place, ""))
    bodies = named_bodies(reordered.graph).items()
    put_bodies(reordered.graph, {body: _with_collectives_in(body, place, f"{name}/") for name, body in bodies})
    return reordered


def _with_collectives_in(graph: Graph, place: Mapping[str, int], label: str) -> Graph:
    """A copy of a graph, or of the body that `label` begins the names of, with its collectives in order."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    order = sorted_with(calls, sorted((n for n in calls if is_collective(n)), key=lambda n: place[label + n.name]))
    if len(order) < len(calls):
        raise _other_order(len(place), len(place))
    return _in_order(graph, order)


def _other_order(count: int, first_count: int) -> RankMismatchError:
    problem = f"this rank cannot run its {count} collectives in the order of the first rank's {first_count}"
    needed = "ranks whose programs differ only in sizes of the batch"
    return RankMismatchError(problem, needed, "pass schedule=None, or batches for which the step is the same")


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
    names = [n.name for n in local.graph.nodes if is_collective(n)]
    bodies = named_bodies(local.graph).items()
    return names + [f"{name}/{n.name}" for name, body in bodies for n in body.nodes if is_collective(n)]


def sorted_with(calls: Sequence[Node], chain: Sequence[Node]) -> list[Node]:
    """`calls` in a topological order that has `chain` in its order, and keeps positions as far as possible; a cycle is
    left out.
    """
    before = {node: [source for source in operands(node) if source.op == "call_function"] for node in calls}
    for first, second in pairwise(chain):
        before[second].append(first)
    place = {node: i for i, node in enumerate(calls)}
    pending = {node: len(before[node]) for node in calls}
    after: dict[Node, list[Node]] = {node: [] for node in calls}
    for node in calls:
        for source in before[node]:
            after[source].append(node)
    ready = [place[node] for node in calls if not pending[node]]
    heapify(ready)
    order: list[Node] = []
    while ready:
        node = calls[heappop(ready)]
        order.append(node)
        for reader in after[node]:
            pending[reader] -= 1
            if not pending[reader]:
                heappush(ready, place[reader])
    return order


def _in_order(graph: Graph, order: list[Node]) -> Graph:
    """A copy with the call nodes in `order`."""
    copied = copy_graph(graph)
    twin = dict(zip(graph.nodes, copied.nodes, strict=True))
    put_in_order(copied, [twin[node] for node in order])
    return copied


def put_in_order(graph: Graph, order: list[Node]) -> None:
    """Put the call nodes of `graph` into `order`."""
    output = next(iter(reversed(graph.nodes)))
    for node in order:
        output.prepend(node)
