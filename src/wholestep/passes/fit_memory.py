"""Fits a program into a memory budget by rematerializing tensors in the backward and by shrinking buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..cost.memory import PeakMemory, peak_memory
from ..cost.simulation import simulate
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.text import human
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .base import Pass, run_passes
from .bucket_sizes import SizeBuckets, smaller_buckets
from .recompute import Peak, budget_error, choose, fitted, held_by
from .remat_frontier import RematChoice, choices
from .rematerialize import rematerialized
from .saved_tensors import SavedTensors


@dataclass(frozen=True)
class Fitting:
    """A choice that meets a budget: tensors to recompute or re-gather, after them number `way` of `smaller_buckets`."""

    way: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FitMemory:
    """Rematerializes tensors until the program holds at most `budget_bytes`.

    The peak is measured after the passes in `after`. Among the choices that fit, the shortest simulated step wins.
    Where none fits with the sizes of `SizeBuckets`, buckets shrink and fewer are in flight. Bitwise the same.

    Args:
        budget_bytes: bound on the tensors of a rank.
        hardware: prices computing and the links.
        gathers: gathered parameters may be re-gathered instead of kept.
        after: the passes that follow this one.
        peak: peak memory of a finished program.
        agree: broadcasts the first rank's result of the given function, for the given program, to all ranks.

    Raises:
        PlanError: the budget cannot be met; gives the smallest peak and its live tensors.
    """

    budget_bytes: int
    hardware: Hardware = field(default_factory=Hardware.default)
    gathers: bool = True
    after: tuple[Pass, ...] = ()
    peak: Peak = peak_memory
    agree: Callable[[Callable[[], Fitting], LocalGraph], Fitting] | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("SizeBuckets", "Reinplace")

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """`local` within the budget. A rank whose batch needs more memory than the first rank's rematerializes more."""
        if self.agree is None:
            return self.applied(local, self.choose(local))
        found = self.agree(lambda: self.choose(local), local)
        local, peak = self.applied(local, found), self._peak_after(smaller_buckets(self.after)[found.way])
        if peak(local).size_bytes <= self.budget_bytes:
            return local
        if any(map(loop_of, local.graph.nodes)):
            raise self._loops_over(peak(local))
        return fitted(SavedTensors(local, gathers=False), self.budget_bytes, self.hardware, peak)

    def applied(self, local: LocalGraph, found: Fitting) -> LocalGraph:
        """`local` with the choice `found` applied; its sizes are set if they are smaller than `SizeBuckets` chooses."""
        local = rematerialized(SavedTensors(local, gathers=self.gathers), found.names) if found.names else local
        if not found.way:
            return local
        ways = smaller_buckets(self.after)
        if not 0 < found.way < len(ways):
            text = f"the compile cache names number {found.way} of the ways to fit a budget"
            raise PlanError(text, f"one from 0 to {len(ways) - 1}", "delete its entry")
        sizes = next(one for one in ways[found.way] if isinstance(one, SizeBuckets))
        return sizes(replace(local, sizes=None))

    def run(self, local: LocalGraph, found: Fitting) -> LocalGraph:
        """`local` with what was found, after all passes that follow."""
        return run_passes(self.applied(local, found), self.after)

    def choose(self, local: LocalGraph) -> Fitting:
        """The shortest simulated step that fits; PlanError where nothing does. Loops rematerialize nothing."""
        if any(map(loop_of, local.graph.nodes)):
            return self._choose_buckets(local)
        saved, ways, held = SavedTensors(local, gathers=self.gathers), smaller_buckets(self.after), held_by(local)
        path = choices(saved, held, self.hardware)
        found: list[tuple[float, int, tuple[str, ...]]] = []

        def attempt(number: int, path: Sequence[RematChoice]) -> None:
            names = choose(saved, path, self.budget_bytes, self._peak_after(ways[number]))
            if names is not None:
                ran = run_passes(rematerialized(saved, names), ways[number])
                found.append((simulate(ran, self.hardware).step_us, number, names))

        for number in range(len(ways)):
            attempt(number, path)
            if found and not found[-1][2]:
                break
        if not found:
            least, peak_bytes = self.least(local)
            if peak_bytes <= self.budget_bytes:
                return least
            raise budget_error(saved, path, self.budget_bytes, self._peak_after(ways[-1]))
        if self.gathers and local.mesh.size > 1 and min(found)[2]:
            attempt(min(found)[1], choices(saved, held, self.hardware, TUNING.hidden_gather_share))
        _, number, names = min(found)
        return Fitting(number, names)

    def _choose_buckets(self, local: LocalGraph) -> Fitting:
        """The largest buckets that fit."""
        peaks = self._peaks(local)
        fits = [number for number, peak in enumerate(peaks) if peak.size_bytes <= self.budget_bytes]
        if not fits:
            raise self._loops_over(min(peaks, key=lambda peak: peak.size_bytes))
        return Fitting(fits[0], ())

    def _loops_over(self, peak: PeakMemory) -> PlanError:
        next_step = "give MicroBatches more pieces, or torch.utils.checkpoint in the model"
        return PlanError(f"{peak} with micro-batches", f"at most {human(self.budget_bytes)}", next_step)

    def least(self, local: LocalGraph) -> tuple[Fitting, int]:
        """The choice with the smallest peak, and that peak in bytes."""
        names, changed = tuple[str, ...](), local
        if not any(map(loop_of, local.graph.nodes)):
            saved = SavedTensors(local, gathers=self.gathers)
            path = choices(saved, held_by(local), self.hardware)
            names = min(path, key=lambda choice: choice.peak_bytes).names
            changed = rematerialized(saved, names)
        peaks = [peak.size_bytes for peak in self._peaks(changed)]
        return Fitting(peaks.index(min(peaks)), names), min(peaks)

    def _peaks(self, local: LocalGraph) -> list[PeakMemory]:
        """The peak with each size of buckets."""
        return [self._peak_after(way)(local) for way in smaller_buckets(self.after)]

    def _peak_after(self, passes: tuple[Pass, ...]) -> Peak:
        return lambda local: self.peak(run_passes(local, passes))


def fitted_with(
    passes: Sequence[Pass], peak: Peak, agree: Callable[[Callable[[], Fitting], LocalGraph], Fitting]
) -> tuple[Pass, ...]:
    """`passes` whose `FitMemory` measure `peak` after the passes that follow them, and share choices by `agree`."""
    found = list(passes)
    for at, one in enumerate(passes):
        if isinstance(one, FitMemory):
            found[at] = replace(one, after=tuple(passes[at + 1 :]), peak=peak, agree=agree)
    return tuple(found)
