"""The last stage of a compile: what ranks do once they know that all have a program, and the same collectives in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ..cache.program import Compiled
from ..cost.machine import Machine
from ..cost.memory import PeakMemory, peak_memory
from ..cost.speeds import Speeds
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..passes.base import Pass, Watch, run_passes
from ..passes.fit_memory import fitted_with
from ..passes.overlap import collectives_of
from ..passes.pipeline import Edit, in_order_of, pipeline
from ..passes.schedule import Schedule
from .agree import agree, from_first_rank
from .fit import FirstRanksFitting, bound, refuse_larger
from .launch import World
from .measure import measure
from .obtain import Offer

_SEARCH_SECONDS = 0.1  # for each node, at most: what the first rank takes to fit a step into a budget


@dataclass
class Finisher:
    """Schedules the programs of one step; ranks have collectives in the order of the first one.

    `budget` is what a rank's tensors may take in bytes, and whether gathering again is a way to keep to it. `edit` is
    what the user makes of the list of passes. `stage` is told of each stage, and what `watch` returns of each pass.
    `measured` is the schedule for `hardware`, or for this machine, where that was measured.
    """

    schedule: Schedule | Literal["auto", "across_steps"] | None
    backend: str
    hardware: Speeds | None
    edit: Edit | None
    budget: tuple[int, bool] | None
    timeout_s: float
    watch: Callable[[], Watch | None]
    stage: Callable[[str], AbstractContextManager[None]]
    waiting: Callable[[list[int]], None]
    measured: Schedule | None = None
    _fits: dict[str, FirstRanksFitting] = field(default_factory=dict[str, FirstRanksFitting])
    _orders: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def finish(self, got: Offer, world: World, label: str) -> Compiled:
        """The program that this rank runs; it is kept in the cache, and handed to other ranks."""
        key = "\n".join(got.lines)
        try:
            schedule = self._schedule(got.machine, world)
            made = got.made or got.receive()
            if got.is_final and self._order(made.local, world, label, key) != collectives_of(made.local):
                made = got.anew()
            compiled = not got.is_final
            made = self._passed(got, made, world, label, schedule) if compiled else made
            got.settle(made, compiled)
        except Exception as error:
            got.fail(error)
            raise
        return made

    def _schedule(self, known: Machine | None, world: World) -> Schedule | None:
        """How collectives are merged and ordered; None where they are not. All ranks measure or none."""
        if not isinstance(self.schedule, str):
            return self.schedule
        if world.mesh.size > 1 and self.measured is None:
            self.measured = Schedule(
                known or self.hardware or measure(world), across_steps=self.schedule == "across_steps"
            )
        return self.measured

    def finish_of(self, world: World) -> tuple[Speeds, Schedule | None]:
        """How fast the machine is, measured where nobody says, and how programs are scheduled on it."""
        schedule = self._schedule(None, world)
        if schedule is not None:
            return schedule.machine, schedule
        return self.hardware or measure(world), None

    def _passed(self, got: Offer, made: Compiled, world: World, label: str, schedule: Schedule | None) -> Compiled:
        key = "\n".join(got.lines)
        machine = schedule.machine if schedule else self.hardware
        if self.budget is None:
            passes = self._passes(pipeline(schedule=schedule, backend=self.backend), world, label, key)
            with self.stage("schedule"):
                local = run_passes(made.local, passes, self.watch())
        else:
            local = self._fitted(made.local, schedule, machine or measure(world), world, label, key)
        known = self.measured.machine if self.measured else None
        machine = known if isinstance(known, Machine) else None
        return replace(made, local=local, lines=tuple(got.lines), machine=machine)

    def _passes(self, passes: tuple[Pass, ...], world: World, label: str, key: str) -> tuple[Pass, ...]:
        """`passes` as the user edits them; collectives run in the order of the first rank."""
        passes = tuple(self.edit(passes)) if self.edit else passes
        return in_order_of(passes, partial(self._order, world=world, label=label, key=key))

    def _fitted(
        self, local: LocalGraph, schedule: Schedule | None, machine: Speeds, world: World, label: str, key: str
    ) -> LocalGraph:
        """Finished under the budget of memory. Ranks gather the same again, and one that does not fit stops all."""
        assert self.budget is not None, "asked where there is one"
        (budget_bytes, gathers), failure, known = self.budget, "", key in self._fits
        timeout_s = self.timeout_s + _SEARCH_SECONDS * len(local.graph.nodes)
        label_of_fit = f"{label}/memory/{len(self._fits)}"
        tell = partial(from_first_rank, label_of_fit, timeout_s=timeout_s, what="what it rematerializes")
        agree_on = self._fits.setdefault(key, FirstRanksFitting(world, tell))

        def peak(made: LocalGraph) -> PeakMemory:
            return peak_memory(bound(made, world))

        plain = pipeline(
            machine, schedule=schedule, backend=self.backend, memory_bytes=budget_bytes, gathers_again=gathers
        )
        plain = tuple(self.edit(plain)) if self.edit else plain
        passes = fitted_with(plain, peak, agree_on)
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

    def _order(self, local: LocalGraph, world: World, label: str, key: str) -> list[str]:
        """The collectives, by name, in the order of the first rank, for ranks' batches may differ in size."""
        own = collectives_of(local)
        if world.mesh.size == 1 or self.schedule is None:
            return own
        if key not in self._orders:
            self._orders[key] = from_first_rank(f"{label}/order/{len(self._orders)}", own, self.timeout_s)
        return self._orders[key]
