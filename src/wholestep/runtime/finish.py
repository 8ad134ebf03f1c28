"""The last stage of a compile: what ranks do once they know that all have a program, and the same collectives in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ..cost.machine import Machine
from ..cost.speeds import Speeds
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..passes.base import Pass, Watch, run_passes
from ..passes.fill import Fill
from ..passes.flat import Flat
from ..passes.next_step import AcrossSteps
from ..passes.offload import Offload
from ..passes.overlap import with_collectives_in
from ..passes.reinplace import Reinplace
from ..passes.schedule import Schedule
from .agree import agree, from_first_rank, order_lines
from .cached import Choosing
from .compiled import Compiled
from .fit import Fit
from .launch import World
from .measure import measure

_SEARCH_SECONDS = 0.1  # for each node, at most: what the first rank takes to fit a step into a budget
_Finished = tuple[LocalGraph, AcrossSteps | None]


@dataclass
class Finisher:
    """Schedules the programs of one step; ranks have collectives in the order of the first one.

    `budget` is what a rank's tensors may take in bytes, and whether gathering again is a way to keep to it. `stage` is
    told of each stage, and what `watch` returns of each pass. `direct`: no copies into buckets where none are needed.
    `machine` is what was measured, `measured` the schedule for it. `choosing` knows what an earlier start chose.
    """

    schedule: Schedule | Literal["auto", "across_steps"] | None
    direct: bool
    budget: tuple[int, bool] | None
    timeout_s: float
    watch: Callable[[], Watch | None]
    stage: Callable[[str], AbstractContextManager[None]]
    waiting: Callable[[list[int]], None]
    measured: Schedule | None = None
    machine: Machine | None = None
    choosing: Choosing = field(default_factory=Choosing)
    _fits: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _orders: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def finish(self, made: Compiled, world: World, label: str) -> Compiled:
        """The program that this rank runs. What was chosen on the way is kept in the compile cache."""
        made = self._passed(made, world, label, self._schedule(world))
        self.choosing.keep()
        return made

    def _schedule(self, world: World) -> Schedule | None:
        """How collectives are merged and ordered; None where they are not. All ranks measure or none."""
        if not isinstance(self.schedule, str):
            return self.schedule
        if world.mesh.size > 1:
            machine = self._measure(world)
            self.measured = self.measured or Schedule(machine, across_steps=self.schedule == "across_steps")
        return self.measured

    def _measure(self, world: World) -> Machine:
        """How fast the machine is, as an earlier start measured it, or as all ranks measure it now: once."""
        if self.machine is None:
            self.choosing.look_up()
            with self.stage("measure"):
                self.machine = self.choosing.earlier.machine or measure(world)
        self.choosing.note(machine=self.machine)
        return self.machine

    def finish_of(self, world: World) -> tuple[Speeds, Schedule | None]:
        """How fast the machine is, measured where nobody says, and how programs are scheduled on it."""
        schedule = self._schedule(world)
        if schedule is not None:
            return schedule.machine, schedule
        return self._measure(world), None

    def _passed(self, made: Compiled, world: World, label: str, schedule: Schedule | None) -> Compiled:
        last: list[Pass] = [Offload(), Fill(), Reinplace(), Flat()] if self.direct else [Offload(), Reinplace()]
        key = "\n".join(made.lines)

        def finished(local: LocalGraph, schedule: Schedule | None) -> _Finished:
            with self.stage("schedule"):
                local, across = self._scheduled(local, world, schedule, label, key)
                end = partial(run_passes, passes=last, watch=self.watch())
                across = across.mapped(end) if across else None
                return across.steady if across else end(local), across

        if self.budget is None:
            local, across = finished(made.local, schedule)
        else:
            machine = schedule.machine if schedule else self._measure(world)
            fit = Fit(*self.budget, world, machine, schedule, last)
            local, across = self._fitted(made.local, fit, finished, label, key)
        return replace(made, local=local, across=across)

    def _fitted(
        self, local: LocalGraph, fit: Fit, finished: Callable[[LocalGraph, Schedule | None], _Finished], label: str,
        key: str,
    ) -> _Finished:  # fmt: skip
        """Finished under the budget of memory. Ranks gather the same again, and one that does not fit stops all."""
        known, failure = key in self._fits, ""
        timeout_s = self.timeout_s + _SEARCH_SECONDS * len(local.graph.nodes)
        label = f"{label}/memory/{len(self._fits)}"

        def agreed(choose: Callable[[], list[str]]) -> list[str]:
            if not known:
                self.choosing.look_up()
                own = (self.choosing.again_for(local) or choose()) if fit.world.rank == 0 else []
                self._fits[key] = from_first_rank(label, own, timeout_s, "what is made again in the backward")
                self.choosing.note_again(local, self._fits[key])
            return self._fits[key]

        try:
            with self.stage("memory"):
                local, schedule = fit(local, agreed)
            made = finished(local, schedule)
            fit.check(made[0])
        except PlanError as error:
            failure = error.found.splitlines()[0]
            raise
        finally:
            if not known:
                agree(f"{label}/fits", {}, failure, timeout_s, self.waiting)
        return made

    def _scheduled(self, local: LocalGraph, world: World, schedule: Schedule | None, label: str, key: str) -> _Finished:
        """Collectives merged and ordered."""
        if schedule is None:
            return local, None
        across = schedule.across(local, self.watch()) if schedule.across_steps else None
        local = across.steady if across else schedule(local, self.watch())
        if world.mesh.size == 1:
            return local, across
        order = self._order(local, world, label, key)
        local = with_collectives_in(local, [line.split(" ", 1)[0] for line in order])
        return local, across.with_steady(local) if across else None

    def _order(self, local: LocalGraph, world: World, label: str, key: str) -> list[str]:
        """The collectives in the order of the first rank, for ranks' batches may differ in size."""
        own = order_lines(local)
        if world.mesh.size == 1 or self.schedule is None:
            return own
        if key not in self._orders:
            self._orders[key] = from_first_rank(f"{label}/order/{len(self._orders)}", own, self.timeout_s)
        return self._orders[key]
