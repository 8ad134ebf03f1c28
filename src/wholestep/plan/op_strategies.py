"""Op strategies: how one group of an op's rule runs along one axis (replicated, one factor sharded, partial)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch.fx import Node

from ..graph.op_kinds import packet_name
from ..layout import REPLICATED, AxisState, partial_by, sharded_along
from ..rules.call import Call
from ..rules.rule import BoundRule, Group
from ..sizes import text_of

WHOLE, RING, NEAR, PART = "whole", "ring", "near", "part"


@dataclass(frozen=True)
class OpStrategy:
    """The states along an axis of the operands (`takes`) and outputs (`gives`) of a group, by position.

    `factor` is the sharded factor, or empty. `name` is `whole`, `cut f` for factor f, `partial 0 sum` for sums
    through the first pass-through of the group, `ring`, `near` with a mask, or `part` of a dim.
    """

    name: str
    takes: Mapping[int, AxisState]
    gives: Mapping[int, AxisState]
    factor: str = ""

    @property
    def whole(self) -> bool:
        """True if nothing is sharded or partial."""
        return self.name == WHOLE


def whole(group: Group) -> OpStrategy:
    """All operands and outputs replicated."""
    return OpStrategy(WHOLE, dict.fromkeys(group.operands, REPLICATED), dict.fromkeys(group.outputs, REPLICATED))


def cut(group: Group, factor: str) -> OpStrategy:
    """Operands with `factor` are sharded by it; outputs that lack it are partial."""
    op = group.reduces.get(factor.partition(" in ")[0])
    reduced = partial_by(op) if op else REPLICATED
    takes = {i: group.state_by(factor, 0, i) or REPLICATED for i in group.operands}
    gives = {o: group.state_by(factor, 1, o) or reduced for o in group.outputs}
    return OpStrategy(f"cut {factor}", takes, gives, factor)


def through(group: Group, number: int, op: str) -> OpStrategy:
    """Operands of one pass-through of the group are partial, and so are the outputs."""
    partial, operands = partial_by(op), group.partial[number].operands
    takes = {i: partial if i in operands else REPLICATED for i in group.operands}
    return OpStrategy(f"partial {number} {op}", takes, dict.fromkeys(group.outputs, partial))


def ring(rule: BoundRule, group: Group, name: str = RING) -> OpStrategy | None:
    """Attention where ranks have pieces of queries, keys and values. `RING`: to the keys of one rank after another;
    `NEAR`: to keys within a window. None for other ops, and where a mask has a gradient.
    """
    base, backward = cut(group, "q"), any("q" not in term for term in group.outputs.values() if len(term) == 4)
    if "q" not in rule.local or (backward and len(group.outputs) > 3):
        return None
    cuts = [dict.fromkeys((at, at + 1), sharded_along(2)) for at in (1 + backward, 1)]
    takes, gives = {**base.takes, **cuts[0]}, {**base.gives, **(cuts[1] if backward else {})}
    return OpStrategy(name, takes, gives, "q")


def part_of(node: Node) -> tuple[OpStrategy, int, int] | None:
    """Of a call that takes a part of a dim, or puts one among zeros: that ranks have pieces of the dim, which one it
    is, and the place in the operand of what is first in the result. None for other calls.
    """
    if (name := packet_name(node.target)) not in ("slice", "slice_backward"):
        return None
    call = Call.of(node)
    dim: int = call.argument("dim", 0) % len(call.made())
    start, is_all = call.argument("start") or 0, text_of(call.made()[dim]) == text_of(call.shape(0)[dim])
    if is_all or type(start) is not int or start < 0 or call.argument("step", 1) != 1:
        return None
    pieces = {0: sharded_along(dim)}
    return OpStrategy(PART, pieces, pieces), dim, start if name == "slice" else -start


def op_strategies(group: Group, parts: int) -> Iterator[OpStrategy]:
    """All strategies of `group` on `parts` ranks, replicated first; partial values that may pass are to be summed."""
    yield whole(group)
    for factor in group.factors:
        if group.splits(factor, (parts,)):
            yield cut(group, factor)
    for number, passing in enumerate(group.partial):
        if "sum" in passing.ops:
            yield through(group, number, "sum")


def named(rule: BoundRule, group: Group, name: str) -> OpStrategy | None:
    """The strategy with this name; None if the group has none."""
    if name in (RING, NEAR):
        return ring(rule, group, name)
    passing = (through(group, number, op) for number, part in enumerate(group.partial) for op in part.ops)
    every = chain([whole(group)], (cut(group, factor) for factor in group.factors), passing)
    return next((strategy for strategy in every if strategy.name == name), None)
