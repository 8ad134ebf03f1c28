"""Axes that meet in one layout: in which order they cut a dim, and where partial ones are reduced to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ..layout import REPLICATED, Layout


def in_order(axes: Sequence[str], have: Sequence[Layout], moves: Sequence[bool]) -> list[str]:
    """Axes in an order that agrees with those that cut one dim together, outermost first; moving values decide."""
    pairs: dict[tuple[str, str], None] = {}
    for wanted in (True, False):
        for layout in (h for h, m in zip(have, moves, strict=True) if m == wanted):
            for outer, inner in (p for dim in layout.dims for p in combinations(dim, 2)):
                if (inner, outer) not in pairs:
                    pairs[outer, inner] = None
    left, out = list(axes), list[str]()
    while left:
        free = [a for a in left if not any((b, a) in pairs for b in left)]
        out.append((free or left)[0])
        left.remove(out[-1])
    return out


def reduced(partial: Layout, home: Layout) -> Layout:
    """`partial` with its partial axes in the state that `home` gives them; axes that cut a dim outside of them too."""
    out, whole = partial, [a for a, _ in partial.partial]
    for axes in home.dims:
        inner = max((i for i, a in enumerate(axes) if a in whole), default=-1)
        for axis in axes[: inner + 1]:
            if partial.state(axis).kind in ("P", "R"):
                out = out.put(axis, home.state(axis))
    for axis in whole:
        if home.state(axis).kind != "S":
            out = out.put(axis, REPLICATED)
    return out
