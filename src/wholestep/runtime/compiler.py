"""From the inputs of a call to the program of this rank: capture, choose, plan, partition, compare, schedule."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..backend.build import CAPABILITIES
from ..backend.eager import Eager
from ..cache.key import digest, hardware, metas_of, versions
from ..cache.step_cache import KeptChoices, StepCache
from ..capture.capture import Capture, at_other_sizes, capture_step, with_arrays
from ..capture.effects import BATCH_COUNTS, Promoted, SizesFixedError
from ..capture.scheduled_numbers import note_changed
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import CaptureError, PlanError, RankFailedError, RankMismatchError, WholestepError
from ..graph.counted_rows import refuse_assumed
from ..graph.graph import LocalGraph, TrainGraph
from ..graph.sizes_in_graph import planned_at
from ..hardware.hardware import Hardware
from ..partition.stage_blocks import NamedOrder
from ..passes.context import Choice
from ..passes.order_collectives import CallOrder
from ..passes.order_stages import lowered, named_orders
from ..plan.check_plan import refuse_other_parameters
from ..plan.expert_parallel import with_expert_rows
from ..plan.make_plan import differences
from ..plan.padding_proof import PaddingError
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from ..planner.resolve import plan
from .choose_strategy import AutoChoice, choose_strategy, same_numbers, strategies_in, text_of, with_hardware
from .compile_options import StepOptions
from .consistency import ConsistencyCheck, RankProgram, constant_lines, graph_lines, program_lines
from .decisions import Decisions
from .finalize import Finalizer
from .pad_batches import exact
from .placement import placed
from .progress import Stages
from .size_check import Dims
from .step_inputs import StepInputs
from .symbolic_sizes import (
    ASYNC,
    PlannedFor,
    SymbolicSizes,
    captured_for,
    other_sizes,
    refuse_other_graph,
    sizes_at,
    with_row_major,
)


@dataclass
class Dump:
    """Writes what each stage of a compile returns to the folder that WHOLESTEP_DUMP names; without one, nothing.
    `rank0/train_step-1-2-plan.txt` is the plan of the first capture of `train_step`.
    """

    name: str
    rank: int
    capture: int
    folder: str | None = field(default_factory=lambda: os.environ.get("WHOLESTEP_DUMP"))
    passes: int = 0

    def write(self, stage: str, value: object) -> None:
        """Write what a stage returned, as text."""
        if self.folder:
            path = Path(self.folder) / f"rank{self.rank}" / f"{self.name}-{self.capture}-{stage}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def after_pass(self, name: str, local: LocalGraph) -> None:
        """Write the program that a pass returned."""
        self.passes += 1
        self.write(f"3-pass-{self.passes:02}-{name}", local)


PLAN: Choice[str] = Choice("plan", "which stages and layouts it chose", str, kept=True)
Numbers = Sequence[tuple[Optimizer, int, str, Any]]
"""Options of optimizers that a program holds as constants: optimizer, group, key, value."""


@dataclass
class Compiler:
    """Compiles the calls of one step on one rank. All ranks compile the same calls in the same order.

    The fields after `cache` are what one compile finds out for the next: the strategies with layouts solved on measured
    hardware, the choice of `Auto` and the hardware that it was made on, places of Python numbers that are carried from
    call to call, or changed between calls; and the branches that the next program has to take.
    """

    fn: Callable[..., Any]
    name: str
    number: int
    options: StepOptions
    world: World
    rendezvous: Rendezvous
    stages: Stages
    cache: StepCache | None
    log: Callable[[str], None]
    captures: int = 0
    _strategies: Strategies | None = None
    _choice: AutoChoice | None = None
    _chosen_on: Hardware | None = None
    _carried: Promoted = field(default_factory=Promoted)
    _changing: Promoted = field(default_factory=Promoted)
    _orders: list[NamedOrder] = field(default_factory=list[NamedOrder])
    branches: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        label = self.rendezvous.next_label("steps") if self.rendezvous.size > 1 else self.name
        shared = self.options, self.world, self.rendezvous, self.stages
        self.sizes = SymbolicSizes(self.options, self.world, self.log)
        which = f"number of ws.compile({self.name}): {self.number}"
        self.consistency = ConsistencyCheck(*shared, label, which)
        self.decisions = Decisions(self.world, self.rendezvous, lambda: self.consistency.round_label)
        self.finalizer = Finalizer(*shared, self.decisions)

    @property
    def strategies(self) -> Strategies:
        """Where tensors rest: as given, or as chosen at the first compile."""
        return self._strategies or self.options.strategies

    def note_changing(self, place: str) -> None:
        """A number of Python at this place changes between calls: later programs take it as an input."""
        self._changing |= Promoted(frozenset([place]))

    @property
    def may_count(self) -> bool:
        """Whether programs can count rows of the batch, for which each number of them is a program otherwise."""
        data, built_in = self.strategies.data, isinstance(self.options.backend, Eager)
        alone = self.world.mesh.size == 1 and self.strategies.pieces == 1
        own_rows = data is not None and data.semantics == "per_rank" and len(self.strategies.parts) == 1
        return built_in and self.options.auto is None and not self.options.user.paddings and (alone or own_rows)

    def compile(self, inputs: StepInputs, numbers: Numbers | None, earlier: Sequence[Capture]) -> RankProgram:
        """The program for a call. `numbers` are those of the program that ran last; None before the first one.
        `earlier` was captured for calls that differ in sizes of the batch alone, the latest first.
        """
        several = self.world.mesh.size > 1
        dump = Dump(self.name, self.world.rank, self.captures + 1)
        dims: Dims = {}
        try:
            dims = self.sizes.chosen(inputs)
            program, planned = self._with_symbols(dims, inputs, numbers, earlier, dump)
            if program is None:
                captured = self._capture_call(inputs, numbers or (), dump)
                program = self._plan_and_partition(captured, dump, first=numbers is None)
        except BaseException as error:
            typed = isinstance(error, WholestepError)
            if several:
                self.consistency.fail(str(error).splitlines()[0] if typed else f"{type(error).__name__}: {error}")
            raise
        if several:
            again = partial(self._capture, shapes={}, numbers=numbers or ())
            leaves = with_arrays(program.capture.effects.carried.arrays, inputs.names, inputs.leaves)
            program = self.consistency.program(program, replace(inputs, leaves=leaves), again)
        else:
            program = self.consistency.alone(program)
        self.decisions.forget(self.consistency.knows)
        keeps = self.strategies.options.reshard_after_forward is False
        watch = dump.after_pass if dump.folder else None  # with a watch, each pass changes a copy
        may_regather = self.options.may_regather and (keeps or not self._choice)
        finish = partial(self.finalizer.finish, may_regather=may_regather, calls=CallOrder())
        before, program = program, finish(program, watch=watch)
        if planned and not self._same_after_passes(
            dims, planned, program, lambda local: finish(replace(before, local=local))
        ):
            return self.compile(inputs, numbers, earlier)  # ranks have compared the program: this one goes on alone
        if program.capture.counts is not None:
            refuse_assumed(program.capture.counts, program.capture.graph.graph)
        dump.write("4-final-graph", program.local)
        for name, graph in zip(("first", "flush"), program.local.across or (), strict=False):
            dump.write(f"4-final-graph-{name}", graph)
        return program

    def _with_symbols(
        self, dims: Dims, inputs: StepInputs, numbers: Numbers | None, earlier: Sequence[Capture], dump: Dump
    ) -> tuple[RankProgram | None, list[PlannedFor]]:
        """The program for a call and for other sizes of its batch, and what is planned for some of these; None where it
        has to be captured for its own.
        """
        if not dims:
            return None, []
        try:
            captured = captured_for(inputs, dims, earlier)
            if captured is None:
                captured = self._capture_call(inputs, numbers or (), dump, dims)
                if not self.sizes.left(captured):
                    return None, []
                self._refuse_other_graph(captured, inputs, numbers or (), earlier, dump)
                if paddings := self.options.user.paddings:
                    captured = exact(paddings, captured, other_sizes(captured, self.world.mesh.size))
                    dump.write("1-train-graph", captured.graph)
            program = self._plan_and_partition(captured, dump, numbers is None)
            if program.local.async_axes:
                raise SizesFixedError(ASYNC)
            planned = self._planned_for_others(program.capture) if self.options.proves_sizes else []
            for expected in planned:
                expected.refuse_other(program.local, self.world)
        except (RankFailedError, RankMismatchError, PaddingError):  # is about other ranks, or all sizes
            raise
        except Exception as error:
            if isinstance(error, CaptureError) and error.branches and error.branches == self.branches:
                return None, []  # the step raises on these: its message is to have this call's numbers
            if self.sizes.failed(dims, error):
                return self._with_symbols(self.sizes.chosen(inputs), inputs, numbers, earlier, dump)
            return None, []
        self.sizes.captures += 1
        return program, planned

    def _planned_for_others(self, captured: Capture) -> list[PlannedFor]:
        """What is planned for some of the sizes that a capture with symbols is for."""
        plans: list[PlannedFor] = []
        for far in (False, True)[: 1 if self.options.user.passes is None else 2]:  # of passes= nothing is known
            sizes = other_sizes(captured, self.world.mesh.size, far, smaller=self.options.memory_bytes is not None)
            plans.append(PlannedFor(sizes, self._planned_at(captured, sizes)))
        return plans

    def _planned_at(self, captured: Capture, sizes: dict[str, int]) -> LocalGraph:
        """The program that is planned for other sizes. Its numbers keep their expressions, unless torch has compared
        some since the trace: with plain ones, a dim that ranks share equally has another form.
        """
        with captured.sized.kept():
            other = at_other_sizes(captured, sizes) or replace(captured, graph=planned_at(captured.graph, sizes))
            return self._lowered(other.graph, self._plan(other))

    def _same_after_passes(
        self, dims: Dims, planned: list[PlannedFor], program: RankProgram, finish: Callable[[LocalGraph], RankProgram]
    ) -> bool:
        """Whether a program with symbols is, after its passes, at other sizes what they make of what is planned there;
        else its sizes are captured one by one.
        """
        try:
            if not all(program.capture.sized.hold(expected.sizes) for expected in planned):  # passes compared more
                planned = self._planned_for_others(program.capture)
            for expected in planned:
                expected.refuse_other_after(lambda local: finish(local).local, program.local, self.world)
        except (RankFailedError, RankMismatchError):
            raise
        except Exception as error:  # a pass may raise for other sizes
            self.sizes.failed(dims, error)
            return False
        return True

    def _refuse_other_graph(
        self, captured: Capture, inputs: StepInputs, numbers: Numbers, earlier: Sequence[Capture], dump: Dump
    ) -> None:
        """Raise SizesFixedError unless a capture with symbols is, at known sizes, what a capture for these is."""
        for other in earlier:
            is_alike = [b.expected for b in other.branches] == [b.expected for b in captured.branches]
            if is_alike and (sizes := sizes_at(captured, other)) is not None:
                return refuse_other_graph(captured.graph, sizes, other.traced)
        fixed = self._capture_call(with_row_major(inputs, captured), numbers, dump)
        return refuse_other_graph(captured.graph, captured.sized.record.hints, fixed.graph)

    def _capture_call(
        self, inputs: StepInputs, numbers: Numbers, dump: Dump, dims: Mapping[str, tuple[int, ...]] | None = None
    ) -> Capture:
        """Capture a call; with symbols for `dims` of its batch."""
        with self.stages.stage("capture"):
            captured = self._capture(inputs.args, inputs.kwargs, inputs.global_shapes, numbers, dims)
        self.captures += 1
        self._carried |= captured.effects.carried
        dump.write("1-train-graph", captured.graph)
        return captured

    def _capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], numbers: Numbers,
        dims: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Capture:  # fmt: skip
        note_changed(numbers)
        alone, device = self.world.mesh.size == 1, self.world.device
        options = replace(self.options.capture, device=device, branches=self.branches, branches_of_batch=alone)
        carried, changing = self._carried, self._changing
        if not alone and self.may_count:  # other ranks pick other numbers of rows
            changing |= BATCH_COUNTS
        return capture_step(
            self.fn, args, kwargs, options, shapes=shapes, carried=carried, changing=changing, dynamic=dims,
            repeats=bool(self.options.user.verifies),
        )  # fmt: skip

    def _plan_and_partition(self, captured: Capture, dump: Dump, first: bool) -> RankProgram:
        if self.options.user.count_expert_rows:
            captured = replace(captured, graph=with_expert_rows(captured.graph), unfilled=captured.traced)
        key_values, label = partial(self._key_values, captured), self.consistency.round_label
        self.finalizer.choices = KeptChoices(self.rendezvous, self.cache, key_values, label)
        planned = self._plan(captured)
        if first:
            warn_of_plan(planned, captured.graph, self.world)
        if self._choice is not None:
            planned = replace(planned, objective=self._choice.objective).with_notes(*self._choice.notes)
        elif self.options.plan is not None:
            planned = replace(planned, objective=self.options.plan.objective)
        dump.write("2-plan", planned)
        with self.stages.stage("partition"):
            local = self._lowered(captured.graph, planned)
            dump.write("3-local-graph", local)
        lines, shared = program_lines(local, planned), program_lines(local, planned, shared=True)
        return RankProgram(captured, planned, local, local, lines, shared)

    def _lowered(self, graph: TrainGraph, planned: Plan) -> LocalGraph:
        """The program of a plan. Stages keep the order of their first program that has the same blocks, as they have to
        agree in each call, and a program is compiled by those ranks alone that need it.
        """
        local = lowered(graph, planned, self._orders)
        self._orders += [named for named in named_orders(local) if named not in self._orders]
        return local

    def _plan(self, captured: Capture) -> Plan:
        options, mesh, choices = self.options, self.world.mesh, self.finalizer.choices
        is_first = self.consistency.is_new
        if options.auto is not None and self._choice is None:
            if mesh.size > 1:
                self.consistency.before_choosing(options.auto.describe(mesh))
            with self.stages.stage("choose"):
                choice = choose_strategy(options.auto, captured, self.finalizer)
            self._choice, self._strategies, self._chosen_on = choice
        open_to_solve = self.strategies.open_parts if mesh.size > 1 else []
        priced_on = options.plan.hardware if options.plan is not None else options.user.hardware
        priced_on = self._chosen_on if self._choice else priced_on
        stages = self.strategies.pipeline
        has_order_to_choose = stages is not None and priced_on is None
        depends_on_batch = mesh.size > 1 and (open_to_solve or (stages is not None and stages.stages is None))
        if (depends_on_batch or has_order_to_choose) and self.consistency.is_new:
            self.consistency.before_choosing(self.strategies.describe(mesh))
            choices.look_up()
        if any(part.hardware is None for part in open_to_solve):
            self._strategies = with_hardware(self.strategies, self.finalizer.hardware_and_schedule()[0])
        if has_order_to_choose:
            priced_on = self.finalizer.hardware_and_schedule()[0]
        with self.stages.stage("plan"):
            earlier = choices.of(PLAN) if open_to_solve else None
            solved = strategies_in(earlier, self.strategies) if earlier else self.strategies
            strategies = same_numbers(solved, self.strategies)
            names = {spec.name for spec in captured.graph.inputs}  # a frozen parameter's state is none
            rests = {name: layout for name, layout in placed(captured.state, self.world).items() if name in names}
            planned = plan(captured.graph, mesh, strategies, rests, priced_on)
            if depends_on_batch and is_first:
                planned = self._as_on_first_rank(planned, partial(plan, captured.graph, mesh), (rests, priced_on))
        if open_to_solve and planned.strategies and (text := text_of(planned.strategies, self.strategies)):
            choices.note(PLAN, text)
        if planned.owners or planned.update_owners:
            self._strategies = planned.strategies  # a call with another batch keeps the stages
        if options.plan is not None:
            refuse_other_parameters(options.plan, planned)
        return planned

    def _as_on_first_rank(self, planned: Plan, plan_by: Callable[..., Plan], rest: tuple[Any, ...]) -> Plan:
        """The plan with the stages and solved layouts of the first rank, whose batch may have other sizes than here."""
        assert planned.strategies is not None, "it was planned by some"
        text = text_of(planned.strategies, planned.strategies)
        first_text = self.decisions.decide(PLAN, self.consistency.round_label, lambda: text)
        if first_text == text:
            return planned
        first = strategies_in(first_text, planned.strategies)
        try:
            return plan_by(first, *rest)
        except PlanError:  # ranks have other models, which the comparison of their programs says
            return planned

    def _key_values(self, captured: Capture) -> dict[str, object]:
        """The values that choices follow from: the key of the compile cache."""
        options, user = self.options, self.options.user
        return {
            "versions": versions(), "hardware": hardware(self.world.device), "mesh": str(self.world.mesh),
            "measured machine": self.finalizer.hardware,
            "option backend": (options.backend.name, [getattr(options.backend, flag) for flag in CAPABILITIES]),
            "option schedule": user.schedule, "option hardware": user.hardware,
            "option parallel": options.auto or self.strategies,
            "option memory_bytes": (options.memory_bytes, options.may_regather),
            "layouts of what is placed": {k: str(v) for k, v in placed(captured.state, self.world).items()},
            "constants": digest(constant_lines(captured)),
            "captured graph": digest([*graph_lines(captured, self.world.device), *metas_of(captured.graph)]),
        }  # fmt: skip


_OURS = str(Path(__file__).parent.parent)


def warn_of_plan(planned: Plan, graph: TrainGraph, world: World) -> None:
    """Warn on the first rank, at the user's line, of losses that depend on the semantics and of repeated work."""
    if world.rank or world.mesh.size == 1:
        return
    if by_semantics := {*planned.notes}.intersection(differences(graph)):
        lines = "\n".join(f"  {note}" for note in planned.notes if note in by_semantics)
        choice = (
            "This is what DDP computes too. For what one device computes on the whole batch give "
            'DataParallel(..., semantics="global"), for the sum over ranks reduce="sum".'
        )
        warnings.warn(f"semantics='per_rank':\n{lines}\n  {choice}", stacklevel=_level())
    for work in (w for w in planned.repeated if w.share >= 0.1):
        warnings.warn(f"{work}\n  print(step.plan) shows the layouts, step.plan.explain(name) why", stacklevel=_level())


def _level() -> int:
    """How many frames up from `warn_of_plan` the user's code is."""
    level, frame = 0, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level + 1
