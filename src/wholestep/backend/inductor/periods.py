"""Finds stretches of a sequence that repeat back to back, such as the layers of a model in the order of its nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_SEED = 6
"""Neighbours that have to be equal for a repeat to be considered."""
_CANDIDATES = 64
"""Periods that are tried at a place: a layer may have as many equal parameters."""


@dataclass(frozen=True)
class Repeat:
    """`labels[i] == labels[i + period]` for all i from `start` to `stop - period`."""

    start: int
    stop: int
    period: int


def find_repeats(labels: Sequence[Hashable], least: int) -> list[Repeat]:
    """The repeats of a sequence, from left to right, none overlapping. Periods are multiplied to be at least `least`.

    At each place the period that covers most wins, and among those the shortest.
    """
    numbers = dict[Hashable, int]()
    ids = [numbers.setdefault(label, len(numbers)) for label in labels]
    seeds = [tuple(ids[i : i + _SEED]) for i in range(len(ids) - _SEED + 1)]
    places = defaultdict[tuple[int, ...], list[int]](list)
    for i, seed in enumerate(seeds):
        places[seed].append(i)
    rank = {i: n for starts in places.values() for n, i in enumerate(starts)}
    repeats: list[Repeat] = []
    at = 0
    while at < len(seeds):
        later = places[seeds[at]][rank[at] + 1 :][:_CANDIDATES]
        best = max((_from(ids, at, other - at) for other in later), key=lambda r: r.stop, default=None)
        if best is not None:
            period = best.period * -(-least // best.period)
            if best.stop - at >= 2 * period:
                repeats.append(Repeat(at, best.stop, period))
                at = best.stop
                continue
        at += 1
    return repeats


def _from(ids: Sequence[int], start: int, period: int) -> Repeat:
    stop = start + period
    while stop < len(ids) and ids[stop] == ids[stop - period]:
        stop += 1
    return Repeat(start, stop, period)
