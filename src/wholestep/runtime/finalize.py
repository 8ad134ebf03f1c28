"""The last stage of a compile: what ranks do once they know that all have a program, and the same collectives in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ..backend.pipeline import Edit, edited, in_order_of, pipeline
from ..backend.protocol import Backend
from ..cache.step_cache import CachedChoices
from ..cost.memory import PeakMemory, peak_memory
from ..distributed.agree import agree, from_first_rank
from ..distributed.launch import World
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from ..passes.base import Watch, run_passes
from ..passes.fit_memory import Fitting, fitted_with
from ..passes.overlap import collectives_of
from ..passes.schedule import Schedule
from ..profiling.measure_compute import measure_hardware
from .memory_budget import FirstRankFitting, bound_to_rank, refuse_larger
from .rank_program import RankProgram

_SEARCH_SECONDS = 0.1  # for each node, at most: what the first rank takes to fit a step into a budget


@dataclass
class Finalizer:
    """Schedules the programs of one step; ranks have collectives in the order of the first one.

    `edit` is what the user makes of the list of passes. `budget` is what a rank's tensors may take in bytes, and
    whether gathering again is a way to keep to it. `stage` is told of each stage, and what `watch` returns of each
    pass. `machine` is what was measured, `measured` the schedule for `hardware`, or for what was measured. `choosing`
    knows what an earlier start chose.
    """

    schedule: Schedule | Literal["auto", "across_steps"] | None
    backend: Backend
    hardware: Hardware | None
    edit: Edit | None
    budget: tuple[int, bool] | None
    timeout_s: float
    watch: Callable[[], Watch | None]
    stage: Callable[[str], AbstractContextManager[None]]
    waiting: Callable[[list[int]], None]
    measured: Schedule | None = None
    machine: Hardware | None = None
    choosing: CachedChoices = field(default_factory=CachedChoices)
    _fits: dict[str, FirstRankFitting] = field(default_factory=dict[str, FirstRankFitting])
    _orders: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def finish(self, made: RankProgram, world: World, label: str) -> RankProgram:
        """The program that this rank runs. What was chosen on the way is kept in the compile cache."""
        made = self._passed(made, world, label, self._schedule(world))
        self.choosing.keep()
        return made

    def _schedule(self, world: World) -> Schedule | None:
        """How collectives are merged and ordered; None where they are not. All ranks measure or none."""
        if not isinstance(self.schedule, str):
            return self.schedule
        if world.mesh.size > 1:
            machine = self.hardware or self._measure(world)
            self.measured = self.measured or Schedule(machine, across_steps=self.schedule == "across_steps")
        return self.measured

    def _measure(self, world: World) -> Hardware:
        """How fast the machine is, as an earlier start measured it, or as all ranks measure it now: once."""
        if self.machine is None:
            self.choosing.look_up()
            with self.stage("measure"):
                self.machine = self.choosing.earlier.hardware or measure_hardware(world)
        self.choosing.note(hardware=self.machine)
        return self.machine

    def finish_of(self, world: World) -> tuple[Hardware, Schedule | None]:
        """How fast the machine is, measured where nobody says, and how programs are scheduled on it."""
        schedule = self._schedule(world)
        if schedule is not None:
            return schedule.hardware, schedule
        return self.hardware or self._measure(world), None

    def _passed(self, made: RankProgram, world: World, label: str, schedule: Schedule | None) -> RankProgram:
        key = "\n".join(made.lines)
        if self.budget is None:
            passes = edited(pipeline(schedule=schedule, backend=self.backend), self.edit)
            passes = in_order_of(passes, partial(self._order, world=world, label=label, key=key))
            with self.stage("schedule"):
                local = run_passes(made.local, passes, self.watch())
        else:
            machine = schedule.hardware if schedule else self.hardware or self._measure(world)
            local = self._fitted(made.local, schedule, machine, world, label, key)
        return replace(made, local=local)

    def _fitted(
        self, local: LocalGraph, schedule: Schedule | None, machine: Hardware, world: World, label: str, key: str
    ) -> LocalGraph:
        """Finished under the budget of memory. Ranks gather the same again, and one that does not fit stops all."""
        assert self.budget is not None, "asked where there is one"
        (budget_bytes, gathers), failure, known = self.budget, "", key in self._fits
        timeout_s = self.timeout_s + _SEARCH_SECONDS * len(local.graph.nodes)
        label_of_fit = f"{label}/memory/{len(self._fits)}"
        tell = partial(from_first_rank, label_of_fit, timeout_s=timeout_s, what="what it rematerializes")
        first = self._fits.setdefault(key, FirstRankFitting(world, tell))

        def peak(made: LocalGraph) -> PeakMemory:
            return peak_memory(bound_to_rank(made, world))

        plain = pipeline(
            machine, schedule=schedule, backend=self.backend, memory_bytes=budget_bytes, gathers_again=gathers
        )
        passes = fitted_with(edited(plain, self.edit), peak, partial(self._agreed, first))  # it tries orders of its own
        passes = in_order_of(passes, partial(self._order, world=world, label=label, key=key))
        try:
            with self.stage("memory"):
                made = run_passes(local, passes, self.watch())
            refuse_larger(made, budget_bytes, world)
        except PlanError as error:
            failure = error.found.splitlines()[0]
            raise
        finally:
            if not known:
                agree(f"{label_of_fit}/fits", {}, failure, timeout_s, self.waiting)
        return made

    def _agreed(self, first: FirstRankFitting, choose: Callable[[], Fitting], local: LocalGraph) -> Fitting:
        """How the first rank fits `local`, as an earlier start chose it or as it chooses now."""
        if first.known is not None:
            return first.known
        self.choosing.look_up()
        said = self.choosing.again_for(local)
        found = first(lambda: Fitting(int(said[0]), tuple(said[1:])) if said else choose())
        self.choosing.note_again(local, [str(found.way), *found.names])
        return found

    def _order(self, local: LocalGraph, world: World, label: str, key: str) -> list[str]:
        """The collectives, by name, in the order of the first rank, for ranks' batches may differ in size."""
        own = collectives_of(local)
        if world.mesh.size == 1 or self.schedule is None:
            return own
        if key not in self._orders:
            self._orders[key] = from_first_rank(f"{label}/order/{len(self._orders)}", own, self.timeout_s)
        return self._orders[key]
