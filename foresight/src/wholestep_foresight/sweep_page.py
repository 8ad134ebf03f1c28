"""A sweep as one HTML page: throughput and utilization as SVG, and the table of the best setups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from wholestep.graph.text import human, seconds
from wholestep.report.figures import Figures
from wholestep.report.page import rendered

from .gpu_search import Setup

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 260, 70, 30


@dataclass(frozen=True)
class SweepPoint:
    """The best setup for one value, or `why` there is none."""

    value: int
    setup: Setup | None = None
    figures: Figures | None = None
    why: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        setup, figures = self.setup, self.figures
        assert setup is not None, "only points with a setup have cells"
        assert figures is not None, "only points with a setup have cells"
        costs = figures.costs
        return (
            f"{self.value:,}", str(setup.mesh), setup.name, f"{setup.micro_batches} x {setup.batch}", setup.recompute,
            seconds(costs.step_s), f"{figures.tokens_per_s or 0:,.0f}", f"{figures.tokens_per_s_per_gpu or 0:,.0f}",
            f"{costs.mfu:.1%}", f"{costs.exposed_s / costs.step_s:.0%}", human(costs.peak_bytes),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The value with the figures of its setup."""
        setup = None if self.setup is None else str(self.setup)
        return {
            "value": self.value,
            "setup": setup,
            "why": self.why or None,
            "figures": self.figures and self.figures.as_json(),
        }


@dataclass(frozen=True)
class SweepPlot:
    """One curve over the values of a sweep: an SVG path, its points with their texts, and the largest number."""

    title: str
    path: str
    dots: tuple[tuple[float, float, str, str], ...]
    top: str


def plot(points: Sequence[SweepPoint], title: str, numbers: Sequence[float], texts: Sequence[str]) -> SweepPlot:
    """Values to the right, by their logarithm; numbers upwards from 0."""
    values = [log2(point.value) for point in points]
    low, wide = min(values), max(max(values) - min(values), 1e-9)
    top = max(numbers) * 1.05 or 1.0
    places = [
        (_LEFT + (value - low) / wide * (_WIDTH - _LEFT - 30), (_HEIGHT - _BOTTOM) * (1 - number / top) + 5)
        for value, number in zip(values, numbers, strict=True)
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = tuple(
        (round(x, 1), round(y, 1), f"{point.value:,}", text)
        for (x, y), point, text in zip(places, points, texts, strict=True)
    )
    return SweepPlot(title, path, dots, texts[list(numbers).index(max(numbers))])


def write_sweep(path: Path, title: str, over: str, points: Sequence[SweepPoint]) -> None:
    """Write the page; it loads nothing from the network.

    Example:
        >>> write_sweep(Path("sweep.html"), "llama-3-8b on dgx-h100", "gpus", points)
    """
    solved = [point for point in points if point.figures is not None]
    figures = [point.figures for point in solved if point.figures is not None]
    rates = [figure.tokens_per_s or 0.0 for figure in figures]
    each = [figure.tokens_per_s_per_gpu or 0.0 for figure in figures]
    shares = [figure.costs.mfu for figure in figures]
    plots = [
        plot(solved, "tokens/s", rates, [f"{rate:,.0f}" for rate in rates]),
        plot(solved, "tokens/s a GPU", each, [f"{rate:,.0f}" for rate in each]),
        plot(solved, "MFU", shares, [f"{share:.1%}" for share in shares]),
    ] if solved else []  # fmt: skip
    shown = {
        "title": title, "over": over, "points": points, "plots": plots, "width": _WIDTH, "height": _HEIGHT,
        "left": _LEFT, "bottom": _HEIGHT - _BOTTOM + 5,
    }  # fmt: skip
    path.write_text(rendered(Path(__file__).parent / "templates" / "sweep.html", shown), encoding="utf-8")
