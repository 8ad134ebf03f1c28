"""Fits a program into a memory budget by rematerializing tensors in the backward and by shrinking buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

from ..cost.memory import PeakMemory, peak_memory
from ..cost.simulation import clock_of, run_all, simulate
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.messages import POINT_TO_POINT
from ..hardware.hardware import Hardware
from ..partition.stage_program import stage_program
from ..tuning import TUNING
from .base import InContext, Pass, run_passes
from .bucket_sizes import sizing_of, smaller_buckets
from .context import Choice, Context, Fitting
from .recompute import Peak, PeakWith, budget_error, choose, fitted
from .remat_frontier import RematChoice
from .saved_values import SavedValues

FITTING: Choice[Fitting] = Choice("memory", "what it rematerializes", Fitting, kept=True)
FITTING_OF_STAGE: Choice[Fitting] = Choice(
    "memory", FITTING.what, Fitting, lambda first, fits: replace(first, way=max(fit.way for fit in fits))
)
"""Ranks rematerialize what the first rank of their stage does; buckets are as small as one rank of all needs them."""


@dataclass(frozen=True)
class FitMemory(InContext):
    """Rematerializes tensors until the program holds at most `budget_bytes`.

    The peak is measured after the passes in `after`. Among the choices that fit, the shortest simulated step wins.
    Where none fits with the sizes of `SizeBuckets`, buckets shrink and fewer are in flight. Bitwise the same.

    Args:
        budget_bytes: bound on the tensors of a rank.
        hardware: prices computing and the links.
        gathers: gathered parameters may be re-gathered instead of kept. Activations that ranks gathered or exchanged
            may be in any case.
        after: the passes that follow this one.
        peak: peak memory of a finished program.
        stage: of the program of all stages, the one whose program to return within the budget.

    Raises:
        PlanError: the budget cannot be met; gives the smallest peak and its live tensors.
    """

    budget_bytes: int
    hardware: Hardware = field(default_factory=Hardware.default)
    gathers: bool = True
    after: tuple[Pass, ...] = ()
    peak: Peak = peak_memory
    stage: int | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("TileRows", "OffloadSaved", "SizeBuckets", "Reinplace")

    def within(self, local: LocalGraph, context: Context) -> LocalGraph:
        """`local` within the budget. A rank whose batch needs more memory than the first rank's rematerializes more."""
        if context.decide is None:
            return self.applied(local, self.choose(local))
        fit = replace(self, after=context.following, peak=context.peak)
        choice, propose = (FITTING, fit.choose) if self.stage is None else (FITTING_OF_STAGE, fit._of_stage)
        fitting = context.decide(choice, lambda: propose(local), local)
        local = fit._saved(local).applied(fitting.names, self.hardware)
        saved = SavedValues(local, gathers=False, stage=self.stage)
        return fit._sized(fitted(saved, self.budget_bytes, self.hardware, fit._peak(saved, fitting.way)), fitting.way)

    def applied(self, local: LocalGraph, fitting: Fitting) -> LocalGraph:
        """`local` with `fitting` applied; its sizes are set if they are smaller than `SizeBuckets` chooses."""
        return self._sized(self._saved(local).applied(fitting.names, self.hardware), fitting.way)

    def run(self, local: LocalGraph, fitting: Fitting) -> LocalGraph:
        """`local` with the choice `fitting` applied, after all passes that follow."""
        return run_passes(self.applied(local, fitting), self.after)

    def choose(self, local: LocalGraph) -> Fitting:
        """The shortest simulated step that fits; PlanError where nothing does. A stage counts as if it waited for no
        other one.
        """
        saved, ways = self._saved(local), smaller_buckets(self.after)
        peaks = [self._peak(saved, number) for number in range(len(ways))]
        if peaks[0](()).size_bytes <= self.budget_bytes:
            return Fitting(0, ())
        path = saved.path(self.hardware)
        attempts: list[tuple[float, int, tuple[str, ...]]] = []

        def attempt(number: int, path: Sequence[RematChoice]) -> None:
            names = choose(path, self.budget_bytes, peaks[number])
            if names is not None:
                ran = run_passes(self._own(saved.applied(names, self.hardware)), ways[number])
                attempts.append((self._us(ran), number, names))

        for number in range(len(ways)):
            attempt(number, path)
            if attempts and not attempts[-1][2]:
                break
        if not attempts:
            least, peak_bytes = self.least(local)
            if peak_bytes <= self.budget_bytes:
                return least
            raise budget_error(saved, path, self.budget_bytes, peaks[-1])
        if min(attempts)[2] and saved.has_gathers:
            attempt(min(attempts)[1], saved.path(self.hardware, TUNING.hidden_gather_share))
        _, number, names = min(attempts)
        return Fitting(number, names)

    def _of_stage(self, local: LocalGraph) -> Fitting:
        """`choose`, or the smallest buckets where nothing fits on this rank, which then says its own peak."""
        try:
            return self.choose(local)
        except PlanError:
            return Fitting(len(smaller_buckets(self.after)) - 1, ())

    def least(self, local: LocalGraph) -> tuple[Fitting, int]:
        """The choice with the smallest peak, and that peak in bytes."""
        saved = self._saved(local)
        names = min(saved.path(self.hardware), key=lambda choice: choice.peak_bytes).names
        ways = range(len(smaller_buckets(self.after)))
        peaks = [self._peak(saved, way)(names).size_bytes for way in ways]
        return Fitting(peaks.index(min(peaks)), names), min(peaks)

    def _saved(self, local: LocalGraph) -> SavedValues:
        return SavedValues(local, gathers=self.gathers, stage=self.stage, activations=True)

    def _own(self, local: LocalGraph) -> LocalGraph:
        """The program of a rank."""
        return local if self.stage is None else stage_program(local, self.stage)

    def _peak(self, saved: SavedValues, way: int) -> PeakWith:
        """The peak with one size of buckets."""
        passes = smaller_buckets(self.after)[way]

        @cache
        def peak(names: tuple[str, ...]) -> PeakMemory:
            return self.peak(run_passes(self._own(saved.applied(names, self.hardware)), passes))

        return peak

    def _sized(self, local: LocalGraph, way: int) -> LocalGraph:
        """The program of a rank with its sizes of buckets, if they are not those that `SizeBuckets` chooses."""
        local, ways = self._own(local), smaller_buckets(self.after)
        if not way:
            return local
        if not 0 < way < len(ways):
            text = f"the compile cache names number {way} of the ways to fit a budget"
            raise PlanError(text, f"one from 0 to {len(ways) - 1}", "delete its entry")
        sizing = sizing_of(ways[way])
        assert sizing is not None, "it has several ways"
        return sizing(replace(local, sizes=None))

    def _us(self, ran: LocalGraph) -> float:
        return simulate(ran, self.hardware).step_us if self.stage is None else _alone_us(ran, self.hardware)


def _alone_us(program: LocalGraph, hardware: Hardware) -> float:
    """Microseconds of a stage that waits for no other one."""
    clock = clock_of(program.graph, program.mesh, hardware)
    run_all(clock, (node for node in program.graph.nodes if node.target not in POINT_TO_POINT))
    return clock.now
