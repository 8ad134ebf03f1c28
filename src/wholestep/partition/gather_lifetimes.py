"""Which stretch of the step a gathered parameter serves, and which values are cheaper to make again than to keep.

A step alternates between forward and backward. Within a stretch a parameter is gathered once. From a forward to its
backward it is kept, as far as the plan's budget goes, those that the backward needs first before the others; beyond it,
the parameter and all views and casts of it are made again where the backward needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from torch.fx import Node

from ..graph import meta
from ..graph.graph import Role, TrainGraph, operands
from ..graph.ops import CHEAP
from ..layout import Layout
from ..plan.plan import Plan


@dataclass
class Regions:
    """`stretch` numbers the alternations of forward and backward; `again` are parameters gathered in each anew."""

    stretch: dict[Node, int]
    source: dict[Node, Node]
    again: set[Node]
    on_demand: set[Node] = field(default_factory=set[Node])
    last: int = 0

    def at(self, node: Node) -> int:
        """The stretch in which `node` stands."""
        return self.stretch.get(node, 0)

    def of(self, node: Node, region: int, gathers: bool = True) -> int:
        """The region for which a value made from a parameter is made: its own stretch's, or one for all."""
        return region if gathers and self.source.get(node) in self.again else 0


def gathers(have: Layout, want: Layout) -> bool:
    """True if a tensor that rests as `have` is joined along some axis on its way to `want`."""
    return not set(have.shard_axes()) <= set(want.shard_axes())


def find_regions(graph: TrainGraph, plan: Plan) -> Regions:
    """Number the stretches of the step and choose which parameters are gathered again."""
    stretch, current, backward = dict[Node, int](), 0, False
    for node in graph.graph.nodes:
        if node.op == "call_function":
            if meta.is_backward(node) != backward:
                backward, current = not backward, current + 1
            stretch[node] = current
    source = _derived(graph, plan)
    regions = Regions(stretch, source, set(), last=current)
    regions.again = _beyond_budget(graph, plan, stretch, source)
    regions.on_demand = {n for n, p in source.items() if n is not p and p in regions.again}
    return regions


def _derived(graph: TrainGraph, plan: Plan) -> dict[Node, Node]:
    """Sharded parameters, and the views and casts made of one of them alone, with the parameter each comes from."""
    source = {
        node: node
        for given, node in graph.placeholders()
        if given.role is Role.PARAM and plan.rest[given.name].is_sharded
    }
    for node in graph.graph.nodes:
        given = operands(node)
        if (node.op == "call_function" and node.target in CHEAP and len(given) == 1 and given[0] in source) or (
            node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem" and given[0] in source
        ):
            source[node] = source[given[0]]
    return source


def _beyond_budget(graph: TrainGraph, plan: Plan, stretch: dict[Node, int], source: dict[Node, Node]) -> set[Node]:
    """Parameters gathered for several stretches that do not fit the budget, first served is who is needed first; and
    those that the plan names.
    """
    budget, named = plan.options.keep_gathered_bytes, frozenset(plan.options.again)
    if budget is None and not named:
        return set()
    asked = {node for given, node in graph.placeholders() if given.name in named}
    rest = {node: plan.rest[given.name] for given, node in graph.placeholders()}
    uses, held = dict[Node, list[tuple[int, int]]](), dict[Node, int]()
    for order, node in enumerate(graph.graph.nodes):
        if node.op != "call_function" or node in source:
            continue
        wants = plan.decisions[node.name].operands
        for given, want in zip(operands(node), wants, strict=False):
            param = source.get(given)
            if param is None or not gathers(rest[param], want):
                continue
            uses.setdefault(param, []).append((stretch[node], order))
            still = prod(plan.mesh.axis_size(axis) for axis in want.shard_axes())
            held[param] = max(
                held.get(param, 0), sum(made.size_bytes for made in [meta.tensor(param)] if made) // still
            )
    several = {p: u for p, u in uses.items() if len({s for s, _ in u}) > 1}

    def idle(param: Node) -> int:
        """How many nodes pass between its last use in one stretch and its first in the next."""
        points = sorted(several[param])
        return min(b[1] - a[1] for a, b in pairwise(points) if a[0] != b[0])

    again = asked & set(several)
    if budget is None:
        return again
    for param in sorted((p for p in several if p not in again), key=idle):
        if held[param] > budget:
            again.add(param)
        else:
            budget -= held[param]
    return again
