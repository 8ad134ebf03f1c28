"""Ways to run one group of an op's rule along one axis: partial values passed through, one factor cut, all whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..layout import REPLICATED, AxisState
from ..rules.rule import Group, Term

WHOLE = "whole"
_PARTIAL = "partial"


@dataclass(frozen=True)
class OpStrategy:
    """What a group takes and gives along an axis, by position; `factor` is the one it cuts, empty where it cuts none.

    `name` says which of the group's ways it is: `whole`, `cut f`, or `partial 0 sum`: the first of its pass-throughs,
    for sums.
    """

    name: str
    takes: Mapping[int, AxisState]
    gives: Mapping[int, AxisState]
    factor: str = ""

    @property
    def whole(self) -> bool:
        """True where nothing is cut and nothing passes partial."""
        return self.name == WHOLE


def whole(group: Group) -> OpStrategy:
    """Every operand whole, and so every output."""
    return OpStrategy(WHOLE, dict.fromkeys(group.operands, REPLICATED), dict.fromkeys(group.outputs, REPLICATED))


def cut(group: Group, factor: str) -> OpStrategy:
    """Operands that have `factor` are cut by it; outputs that have lost it are partial."""
    left = AxisState("P", op=group.reduces[factor]) if factor in group.reduces else REPLICATED
    takes = {i: _at(term, factor) for i, term in group.operands.items()}
    gives = {o: _at(term, factor) if factor in term else left for o, term in group.outputs.items()}
    return OpStrategy(f"cut {factor}", takes, gives, factor)


def through(group: Group, number: int, op: str) -> OpStrategy:
    """Operands of one of the group's pass-throughs hold partial values, and so do the outputs."""
    partial, operands = AxisState("P", op=op), group.partial[number].operands
    takes = {i: partial if i in operands else REPLICATED for i in group.operands}
    return OpStrategy(f"{_PARTIAL} {number} {op}", takes, dict.fromkeys(group.outputs, partial))


def ways(group: Group, parts: int, op: str = "sum") -> Iterator[OpStrategy]:
    """Every way to run `group` on `parts` ranks, whole first; `op` is that of the partial values that may pass."""
    yield whole(group)
    for factor in group.factors:
        if group.splits(factor, parts):
            yield cut(group, factor)
    for number, passing in enumerate(group.partial):
        if op in passing.ops:
            yield through(group, number, op)


def named(group: Group, name: str) -> OpStrategy | None:
    """The way of that name; None where the group has none."""
    kind, _, rest = name.partition(" ")
    if kind == _PARTIAL:
        number, _, op = rest.partition(" ")
        return through(group, int(number), op) if int(number) < len(group.partial) else None
    if kind == "cut":
        return cut(group, rest) if rest in group.factors else None
    return whole(group) if name == WHOLE else None


def _at(term: Term, factor: str) -> AxisState:
    return AxisState("S", list(term).index(factor)) if factor in term else REPLICATED
