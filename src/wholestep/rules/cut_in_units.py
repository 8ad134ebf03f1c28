"""Dims that are cut between whole units: merged dims whose pieces are those of their outer dim.

Rows and length merged into one dim of tokens are cut between rows, also where ranks have other numbers of rows. What an
op makes of a dim that is cut in units is cut in units too, as far as all of its operands are cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..sizes import equal, in_units, unit_of
from .call import Call
from .rule import BoundRule, Group

NO_PARTS = 1  # the size of a factor that divides into no equal parts


def in_whole_units(rule: BoundRule, call: Call) -> BoundRule:
    """`rule` for operands of which some dims are cut in units."""
    if all(unit_of(size) is None for operand in call.operands for size in operand.shape):
        return rule
    return replace(rule, groups=tuple(_group(group, call) for group in rule.groups))


def output_units(rule: BoundRule, call: Call) -> dict[int, tuple[int, ...]]:
    """The shapes of outputs that have dims which are cut in units, by position."""
    shapes: dict[int, tuple[int, ...]] = {}
    for group in rule.groups:
        units = {f: unit for f in group.factors if (unit := _unit(group, f, call)) is not None}
        for number, term in group.outputs.items():
            pairs = zip(call.made(number), term, strict=True)
            shape = tuple(in_units(n, _times(units[f], n, group.even.get(f))) if f in units else n for n, f in pairs)
            if any(f in units for f in term):
                shapes[number] = shape
    return shapes


def _group(group: Group, call: Call) -> Group:
    """`group` whose factors allow the parts into which all of their dims can be cut."""
    even, filled = dict(group.even), dict(group.filled)
    unit_factors: set[str] = set()
    for factor in group.factors:
        units = [unit for _, unit in _dims(group, factor, call)]
        if all(unit is None for unit in units):
            continue
        unit, size = _unit(group, factor, call), _size(group, factor, call)
        if unit is not None:
            unit_factors |= {factor} & group.even.keys()
            filled |= {factor: filled[factor] // unit} if factor in filled else {}
        elif factor not in group.even:
            even[factor] = _in_equal_parts(size, units)
        elif any(unit is not None and not equal((unit,), (1,)) for unit in units):
            even[factor] = NO_PARTS
    for (side, number, dim), factors in group.merged.items():  # blocks of an inner factor are cut anywhere
        unit = unit_of(call.shape(number)[dim]) if side == 0 and len(factors) == 1 else None
        if unit is not None and not equal((unit,), (1,)):
            even[factors[0]] = call.shape(number)[dim] // unit
    return replace(group, even=even, filled=filled, in_units=frozenset(unit_factors))


def _in_equal_parts(size: int, units: list[int | None]) -> int:
    """What has to divide into equal parts, so that dims with these units are cut at the same places."""
    cut_units = [unit for unit in units if unit is not None and not equal((unit,), (1,))]
    same = all(equal((unit,), (cut_units[0],)) for unit in cut_units)
    return size // cut_units[0] if same else NO_PARTS


def _unit(group: Group, factor: str, call: Call) -> int | None:
    """The places of a factor between which all operands are cut; None where they differ, or are cut anywhere."""
    size = group.even.get(factor)
    units: list[int | None] = []
    for n, unit in _dims(group, factor, call):
        if unit is None and size is not None:
            return None
        units.append(unit if size is None or unit is None else _quotient(unit, n // size))
    if all(unit is None for unit in units) or (size is not None and None in units):
        return None
    first, *rest = (1 if unit is None else unit for unit in units)
    return first if all(equal((first,), (other,)) for other in rest) else None


def _quotient(unit: int, inner: int) -> int | None:
    """The places of an outer dim in a unit of a dim in which each of them has `inner` places."""
    if equal((unit,), (inner,)):
        return 1
    places = unit // inner
    return places if equal((places * inner,), (unit,)) else None


def _times(unit: int, size: int, outer: int | None) -> int:
    return unit if outer is None else unit * (size // outer)


def _dims(group: Group, factor: str, call: Call) -> Iterator[tuple[int, int | None]]:
    """The size of each operand's dim that has a factor, and its unit."""
    for number, term in group.operands.items():
        for size, at in zip(call.shape(number), term, strict=True):
            if at == factor:
                yield size, unit_of(size)


def _size(group: Group, factor: str, call: Call) -> int:
    return group.even.get(factor) or next(_dims(group, factor, call))[0]
