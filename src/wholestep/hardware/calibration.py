"""Fits a `Hardware` to the measured times of a job, and reports the error of the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from .curve_fit import TimeSample, fit_curve
from .curves import curve_us
from .device import Ceiling, Device
from .hardware import Hardware, Level

_PAIRWISE = ("all_to_all",)


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
        memory_bytes: of the device; `host_memory_bytes` of the host, both for each rank.
        launch_us: of an op on a few elements.
        moved: bytes read plus written by an elementwise op, and microseconds; the largest last.
        host_copy: bytes and microseconds of a copy from the device to host memory.
        products: matrix products by shape and dtype.
        levels: name and ranks of a unit, inner to outer; 0 ranks in the last.
        sent: collectives by kind, level and size.
        library: of collectives, as `nccl` or `gloo`.
    """

    device: str
    memory_bytes: int
    host_memory_bytes: int
    launch_us: float
    moved: tuple[tuple[int, float], ...]
    host_copy: tuple[int, float]
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
        here = [one for one in measured.sent if one.level == number]
        levels.append(_level(level, ranks, here, levels, measured.library))
        crossed = levels[: number + 1]
        for curve in levels[-1].curves:
            samples = [one.sample for one in here if one.kind == curve.kind]
            rates, late = [one.bytes_per_us for one in crossed], [one.latency_us for one in crossed]
            wrong = [abs(curve_us(curve, s.size_bytes, s.units, rates, late) / s.us - 1) for s in samples]
            errors.append(FitError(f"{level} {curve.kind}", len(wrong), median(wrong), max(wrong)))
    return Hardware(name, device, tuple(levels) or alone, ("wholestep calibrate",)), errors


def _device(measured: Measurements) -> Device:
    size, us = measured.moved[-1]
    best: dict[str, float] = {}
    for one in measured.products:
        rate = 2.0 * one.b * one.m * one.n * one.k / max(one.us - measured.launch_us, 1e-3)
        best[one.dtype] = max(best.get(one.dtype, 0.0), rate)
    sent, copied = measured.host_copy
    rate = size / max(us - measured.launch_us, 1e-3)
    made = Device(
        measured.device, measured.memory_bytes, rate, tuple(Ceiling(dtype, top) for dtype, top in best.items()),
        measured.host_memory_bytes, sent / max(copied, 1e-3), memory_rate=1.0, launch_us=measured.launch_us,
        host_us=measured.launch_us,
    )  # fmt: skip
    ceilings = tuple(replace(top, rate=_typical(made, measured, top)) for top in made.ceilings)
    return replace(made, ceilings=ceilings)


def _typical(device: Device, measured: Measurements, top: Ceiling) -> float:
    """The share of the best rate with the least absolute log error: the median share."""
    shares = [
        2.0 * p.b * p.m * p.n * p.k / max(p.us - device.launch_us, 1e-3) / top.flops_per_us
        for p in measured.products
        if p.dtype == top.dtype
    ]
    return median(shares)


def _product_error(device: Device, measured: Measurements, dtype: str) -> FitError:
    found = [p for p in measured.products if p.dtype == dtype]
    wrong = [abs((device.launch_us + device.matmul_us(p.b, p.m, p.n, p.k, dtype)) / p.us - 1) for p in found]
    return FitError(f"products in {dtype}", len(found), median(wrong), max(wrong))


def _level(name: str, ranks: int, sent: Sequence[TimedCollective], inner: Sequence[Level], library: str) -> Level:
    """The rate of the link is that of the largest all-gather; the curves contain the time to start."""
    gathers = sorted((one.sample for one in sent if one.kind == "all_gather"), key=lambda s: s.size_bytes)
    largest, least = gathers[-1], min(s.us for s in gathers)
    ranks_below = largest.units[0] / largest.units[len(inner)]
    share = (largest.units[0] - 1) / largest.units[0] / ranks_below
    rate = largest.size_bytes * share / max(largest.us - least, 0.05 * largest.us)
    latency = least / (2 * max(largest.units[0] - 1, 1))
    rates, late = [*(one.bytes_per_us for one in inner), rate], [*(one.latency_us for one in inner), latency]
    curves = [
        fit_curve(kind, _algorithm(kind, library), [one.sample for one in sent if one.kind == kind], rates, late)
        for kind in dict.fromkeys(one.kind for one in sent)
    ]
    return Level(name, ranks, rate, latency, tuple(curves))


def _algorithm(kind: str, library: str) -> str:
    return "pairwise" if kind in _PAIRWISE else "gloo" if library == "gloo" else "ring"
