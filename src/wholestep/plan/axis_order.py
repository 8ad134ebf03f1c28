"""Layouts that several axes share: the order in which axes shard a dim, and the layout partial axes are reduced to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ..layout import REPLICATED, Layout


def in_order(axes: Sequence[str], have: Sequence[Layout], moves: Sequence[bool]) -> list[str]:
    """`axes` in an order that agrees with layouts that shard one dim over several, outermost first.

    `moves`: which of `have` depend on the batch; these decide where layouts disagree.
    """
    pairs: dict[tuple[str, str], None] = {}
    for wanted in (True, False):
        for layout in (h for h, m in zip(have, moves, strict=True) if m == wanted):
            for outer, inner in (p for dim in layout.dims for p in combinations(dim, 2)):
                if (inner, outer) not in pairs:
                    pairs[outer, inner] = None
    remaining, out = list(axes), list[str]()
    while remaining:
        outermost = [a for a in remaining if not any((b, a) in pairs for b in remaining)]
        out.append((outermost or remaining)[0])
        remaining.remove(out[-1])
    return out


def reduced(partial: Layout, home: Layout) -> Layout:
    """`partial` with its partial axes, and axes that shard a dim outside of these, in the state that `home` has."""
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
