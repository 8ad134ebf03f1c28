"""Chooses which gathered parameters and activations stay in memory between forward and backward.

The step alternates between forward and backward segments. A parameter is gathered once per segment. Gathered
parameters are kept from forward to backward within the plan's budget, shortest time between uses first; other
parameters are re-gathered in the backward, and their views and casts recomputed. So are activations along the axes that
the plan names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import CHEAP, FLOAT8, is_pointwise
from ..layout import Layout
from ..plan.plan import Plan


@dataclass
class Regions:
    """The forward and backward segments of a step, and the lifetimes of gathered parameters in these.

    `segment` numbers the segments; `source` maps views and casts of a parameter or activation to it; those in
    `regathered` are gathered in each segment; `on_demand` are their views and casts. Casts to float8 are gathered as
    parameters are, and made once: their scale needs all of the parameter.
    """

    segment: dict[Node, int]
    source: dict[Node, Node]
    regathered: set[Node]
    on_demand: set[Node] = field(default_factory=set[Node])
    last: int = 0

    def of(self, node: Node, segment: int, gathers: bool = True) -> int:
        """Return the segment for which a value is computed: `segment` if it is re-gathered, else 0 (for all)."""
        return segment if gathers and self.source.get(node) in self.regathered else 0

    def is_backward(self, segment: int) -> bool:
        """Return whether a segment is of a backward: the first is of the forward, and they alternate."""
        return segment % 2 == 1


def gathers(have: Layout, want: Layout) -> bool:
    """Return whether resharding from `have` to `want` gathers along an axis."""
    return not set(have.shard_axes()) <= set(want.shard_axes())


def find_regions(graph: TrainGraph, plan: Plan) -> Regions:
    """Number the segments of the step and choose the parameters that are re-gathered."""
    segment, current, backward = dict[Node, int](), 0, False
    for node in graph.graph.nodes:
        if node.op == "call_function":
            if meta.is_backward(node) != backward:
                backward, current = not backward, current + 1
            segment[node] = current
    have = {
        node: plan.storage[spec.name] for spec, node in graph.placeholders()
        if spec.role is Role.PARAM and plan.storage[spec.name].is_sharded
    } | _activations(graph, plan)  # fmt: skip
    source = _derived(graph, have)
    regathered = _regathered(graph, plan, segment, source, have)
    on_demand = {n for n, p in source.items() if n is not p and p in regathered and not _is_float8_cast(n)}
    return Regions(segment, source, regathered, on_demand, current)


def _activations(graph: TrainGraph, plan: Plan) -> dict[Node, Layout]:
    """Layouts of what the forward computes and gathers along the axes of `plan.options.regathered_along`."""
    along, layouts = set(plan.options.regathered_along), dict[Node, Layout]()
    for node in graph.graph.nodes if along else ():
        if node.op != "call_function" or meta.is_backward(node):
            continue
        for operand, want in zip(operands(node), plan.decisions[node.name].operands, strict=False):
            decision = plan.decisions.get(operand.name)
            if operand.op == "call_function" and decision is not None and len(decision.outputs) == 1:
                have = decision.reshards_to or decision.outputs[0]
                if along & (set(have.shard_axes()) - set(want.shard_axes())):
                    layouts[operand] = have
    return layouts


def _derived(graph: TrainGraph, sources: Iterable[Node]) -> dict[Node, Node]:
    """Map each of `sources`, and each view and cast of only one of them, to it."""
    source = {node: node for node in sources}
    for node in graph.graph.nodes:
        inputs = operands(node)
        derived = (node.target in CHEAP and len(inputs) == 1) or _torch.is_getitem(node.target)
        if node.op == "call_function" and derived and inputs[0] in source:
            source[node] = source[inputs[0]]
        elif _is_float8_cast(node) and (param := _scaled_param(node, source)) is not None:
            source[node] = param
    return source


def _is_float8_cast(node: Node) -> bool:
    tensor = meta.tensor(node) if node.target is torch.ops.aten._to_copy.default else None
    return tensor is not None and tensor.dtype in FLOAT8


def _scaled_param(node: Node, source: dict[Node, Node]) -> Node | None:
    """Return the parameter whose elements, scaled, are those of `node`."""
    size = meta.one_tensor(node).numel
    while node not in source:
        inputs = operands(node)
        tensor = meta.tensor(inputs[0]) if inputs and (is_pointwise(node.target) or node.target in CHEAP) else None
        if tensor is None or tensor.numel != size:
            return None
        node = inputs[0]
    return source[node]


def _regathered(
    graph: TrainGraph, plan: Plan, segment: dict[Node, int], source: dict[Node, Node], have: Mapping[Node, Layout]
) -> set[Node]:
    """Return the parameters used in several segments that the plan names, or that exceed its budget, and the
    activations. `have`: the layout of each.
    """
    budget, named = plan.options.keep_gathered_bytes, frozenset(plan.options.regathered)
    chosen = {node for spec, node in graph.placeholders() if spec.name in named}
    chosen |= {node for node in have if node.op == "call_function"}
    if budget is None and not chosen:
        return set()
    uses, gathered_bytes = dict[Node, list[tuple[int, int]]](), dict[Node, int]()
    for order, node in enumerate(graph.graph.nodes):
        if node.op != "call_function" or node in source:
            continue
        wants = plan.decisions[node.name].operands
        for operand, want in zip(operands(node), wants, strict=False):
            param = source.get(operand)
            if param is None or not gathers(have[param], want):
                continue
            uses.setdefault(param, []).append((segment[node], order))
            tensor = meta.tensor(operand)
            shards = prod(plan.mesh.axis_size(axis) for axis in want.shard_axes())
            gathered_bytes[param] = max(gathered_bytes.get(param, 0), (tensor.size_bytes if tensor else 0) // shards)
    several = {p: u for p, u in uses.items() if len({s for s, _ in u}) > 1}

    def idle(param: Node) -> int:
        """Return the number of nodes between the last use in a segment and the first in the next."""
        points = sorted(several[param])
        return min(b[1] - a[1] for a, b in pairwise(points) if a[0] != b[0])

    regathered = chosen & set(several)
    if budget is None:
        return regathered
    for param in sorted((p for p in several if p not in regathered), key=idle):
        if gathered_bytes[param] > budget:
            regathered.add(param)
        else:
            budget -= gathered_bytes[param]
    return regathered
