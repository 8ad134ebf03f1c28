"""Fits one plan's program into a budget of memory by making values again, or says how many bytes it takes at least."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.memory import peak_memory
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from ..passes.base import Pass, run_passes
from ..passes.bucket import Carried
from ..passes.bucket_sizes import resized, tighter
from ..passes.fit_memory import FitMemory


@dataclass(frozen=True)
class Fitted:
    """A program that holds `peak_bytes` at most, with the values `again` made again; None where nothing fits."""

    program: LocalGraph | None
    again: tuple[str, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Finish:
    """What is done to a program before it runs: `passes`, or the same with sizes that hold less at once."""

    passes: tuple[Pass, ...]

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """What runs."""
        return run_passes(local, self.passes)

    def part_of(self, whole: Carried) -> Finish:
        """The same for part of a step, all of which carries so much."""
        return Finish(resized(self.passes, whole=whole))

    def fit(self, local: LocalGraph, budget_bytes: int, hardware: Hardware, gathers: bool) -> Fitted:
        """`local` within the budget, in the shortest simulated step. `gathers`: parameters may be gathered again too.

        Where nothing fits, `peak_bytes` is what it takes at least: a budget of that is met.
        """
        fitting = FitMemory(budget_bytes, hardware, gathers, self.passes)
        try:
            found = fitting.choose(local)
        except PlanError:
            least, peak_bytes = fitting.least(local)
            return Fitted(None, least.names, peak_bytes)
        made = run_passes(fitting.applied(local, found), self.passes)
        return Fitted(made, found.names, peak_memory(made).size_bytes)

    def least_bytes(self, local: LocalGraph) -> int:
        """What `local` holds at most, nothing made again, in the order that holds least."""
        return min(peak_memory(run_passes(local, way)).size_bytes for way in tighter(self.passes))
