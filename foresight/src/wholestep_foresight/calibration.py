"""Fits a `Hardware` to the measured times of a job, and reports the error of the fit.

Curves of collectives are fitted by least absolute log errors, so that all sizes weigh the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np

from wholestep.hardware.curves import ALGORITHMS, Curve, Regime, curve_us
from wholestep.hardware.device import Ceiling, Device
from wholestep.hardware.hardware import Hardware, Level

Array = np.ndarray[Any, np.dtype[np.float64]]
_MOST = 30.0  # bound of a parameter's logarithm: the samples may not determine every parameter


@dataclass(frozen=True)
class TimeSample:
    """One measured collective: largest buffer of a rank, units (`hardware.curves`), time, weight of its error."""

    size_bytes: float
    units: tuple[int, ...]
    us: float
    weight: float = 1.0


@dataclass(frozen=True)
class TimedCollective:
    """One measured collective, of a group whose outermost level is number `level`."""

    kind: str
    level: int
    sample: TimeSample


@dataclass(frozen=True)
class TimedProduct:
    """One measured matrix product."""

    dtype: str
    b: int
    m: int
    n: int
    k: int
    us: float


@dataclass(frozen=True)
class Measurements:
    """The measurements of a job.

    Args:
        device: its name.
        memory_bytes: of the device, for each rank.
        launch_us: of an op on a few elements.
        moved: bytes read plus written by an elementwise op, and microseconds; the largest last.
        products: matrix products by shape and dtype.
        levels: name and ranks of a unit, inner to outer; 0 ranks in the last.
        sent: collectives by kind, level and size.
        library: of collectives, as `nccl` or `gloo`.
    """

    device: str
    memory_bytes: int
    launch_us: float
    moved: tuple[tuple[int, float], ...]
    products: tuple[TimedProduct, ...]
    levels: tuple[tuple[str, int], ...]
    sent: tuple[TimedCollective, ...]
    library: str


@dataclass(frozen=True)
class FitError:
    """The relative error of the fit of `what` over `count` measurements: median and worst."""

    what: str
    count: int
    median: float
    worst: float


def fit(name: str, measured: Measurements, alone: tuple[Level, ...]) -> tuple[Hardware, list[FitError]]:
    """The hardware `name`, and an error for each curve and dtype. Without measured links, its levels are `alone`."""
    device = _device(measured)
    errors = [_product_error(device, measured, top.dtype) for top in device.ceilings]
    levels: list[Level] = []
    for number, (level, ranks) in enumerate(measured.levels):
        here = [timed for timed in measured.sent if timed.level == number]
        levels.append(_level(level, ranks, here, levels, measured.library))
        crossed = levels[: number + 1]
        for curve in levels[-1].curves:
            samples = [timed.sample for timed in here if timed.kind == curve.kind]
            rates, late = [link.bytes_per_us for link in crossed], [link.latency_us for link in crossed]
            wrong = [abs(curve_us(curve, s.size_bytes, s.units, rates, late) / s.us - 1) for s in samples]
            errors.append(FitError(f"{level} {curve.kind}", len(wrong), median(wrong), max(wrong)))
    return Hardware(name, device, tuple(levels) or alone, ("wholestep calibrate",)), errors


def _device(measured: Measurements) -> Device:
    size, us = measured.moved[-1]
    best: dict[str, float] = {}
    for product in measured.products:
        rate = 2.0 * product.b * product.m * product.n * product.k / max(product.us - measured.launch_us, 1e-3)
        best[product.dtype] = max(best.get(product.dtype, 0.0), rate)
    rate = size / max(us - measured.launch_us, 1e-3)
    device = Device(
        measured.device, measured.memory_bytes, rate, tuple(Ceiling(dtype, top) for dtype, top in best.items()),
        memory_rate=1.0, launch_us=measured.launch_us, host_us=measured.launch_us,
    )  # fmt: skip
    ceilings = tuple(replace(top, rate=_typical(device, measured, top)) for top in device.ceilings)
    return replace(device, ceilings=ceilings)


def _typical(device: Device, measured: Measurements, top: Ceiling) -> float:
    """The share of the best rate with the least absolute log error: the median share."""
    return median(
        2.0 * p.b * p.m * p.n * p.k / max(p.us - device.launch_us, 1e-3) / top.flops_per_us
        for p in measured.products
        if p.dtype == top.dtype
    )


def _product_error(device: Device, measured: Measurements, dtype: str) -> FitError:
    products = [p for p in measured.products if p.dtype == dtype]
    wrong = [abs((device.launch_us + device.matmul_us(p.b, p.m, p.n, p.k, dtype)) / p.us - 1) for p in products]
    return FitError(f"products in {dtype}", len(products), median(wrong), max(wrong))


def _level(name: str, ranks: int, sent: Sequence[TimedCollective], inner: Sequence[Level], library: str) -> Level:
    """The rate of the link is that of the largest all-gather; the curves contain the time to start."""
    gathers = sorted((timed.sample for timed in sent if timed.kind == "all_gather"), key=lambda s: s.size_bytes)
    largest, least = gathers[-1], min(s.us for s in gathers)
    ranks_below = largest.units[0] / largest.units[len(inner)]
    share = (largest.units[0] - 1) / largest.units[0] / ranks_below
    rate = largest.size_bytes * share / max(largest.us - least, 0.05 * largest.us)
    latency = least / (2 * max(largest.units[0] - 1, 1))
    rates, late = [*(level.bytes_per_us for level in inner), rate], [*(level.latency_us for level in inner), latency]
    curves = [
        fit_curve(kind, _algorithm(kind, library), [timed.sample for timed in sent if timed.kind == kind], rates, late)
        for kind in dict.fromkeys(timed.kind for timed in sent)
    ]
    return Level(name, ranks, rate, latency, tuple(curves))


def _algorithm(kind: str, library: str) -> str:
    return "pairwise" if kind == "all_to_all" else "gloo" if library == "gloo" else "ring"


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
    own_bytes = np.array([s.size_bytes / s.units[0] for s in samples])
    several, two = len({s.units[0] for s in samples}) > 1, len(samples) >= 6

    def predicted(p: Array) -> Array:
        base, late, rate, extra, long, per_own = np.exp(np.clip(p, -_MOST, _MOST))
        quick = base + late * hops + carried / rate
        own_us = own_bytes / (per_own if several else own_bytes_per_us) if several or own_bytes_per_us else 0.0
        if not two:
            return quick + own_us
        return np.minimum(quick, base + extra + late * hops + carried / (rate * (1 + long))) + own_us

    def loss(p: Array) -> float:
        # the last term keeps a latency that the samples do not determine at that of the link
        return float((weight * np.abs(np.log(predicted(p) / us))).sum() / weight.sum() + 1e-4 * np.square(p[1]))

    least = float(us.min())
    starts: list[Array] = [
        np.log([0.6 * least, 1.0, 0.4, 0.7 * least, 1.0, 500e3]), np.log([0.5 * least, 0.5, 0.6, 3 * least, 0.6, 2e6]),
        np.log([0.9 * least, 0.2, 0.1, 6 * least, 6.0, 1e6]), np.log([0.9 * least, 0.05, 0.8, least, 0.2, 1e6]),
    ]  # fmt: skip
    best = min((simplex(loss, start) for start in starts), key=loss)
    base, late, rate, extra, long, per_own = (float(v) for v in np.exp(np.clip(best, -_MOST, _MOST)))
    regimes = [Regime(base, late, rate), Regime(base + extra, late, rate * (1 + long))]
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
    corners: list[tuple[float, Array]] = [(loss(p), p) for p in (start, *(start + side for side in sides))]
    for _ in range(rounds):
        corners.sort(key=itemgetter(0))
        (best, middle), (worst, last) = corners[0], corners[-1]
        if worst - best < 1e-9:
            break
        centre: Array = sum((p for _, p in corners[1:-1]), middle) / len(start)
        opposite = 2 * centre - last
        tried = [(loss(opposite), opposite)]
        if tried[0][0] < best:
            far = 3 * centre - 2 * last
            tried.append((loss(far), far))
        elif tried[0][0] >= corners[-2][0]:
            near = 0.5 * (centre + last)
            tried.append((loss(near), near))
        chosen = min(tried, key=itemgetter(0))
        if chosen[0] < worst:
            corners[-1] = chosen
        else:
            closer = [0.5 * (middle + p) for _, p in corners[1:]]
            corners[1:] = [(loss(p), p) for p in closer]
    return min(corners, key=itemgetter(0))[1]
