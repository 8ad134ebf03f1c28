"""The choices of a call along one axis: for each group of its rule an op strategy, and where sums are reduced."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ...cost.compute import flops
from ...graph import meta
from ...graph.meta import TensorMeta
from ...graph.nodes import operands
from ...layout import REPLICATED, AxisState
from ...plan.op_strategies import OpStrategy, op_strategies
from ...rules.find_rule import find_rule
from ...rules.rule import BoundRule, Group
from .prices import Prices
from .problem import Option, Phases, StepLoad


def op_options(node: Node, prices: Prices, later: bool, may_reduce: bool) -> list[tuple[Option, ...]]:
    """The options of each group of a call, all with states of the same operands and outputs; an op without a rule has
    one option, replicated.

    `later`: the call is in the backward. `may_reduce`: a partial result may be reduced at once, as several ops read it.
    """
    rule = find_rule(node) if prices.parts > 1 else None
    count, outputs = len(operands(node)), range(len(meta.tensors(node)))
    if rule is None or not rule.groups:
        gives, takes = dict.fromkeys(outputs, REPLICATED), dict.fromkeys(range(count), REPLICATED)
        load = StepLoad(in_phase(prices.op_us(node, {}, {}), later))
        return [(Option(gives, takes, load),)]
    grouped_operands = {i for group in rule.groups for i in group.operands}
    grouped_outputs = {o for group in rule.groups for o in group.outputs}
    ungrouped = frozenset({*range(count)} - grouped_operands - rule.by_shape), frozenset({*outputs} - grouped_outputs)
    choices: list[tuple[Option, ...]] = []
    for group in rule.groups:
        choices.append(tuple(_options(node, rule, group, prices, later, may_reduce, ungrouped)))
        ungrouped = frozenset[int](), frozenset[int]()  # in the first group only
    return choices


def _options(
    node: Node, rule: BoundRule, group: Group, prices: Prices, later: bool, may_reduce: bool,
    ungrouped: tuple[frozenset[int], frozenset[int]],
) -> Iterator[Option]:  # fmt: skip
    for option in _candidates(node, group, prices):
        takes = {i: s for i, s in option.takes.items() if i not in rule.by_shape}
        takes = dict.fromkeys(ungrouped[0], REPLICATED) | takes
        gives = dict.fromkeys(ungrouped[1], REPLICATED) | {**option.gives}
        us = prices.op_us(node, option.takes, option.gives) * (1 / len(rule.groups))
        yield Option(gives, takes, StepLoad(in_phase(us, later)), option.name)
        tensor = meta.tensor(node)
        if not may_reduce or tensor is None or gives[0].kind != "P":
            continue
        for state in states_of(tensor, prices.parts):
            move = prices.move(tensor, gives[0], state)
            if move is not None:
                load = StepLoad(in_phase(us + move.copied_us, later), in_phase(move.sent_us, later))
                yield Option({0: state}, takes, load, option.name, reduced=True)


def _candidates(node: Node, group: Group, prices: Prices) -> Iterator[OpStrategy]:
    """The op strategies under which every rank has rows, and no product of replicated tensors stays partial."""
    arguments, heavy = operands(node), flops(node) > 0
    for option in op_strategies(group, prices.parts):
        if option.factor and any(
            s.kind == "S" and tensor.shape[s.dim] < prices.parts
            for i, s in option.takes.items() if (tensor := meta.tensor(arguments[i])) is not None
        ):  # fmt: skip
            continue
        if heavy and any(s.kind == "P" for s in option.takes.values()):
            continue
        yield option


def states_of(tensor: TensorMeta, parts: int) -> list[AxisState]:
    """Replicated, and sharded on each dim that has a row for every rank."""
    return [REPLICATED, *(AxisState("S", d) for d, size in enumerate(tensor.shape) if size >= parts > 1)]


def in_phase(us: float, later: bool) -> Phases:
    """Microseconds in the backward, or else in the forward."""
    return (0.0, us, 0.0) if later else (us, 0.0, 0.0)
