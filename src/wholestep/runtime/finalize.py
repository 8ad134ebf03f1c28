"""The last stage of a compile: the passes, once all ranks know that they have the same collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..backend.default_passes import default_passes, edited
from ..backend.gloo.exchange import exchanges
from ..backend.rank_binding import bind
from ..cache.key import digest
from ..cache.step_cache import KeptChoices
from ..cost.memory import PeakMemory, peak_memory
from ..distributed.channels import open_channels
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human, human_at_least
from ..hardware.hardware import Hardware
from ..partition.stage_program import channels_of, stage_program
from ..passes.base import Pass, Watch, run_passes
from ..passes.context import Choice, Context
from ..passes.fit_memory import FITTING, FITTING_OF_STAGE, FitMemory
from ..passes.order_collectives import CallOrder
from ..passes.order_stages import BLOCKS, named_orders, with_orders
from ..passes.schedule import Schedule
from ..planner.recompute_kinds import saving_passes
from ..profiling.measure_hardware import measure_hardware
from ..tuning import TUNING
from .compile_options import StepOptions
from .consistency import RankProgram
from .decisions import Decisions
from .progress import Stages

HARDWARE: Choice[Hardware] = Choice("hardware", "how fast the hardware is", Hardware, kept=True)


@dataclass
class Finalizer:
    """Schedules the programs of one step; ranks run collectives in the order of the first rank.

    Its compiles share the measured hardware, the schedule for it, and what ranks decided for programs that they have
    compared. `choices` are those of the compile that runs.
    """

    options: StepOptions
    world: World
    rendezvous: Rendezvous
    stages: Stages
    decisions: Decisions
    hardware: Hardware | None = None
    schedule: Schedule | None = None
    _calls: CallOrder = field(default_factory=CallOrder)
    choices: KeptChoices = field(init=False)

    def finish(
        self, program: RankProgram, may_regather: bool, calls: CallOrder, watch: Watch | None = None
    ) -> RankProgram:
        """The program that this rank runs. `may_regather`: a budget may re-gather what the plan keeps gathered.
        Programs that are finished with the same `calls` have one order.
        """
        key, budget, self._calls = program.compared, self.options.memory_bytes, calls
        if program.local.stage_axis:
            program = self._of_stage(program, key, watch)
        elif budget is None:
            passes = self._passes(program)
            with self.stages.stage("schedule"):
                program = replace(program, local=run_passes(program.local, passes, watch, context=self._context(key)))
        else:
            program = replace(program, local=self._fitted(program, key, budget, may_regather, watch))
        self.choices.store()
        return program

    def _of_stage(self, program: RankProgram, key: str, watch: Watch | None) -> RankProgram:
        """The program of this rank's stage, scheduled where ranks of one stage have something to exchange."""
        full = self._ordered(program.local, key, program.plan.hardware)
        open_channels(self.world, full.stage_axis, channels_of(full))
        plain = self._passes(program)
        if (budget := self.options.memory_bytes) is not None:
            with self.stages.stage("memory"):
                return replace(program, local=self._stage_within(full, plain, key, budget, watch))
        with self.stages.stage("schedule"):
            local = stage_program(full, self.world.coordinate[full.stage_axis])
            local = run_passes(local, plain, watch, context=self._context(key))
            return replace(program, local=local, before=full)

    def _ordered(self, local: LocalGraph, key: str, hardware: Hardware) -> LocalGraph:
        """The program of all stages in the order of blocks of the first rank, whose batch may have another size."""
        orders = self.decisions.decide(BLOCKS, key, lambda: named_orders(local))
        return local if named_orders(local) == orders else with_orders(local.copy(), "", hardware, orders)

    def _stage_within(
        self, local: LocalGraph, plain: tuple[Pass, ...], key: str, budget_bytes: int, watch: Watch | None
    ) -> LocalGraph:
        """The program of a stage within the budget. Ranks of a stage rematerialize what its first one does, and more
        where they have to. Raises PlanError on a rank that is over the budget, which stops all others.
        """
        stage, context = self.world.coordinate[local.stage_axis], self._context(key)
        fit = FitMemory(budget_bytes, self._hardware(), False, stage=stage)

        def fitted() -> LocalGraph:
            within = fit.within(local, replace(context, peak=self._peak, following=plain))
            return run_passes(within, plain, watch, context=context)

        return self._within(FITTING_OF_STAGE, f"stage {stage}", budget_bytes, key, self.rendezvous, fitted)

    def _peak(self, local: LocalGraph) -> PeakMemory:
        return peak_memory(bound_to_rank(local, self.world))

    def _within(
        self, choice: Choice[Any], what: str, budget_bytes: int, key: str, rendezvous: Rendezvous,
        fitted: Callable[[], LocalGraph],
    ) -> LocalGraph:  # fmt: skip
        """The program that `fitted` returns. Raises PlanError on a rank that is over the budget, which stops all others
        unless all know that programs of this kind fit.
        """
        is_known, failure = self.decisions.has(choice, key), ""
        try:
            program = fitted()
            if (size := self._peak(program).size_bytes) > budget_bytes:
                raise _over(what, self.world.rank, size, budget_bytes)
        except PlanError as error:
            failure = error.found.splitlines()[0]
            raise
        finally:
            if not is_known:
                rendezvous.all_equal(f"{self.decisions.label()}/memory/fits", {}, failure)
        return program

    def hardware_and_schedule(self) -> tuple[Hardware, Schedule | None]:
        """The hardware that programs are scheduled on, measured where it is not given, and the schedule."""
        schedule = self._schedule()
        return schedule.hardware if schedule is not None else self._hardware(), schedule

    def _schedule(self) -> Schedule | None:
        """How collectives are merged and ordered; None where they are not. All ranks measure or none."""
        schedule = self.options.user.schedule
        if not isinstance(schedule, str):
            return schedule
        if self.world.mesh.size > 1:
            hardware = self._hardware()
            self.schedule = self.schedule or Schedule(hardware, across_steps=schedule == "across_steps")
        return self.schedule

    def _hardware(self) -> Hardware:
        """The hardware as given, or as measured by all ranks once, or by an earlier start."""
        if self.options.user.hardware is not None:
            return self.options.user.hardware
        if self.hardware is None:
            earlier = self.choices.of(HARDWARE)
            with self.stages.stage("measure"):
                self.hardware = earlier or measure_hardware(self.world, self._stage_axis())
        self.choices.note(HARDWARE, self.hardware)
        return self.hardware

    def _stage_axis(self) -> str:
        """The axis of stages, whose messages are measured too; empty without a pipeline."""
        if self.options.plan is not None:
            return self.options.plan.stage_axis
        pipeline = self.options.strategies.pipeline
        return pipeline.axis if pipeline is not None else ""

    def _passes(self, program: RankProgram, **budget: Any) -> tuple[Pass, ...]:
        """What schedules a program, or a stage of it, with what a search chose; options of a `budget` go beside."""
        mesh, axis = self.world.mesh, program.local.stage_axis
        exchanges_nothing = axis and mesh.size == mesh.axis_size(axis)  # with ranks of its stage
        schedule, chosen = None if exchanges_nothing else self._schedule(), program.plan.objective
        passes = default_passes(schedule=schedule, backend=self.options.backend, **budget)
        return edited(saving_passes(passes, chosen.saving) if chosen else passes, self.options.user.passes)

    def _fitted(
        self, program: RankProgram, key: str, budget_bytes: int, may_regather: bool, watch: Watch | None
    ) -> LocalGraph:
        """Scheduled within the budget of memory. Ranks rematerialize the same; one that does not fit stops all."""
        budget = {"hardware": self.hardware_and_schedule()[0], "memory_bytes": budget_bytes}
        passes = self._passes(program, may_regather=may_regather, **budget)
        search_s = TUNING.fit_seconds * len(program.local.graph.nodes)
        rendezvous = replace(self.rendezvous, timeout_s=self.rendezvous.timeout_s + search_s)
        context = replace(self._context(key, search_s), peak=self._peak)

        def fitted() -> LocalGraph:
            with self.stages.stage("memory"):
                return run_passes(program.local, passes, watch, context=context)

        return self._within(FITTING, "the step", budget_bytes, key, rendezvous, fitted)

    def _context(self, key: str, search_s: float = 0.0) -> Context:
        """What makes passes decide alike on all ranks; the first rank may search for `search_s` seconds."""

        def decide(choice: Choice[Any], propose: Callable[[], Any], about: LocalGraph) -> Any:
            program = digest([str(about)]) if choice.kept and not self.decisions.has(choice, key) else ""
            earlier = self.choices.of(choice, program) if program else None
            proposed = propose if earlier is None else lambda: earlier
            decision = self.decisions.decide(choice, key, proposed, about, search_s)
            if program:
                self.choices.note(choice, decision, program)
            return decision

        return Context(decide, self._calls)


def _over(what: str, rank: int, size_bytes: int, budget_bytes: int) -> PlanError:
    """The error for a rank whose order of collectives, that of the first rank, takes it over the budget."""
    why = f"collectives run in the first rank's order, which takes {human(size_bytes - budget_bytes)} more here"
    problem, needed = f"{what} holds {human(size_bytes)} on rank {rank}", f"at most {human(budget_bytes)}"
    return PlanError(problem, needed, f"give memory_bytes={human_at_least(size_bytes)!r} or more: {why}")


def bound_to_rank(local: LocalGraph, world: World, runs: bool = False) -> LocalGraph:
    """The program with the sizes of this rank; `runs`: as backends get it."""
    graph = bind(local, world.coordinate, world.groups, exchange=exchanges(world.device), runs=runs)
    return replace(local, graph=graph)
