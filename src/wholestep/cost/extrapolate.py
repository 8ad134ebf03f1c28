"""Costs that are linear in the layers of a step, from two steps with few of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

T = TypeVar("T")


def extrapolated(smaller: T, larger: T, times: float) -> T:
    """`smaller` plus `times` the difference to `larger`: number by number in tuples, mappings (a key that is missing is
    0, and 0 is left out) and dataclasses. Whole numbers stay whole, nothing is below 0, and what is no number stays.

    Example:
        >>> extrapolated((1, {"all_reduce": 2.0}), (2, {"all_reduce": 2.5}), 10)
        (11, {'all_reduce': 7.0})
    """
    grown: Any = smaller
    if isinstance(smaller, tuple):
        two = cast("tuple[tuple[Any, ...], tuple[Any, ...]]", (smaller, larger))
        grown = tuple(extrapolated(a, b, times) for a, b in zip(*two, strict=True))
    elif isinstance(smaller, Mapping):
        a, b = cast("tuple[Mapping[Any, float], Mapping[Any, float]]", (smaller, larger))
        grown = {key: size for key in {**a, **b} if (size := extrapolated(a.get(key, 0), b.get(key, 0), times))}
    elif is_dataclass(smaller) and not isinstance(smaller, type):
        pairs = ((f.name, getattr(smaller, f.name), getattr(larger, f.name)) for f in fields(smaller))
        grown = replace(smaller, **{name: extrapolated(a, b, times) for name, a, b in pairs})
    elif isinstance(smaller, (int, float)) and smaller != larger:
        size = max(smaller + (cast(float, larger) - smaller) * times, 0.0)
        grown = round(size) if isinstance(smaller, int) and isinstance(larger, int) else size
    return grown
