"""Bounds the peak memory of a step by rematerializing saved tensors in the backward (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..cost.memory import PeakMemory, peak_memory
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .reinplace import Reinplace
from .remat_frontier import RematChoice
from .saved_values import SavedValues

Peak = Callable[[LocalGraph], PeakMemory]
PeakWith = Callable[[tuple[str, ...]], PeakMemory]
"""The peak of a program that rematerializes values by name."""


@dataclass(frozen=True)
class Recompute:
    """Rematerializes values in the backward until the peak is at most `budget_bytes`, at the least added time.

    Random numbers are never drawn twice, and no collective but a gather of parameters (with `gathers`) runs twice.
    Bitwise the same. The peak is `peak_memory` of the program with updates in place.

    Args:
        budget_bytes: bound on the peak of a rank.
        hardware: prices ops and collectives.
        gathers: gathered parameters may be re-gathered instead of kept.

    Example:
        >>> fitted = ws.run_passes(local, [ws.Recompute(ws.peak_memory(local).size_bytes, gathers=True)])

    Raises:
        PlanError: the budget cannot be met; gives the smallest peak and its live tensors.
    """

    budget_bytes: int
    hardware: Hardware = field(default_factory=Hardware.default)
    gathers: bool = False

    must_precede: ClassVar[tuple[str, ...]] = ("TileRows", "OffloadSaved", "Reinplace")

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same step within the budget; `local` itself if that fits."""
        saved = SavedValues(local, self.gathers)

        def peak(names: tuple[str, ...]) -> PeakMemory:
            return in_place_peak(saved.applied(names, self.hardware))

        return fitted(saved, self.budget_bytes, self.hardware, peak)


def fitted(saved: SavedValues, budget_bytes: int, hardware: Hardware, peak: PeakWith) -> LocalGraph:
    """`saved.local` with values rematerialized until `peak` is within the budget; PlanError where no choice does."""
    if peak(()).size_bytes <= budget_bytes:
        return saved.local
    path = saved.path(hardware)
    names = choose(path, budget_bytes, peak)
    if names is None:
        raise budget_error(saved, path, budget_bytes, peak)
    return saved.applied(names, hardware)


def in_place_peak(local: LocalGraph) -> PeakMemory:
    """The peak of the functional graph `local` with its updates in place."""
    return peak_memory(Reinplace()(local))


def choose(path: Sequence[RematChoice], budget_bytes: int, peak: PeakWith) -> tuple[str, ...] | None:
    """Names of the values of the cheapest choice on `path` whose `peak` is within the budget; None if there is none.
    The path is the same for all budgets, so that a larger budget never costs more.
    """
    now = peak(()).size_bytes
    if now <= budget_bytes:
        return ()
    path = _worth_trying(path)
    differs = now - path[0].peak_bytes
    index = _cheapest(path, budget_bytes, differs, lambda choice: peak(choice.names).size_bytes)
    if index is not None:
        return path[index].names
    if path[-1].peak_bytes + differs <= budget_bytes:
        names = _lowest(path, peak)
        return names if peak(names).size_bytes <= budget_bytes else None
    return None


def _lowest(path: Sequence[RematChoice], peak: PeakWith) -> tuple[str, ...]:
    """Names of the choice near the end of `path` with the smallest true peak: what is computed again in the node at the
    peak is held there too, so that the last choice may hold more than those before.
    """
    names = path[-1].names
    for choice in reversed(path[-TUNING.remat_tries : -1]):
        if peak(choice.names).size_bytes > peak(names).size_bytes:
            break
        names = choice.names
    return names


def _worth_trying(path: Sequence[RematChoice]) -> list[RematChoice]:
    """`path` without the choices that save less than 0.2 % over the one before."""
    worthwhile = list(path[:1])
    for choice in path[1:]:
        if choice.peak_bytes < worthwhile[-1].peak_bytes * TUNING.remat_worth:
            worthwhile.append(choice)
    return worthwhile if worthwhile[-1] is path[-1] else [*worthwhile, path[-1]]


def _cheapest(
    path: Sequence[RematChoice], budget_bytes: int, differs: int, peak_of: Callable[[RematChoice], int]
) -> int | None:
    """Index of the first choice after `path[0]` whose true peak fits, or of a later one with nearly the same peak.

    True peaks are assumed to fall along the path as the expected ones do. A true peak is expensive, so the search
    computes few, and corrects expected peaks by the difference `differs` found for the last choice.
    """
    low, high = 0, len(path)
    for _ in range(TUNING.remat_tries):
        near = high < len(path) and path[low].peak_bytes - path[high].peak_bytes < budget_bytes * TUNING.remat_near
        if near or low + 1 >= high:
            break
        likely = (i for i in range(low + 1, high) if path[i].peak_bytes + differs <= budget_bytes)
        at = next(likely, high - 1) if high == len(path) else (low + high) // 2
        peak_bytes = peak_of(path[at])
        differs = peak_bytes - path[at].peak_bytes
        low, high = (low, at) if peak_bytes <= budget_bytes else (at, high)
    return high if high < len(path) else None


def budget_error(
    saved: SavedValues, path: Sequence[RematChoice], budget_bytes: int, peak: PeakWith
) -> PlanError:  # fmt: skip
    """The error for a budget that no choice meets."""
    lowest = peak(_lowest(_worth_trying(path), peak))
    live = "\n".join(f"    {line}" for line in str(lowest).splitlines()[:6])
    who, instead = "the step", "a smaller batch, more ranks, or a style that shards these tensors"
    if saved.stage is not None:
        who, instead = f"stage {saved.stage}", 'more stages, or more micro-batches with schedule="1f1b"'
    elif saved.loops:
        instead = f"more micro-batches, {instead}"
    return PlanError(
        f"{who} needs at least {human(lowest.size_bytes)} on a rank, {human(lowest.rest_bytes)} of them stored "
        f"between steps; with all useful rematerialization it holds\n{live}",
        f"at most {human(budget_bytes)}",
        f"give more memory, {instead}",
    )
