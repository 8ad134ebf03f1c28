"""Fits the curve of a collective to measured times by least absolute log errors, so that all sizes weigh the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .curves import ALGORITHMS, Curve, Regime

Array = np.ndarray[Any, np.dtype[np.float64]]
_MOST = 30.0  # bound of a parameter's logarithm: the samples may not determine every parameter


@dataclass(frozen=True)
class TimeSample:
    """One measured collective: bytes of the largest buffer of a rank, units of the group (see `hardware.curves`), time,
    and the weight of its error.
    """

    size_bytes: float
    units: tuple[int, ...]
    us: float
    weight: float = 1.0


def fit_curve(
    kind: str, algorithm: str, samples: Sequence[TimeSample], rates: Sequence[float], latencies: Sequence[float],
    own_bytes_per_us: float = 0.0,
) -> Curve:  # fmt: skip
    """The curve of two regimes that fits `samples` best on links of `rates` and `latencies`.

    Only groups of several sizes separate the cost of a rank's own piece from that of the link: with groups of one size,
    `own_bytes_per_us` is kept. Fewer than six samples are fitted by a single regime.
    """
    us, weight = np.array([s.us for s in samples]), np.array([s.weight for s in samples])
    carried, hops = np.array([_links(kind, algorithm, s, rates, latencies) for s in samples]).T
    own = np.array([s.size_bytes / s.units[0] for s in samples])
    several, two = len({s.units[0] for s in samples}) > 1, len(samples) >= 6

    def predicted(p: Array) -> Array:
        base, late, rate, more, long, per_own = np.exp(np.clip(p, -_MOST, _MOST))
        quick = base + late * hops + carried / rate
        kept = own / (per_own if several else own_bytes_per_us) if several or own_bytes_per_us else 0.0
        if not two:
            return quick + kept
        return np.minimum(quick, base + more + late * hops + carried / (rate * (1 + long))) + kept

    def loss(p: Array) -> float:
        # the last term keeps a latency that the samples do not determine at that of the link
        return float((weight * np.abs(np.log(predicted(p) / us))).sum() / weight.sum() + 1e-4 * np.square(p[1]))

    least = float(us.min())
    starts: list[Array] = [
        np.log([0.6 * least, 1.0, 0.4, 0.7 * least, 1.0, 500e3]), np.log([0.5 * least, 0.5, 0.6, 3 * least, 0.6, 2e6]),
        np.log([0.9 * least, 0.2, 0.1, 6 * least, 6.0, 1e6]), np.log([0.9 * least, 0.05, 0.8, least, 0.2, 1e6]),
    ]  # fmt: skip
    best = min((simplex(loss, start) for start in starts), key=loss)
    base, late, rate, more, long, per_own = (float(v) for v in np.exp(np.clip(best, -_MOST, _MOST)))
    regimes = [Regime(base, late, rate), Regime(base + more, late, rate * (1 + long))]
    return Curve(kind, algorithm, tuple(regimes if two else regimes[:1]), per_own if several else own_bytes_per_us)


def _links(
    kind: str, algorithm: str, sample: TimeSample, rates: Sequence[float], latencies: Sequence[float]
) -> tuple[float, float]:
    """Microseconds of data on the slowest level, and of hops."""
    loads = ALGORITHMS[algorithm](kind, sample.units)
    carried = max(sample.size_bytes * load.share / rate for load, rate in zip(loads, rates, strict=False))
    return carried, sum(load.hops * late for load, late in zip(loads, latencies, strict=False))


def simplex(loss: Callable[[Array], float], start: Array, step: float = 0.4, rounds: int = 1500) -> Array:
    """A minimum of `loss` by the method of Nelder and Mead from `start`, restarted once from its result."""
    for _ in range(2):
        start = _simplex(loss, start, step, rounds)
    return start


def _simplex(loss: Callable[[Array], float], start: Array, step: float, rounds: int) -> Array:
    sides: Array = step * np.eye(len(start))
    found: list[tuple[float, Array]] = [(loss(p), p) for p in (start, *(start + side for side in sides))]
    for _ in range(rounds):
        found.sort(key=_first)
        (best, middle), (worst, last) = found[0], found[-1]
        if worst - best < 1e-9:
            break
        centre: Array = sum((p for _, p in found[1:-1]), middle) / len(start)
        opposite = 2 * centre - last
        tried = [(loss(opposite), opposite)]
        if tried[0][0] < best:
            far = 3 * centre - 2 * last
            tried.append((loss(far), far))
        elif tried[0][0] >= found[-2][0]:
            near = 0.5 * (centre + last)
            tried.append((loss(near), near))
        chosen = min(tried, key=_first)
        if chosen[0] < worst:
            found[-1] = chosen
        else:
            closer = [0.5 * (middle + p) for _, p in found[1:]]
            found[1:] = [(loss(p), p) for p in closer]
    return min(found, key=_first)[1]


def _first(pair: tuple[float, Array]) -> float:
    return pair[0]
