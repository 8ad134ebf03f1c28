"""Fits one plan's program into a budget of memory by making values again, or says how many bytes it takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost.memory import peak_memory
from ..cost.schedule import simulate
from ..cost.speeds import Speeds
from ..graph.graph import LocalGraph
from ..passes.again import made_again
from ..passes.base import Pass, run_passes
from ..passes.bucket import Carried
from ..passes.choose import Choice, choices
from ..passes.fill import Fill
from ..passes.flat import Flat
from ..passes.offload import Offload
from ..passes.recompute import choose, held_by
from ..passes.reinplace import Reinplace
from ..passes.saved import Saved
from ..passes.schedule import Schedule, schedules


@dataclass(frozen=True)
class Fitted:
    """A program that holds `peak_bytes` at most, with the values `again` made again; None where nothing fits."""

    program: LocalGraph | None
    again: tuple[str, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Finish:
    """What is done to a program before it runs: `schedule`, or one of those that hold less at once, then `after`."""

    schedule: Schedule | None
    after: Sequence[Pass] = (Offload(), Fill(), Reinplace(), Flat())

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """What runs."""
        return run_passes(local, self._ways()[0])

    def part_of(self, whole: Carried) -> Finish:
        """The same for part of a step, all of which carries so much."""
        return replace(self, schedule=replace(self.schedule, whole=whole)) if self.schedule else self

    def fit(self, local: LocalGraph, budget_bytes: int, machine: Speeds, gathers: bool) -> Fitted:
        """`local` within the budget, in the shortest simulated step. `gathers`: parameters may be gathered again too.

        Where nothing fits, `peak_bytes` is what it takes at least: a budget of that is met.
        """
        saved = Saved(local, gathers=gathers)
        path = choices(saved, held_by(local), machine)
        found = [_fit(saved, path, budget_bytes, way) for way in self._ways()]
        fitting = [(simulate(f.program, machine).step_us, i) for i, f in enumerate(found) if f.program is not None]
        return found[min(fitting)[1]] if fitting else min(found, key=lambda one: one.peak_bytes)

    def least_bytes(self, local: LocalGraph) -> int:
        """What `local` holds at most, nothing made again, in the order that holds least."""
        return min(peak_memory(run_passes(local, way)).size_bytes for way in self._ways())

    def _ways(self) -> list[list[Pass]]:
        return [[*([one] if one else []), *self.after] for one in schedules(self.schedule)]


def _fit(saved: Saved, path: Sequence[Choice], budget_bytes: int, way: Sequence[Pass]) -> Fitted:
    names = choose(saved, path, budget_bytes, lambda changed: peak_memory(run_passes(changed, way)))
    if names is None:
        names = min(path, key=lambda choice: choice.peak_bytes).names
    found = run_passes(made_again(saved, names), way)
    peak = peak_memory(found).size_bytes
    return Fitted(found if peak <= budget_bytes else None, names, peak)
