"""The choices that a call of an op leaves along one axis: for each group of its rule a way, and where sums end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from ...cost.compute import flops
from ...graph import meta
from ...graph.graph import operands
from ...graph.meta import TensorMeta
from ...layout import REPLICATED, AxisState
from ...rules.find_rule import find_rule
from ...rules.rule import BoundRule, Group
from ..op_strategies import OpStrategy, ways
from .prices import Prices
from .problem import Load, Option


@dataclass(frozen=True)
class Unit:
    """One group of a call. `taken` and `given` are the operands and outputs whose states its options name."""

    options: tuple[Option, ...]
    taken: frozenset[int]
    given: frozenset[int]


def units(node: Node, prices: Prices, later: bool, settles: bool) -> list[Unit]:
    """One unit for each group; an op without a rule has one way, whole. `settles`: a partial result that several read
    may be reduced where it is made.
    """
    rule = find_rule(node) if prices.parts > 1 else None
    made = meta.tensors(node)
    if rule is None or not rule.groups:
        states = dict.fromkeys(range(len(made)), REPLICATED), dict.fromkeys(range(len(operands(node))), REPLICATED)
        busy = prices.op_us(node, {}, {})
        return [Unit((Option("", *states, Load(_phase(busy, later))),), frozenset(states[1]), frozenset(states[0]))]
    found: list[Unit] = []
    for number, group in enumerate(rule.groups):
        beside = _beside(rule, len(operands(node)), len(made)) if number == 0 else (frozenset[int](), frozenset[int]())
        options = list(_options(node, rule, group, prices, later, settles, beside))
        shared = rule.by_shape
        found.append(Unit(tuple(options), (frozenset(group.operands) | beside[0]) - shared, _outputs(group, beside[1])))
    return found


def settled(name: str) -> tuple[str, str]:
    """The way of an option, and the state that its result is reduced to, empty where it is not."""
    way, _, state = name.partition(" -> ")
    return way, state


def _options(
    node: Node, rule: BoundRule, group: Group, prices: Prices, later: bool, settles: bool,
    beside: tuple[frozenset[int], frozenset[int]],
) -> Iterator[Option]:  # fmt: skip
    for way in _worth_it(node, group, prices):
        takes = {
            **dict.fromkeys(beside[0], REPLICATED),
            **{i: s for i, s in way.takes.items() if i not in rule.by_shape},
        }
        gives = {**dict.fromkeys(beside[1], REPLICATED), **way.gives}
        share = 1 / len(rule.groups)
        us = prices.op_us(node, way.takes, way.gives) * share
        yield Option(way.name, gives, takes, Load(_phase(us, later)))
        whole = meta.tensor(node)
        if not settles or whole is None or gives[0].kind != "P":
            continue
        for state in states_of(whole, prices.parts):
            move = prices.move(whole, gives[0], state)
            if move is not None:
                load = Load(_phase(us + move.copied_us, later), _phase(move.sent_us, later))
                yield Option(f"{way.name} -> {state}", {0: state}, takes, load)


def _worth_it(node: Node, group: Group, prices: Prices) -> Iterator[OpStrategy]:
    """Ways but those that leave most ranks idle, and products of whole tensors that stay partial."""
    given, heavy = operands(node), flops(node) > 0
    for way in ways(group, prices.parts):
        if way.factor and any(
            s.kind == "S" and found.shape[s.dim] < prices.parts
            for i, s in way.takes.items() if (found := meta.tensor(given[i])) is not None
        ):  # fmt: skip
            continue
        if heavy and any(s.kind == "P" for s in way.takes.values()):
            continue
        yield way


def states_of(made: TensorMeta, parts: int) -> list[AxisState]:
    """Whole, and cut along each dim that has a row for every rank."""
    return [REPLICATED, *(AxisState("S", d) for d, size in enumerate(made.shape) if size >= parts > 1)]


def _beside(rule: BoundRule, given: int, made: int) -> tuple[frozenset[int], frozenset[int]]:
    """Operands and outputs that are in no group."""
    taken = {i for group in rule.groups for i in group.operands}
    out = {o for group in rule.groups for o in group.outputs}
    return frozenset(set(range(given)) - taken - rule.by_shape), frozenset(set(range(made)) - out)


def _outputs(group: Group, beside: frozenset[int]) -> frozenset[int]:
    return frozenset(group.outputs) | beside


def _phase(us: float, later: bool) -> tuple[float, float, float]:
    return (0.0, us, 0.0) if later else (us, 0.0, 0.0)
