"""CompiledStep: called like the user's function, runs the program of this rank."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from .. import _torch
from ..backend.build import CAPABILITIES, compiled
from ..backend.eager import WaitClock
from ..backend.protocol import Run
from ..backend.rank_binding import bind
from ..cache.key import digest, hardware, metas_of, versions
from ..cache.step_cache import CachedChoices, StepCache
from ..capture.call_structure import StepCall, Structure, leaf_names, take_apart
from ..capture.capture import Capture, capture_step, device_of, find_state
from ..capture.effects import Promoted
from ..capture.scheduled_numbers import note_changed, scheduled
from ..capture.state import StepState
from ..distributed.launch import World, join
from ..errors import CaptureError, StateError, WholestepError
from ..graph.graph import LocalGraph, TrainGraph
from ..hardware.hardware import Hardware
from ..partition.lower import partition
from ..passes.base import Watch
from ..passes.schedule import Schedule
from ..plan.make_plan import plan
from ..plan.plan import Plan
from ..plan.plan_diff import refuse_other_parameters
from . import random_state
from .batch_sharding import BatchSharder, BatchSizes, batch_sharder
from .choose_strategy import StrategyChoice, choose_strategy, has_open_layouts, lacks_hardware, with_hardware
from .compile_options import StepOptions
from .consistency import Agreement
from .cross_step_runner import CrossStepRunner, flush_before_use, flush_pending
from .eager_gather import gather_before_eager_call
from .finalize import Finalizer
from .fingerprints import CallInputs, constant_lines, graph_lines, program_lines, said_of_cache
from .guards import Missed, ambient, guards_of
from .placement import gather_before_eager_step, place, placed
from .program import Program
from .progress import Progress, progress_of
from .rank_program import RankProgram
from .replica_check import ReplicaCheck, connects_all_ranks
from .semantics_warning import warn_of_semantics
from .shared_rng import SharedRng, draws_random
from .step_repr import step_html, step_line

if TYPE_CHECKING:
    from ..profiling.profile import Profile

MOST_VALUES = 16


class CompiledStep:
    """A training step for one device, run by this rank of a mesh.

    The first call captures, plans and compiles, and moves parameters and optimizer state to where the plan says.
    Later calls run the program; a call of another kind (a batch of another shape, `model.eval()`, other options) is
    captured again. Returned tensors carry no gradient.

    Example:
        >>> step = ws.compile(train_step)
        >>> loss = step(model, optimizer, batch)
        >>> print(step.captures, step.plan, step.local_graph)
    """

    def __init__(self, fn: Callable[..., Any], options: StepOptions) -> None:
        self.fn, self.options = fn, options
        self.programs: list[Program] = []
        self.calls, self.captures, self.waited_seconds = 0, 0, 0.0
        self.misses: list[str] = []
        self.world: World | None = None
        self.state: StepState | None = None
        self.on_placed: list[Callable[[CompiledStep], None]] = []
        self._clock = WaitClock() if options.measure else None
        self._carried, self._changing = Promoted(), Promoted()
        self._missed = Counter[str]()
        self._agreement = Agreement(options.agree_timeout_s, self._stage, self._tell_waiting)
        self._met = WeakSet[Optimizer]()
        self._shares_batches = options.parallel.shares_batches
        self._sharder: tuple[Structure, BatchSharder | None] | None = None
        self._stream: SharedRng | None = None
        self._decided: StrategyChoice | None = None
        self._check: ReplicaCheck | None = None
        self._progress: Progress | None = None
        self._hooked, self._dumped = False, 0
        budget = (options.memory_bytes, options.gathers_again) if options.memory_bytes is not None else None
        self._finisher = Finalizer(
            options.schedule, options.backend, options.hardware, options.passes, budget, options.agree_timeout_s,
            self._watch, self._stage, self._tell_waiting,
        )  # fmt: skip
        self._kept = StepCache(options.cache, self._say) if options.cache else None
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__

    # -- calling ----------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; returns what the function returns."""
        call = take_apart((args, kwargs))
        sizes = self._batch_sizes(call, args, kwargs)
        program = self._program(call, args, kwargs, sizes)
        flush_pending(but=program.run)
        if self._clock is not None:
            self._clock.seconds = 0.0
        if program.acts:
            program.capture.effects.arguments.now = {**dict(enumerate(args)), **kwargs}
        result = program(call.leaves)
        if self._clock is not None:
            self.waited_seconds = self._clock.seconds
        self.calls += 1
        if program.check is not None:
            program.check(program)
        return result

    def __repr__(self) -> str:
        return step_line(self)

    def _repr_html_(self) -> str:
        return step_html(self)

    def flush(self) -> None:
        """Complete the last call, where the schedule leaves the end of one to the next (`schedule="across_steps"`).

        Reading or loading `state_dict()`, an eager forward or update, saving a checkpoint and calling another compiled
        step do it by themselves. Call it before reading or writing parameters directly. All ranks have to.
        """
        for program in self.programs:
            if isinstance(program.run, CrossStepRunner):
                program.run.flush()

    def profile(self, *args: Any, hardware: Hardware | None = None, repeat: int = 5, **kwargs: Any) -> Profile:
        """Train `repeat` steps and two more on these arguments with every node timed, beside the prediction.

        `hardware` is what to predict for; by default that of the schedule. On a GPU
        the device is waited for after each node: times of ops are right, what overlaps is not. All ranks call it.

        Example:
            >>> found = step.profile(model, optimizer, batch)
            >>> print(found), found.save("step.json")
        """
        from .profile_step import profile_step

        return profile_step(self, hardware, repeat, args, kwargs)

    @property
    def schedule(self) -> Schedule | None:
        """What orders its collectives: as it was given, or as measured at the first call; None where nothing does."""
        given = self.options.schedule
        return given if isinstance(given, Schedule) else self._finisher.measured

    def _batch_sizes(self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchSizes | None:
        """Sizes of the batch on all ranks, where ranks compute on one batch together."""
        if not self._shares_batches:
            return None
        world = self.world or self._join(find_state(self.fn, args, kwargs, self.options.capture.extra)[0])
        if self._sharder is None or self._sharder[0] != call.structure:
            names = leaf_names(self.fn, args, kwargs)
            self._sharder = (call.structure, batch_sharder(self.options.parallel, names, call.leaves, world))
        made = self._sharder[1]
        return None if made is None else made.sizes(call.leaves)

    def _join(self, state: StepState) -> World:
        options = self.options
        self.world = join(options.mesh, options.capture.device or device_of(state), options.capture.offload)
        return self.world

    def _program(
        self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: BatchSizes | None
    ) -> Program:
        if self.programs:
            now = ambient(self.programs[-1].world.device, sizes)
            newest, missed = "", None
            for i in range(len(self.programs) - 1, -1, -1):
                program = self.programs[i]
                why = program.guards.check(call.structure, call.leaves, now) or program.refresh()
                if not why:
                    if i != len(self.programs) - 1:
                        self.programs.append(self.programs.pop(i))
                    return program
                newest, missed = (newest, missed) if newest else (why, program.guards.missed)
            self.misses.append(newest)
            self._note_change(missed)
        with progress_of(self.options.progress, self.__name__) as self._progress:
            return self._build(args, kwargs, sizes)

    def _note_change(self, missed: Missed | None) -> None:
        """A number that changes between calls is carried from now on; what else keeps changing is refused at last."""
        if missed is None:
            return
        if missed.number:
            self._changing |= Promoted(frozenset([missed.where]))
        self._missed[missed.where] += 1
        count = self._missed[missed.where]
        if missed.replaced and count >= MOST_VALUES:
            self.programs.pop()  # what it was captured for is gone
            if count == MOST_VALUES:
                warnings.warn(
                    f"{self.__name__} was captured {count} times because {missed.where} is another object, or holds "
                    "other items, in each of these calls: change its items or attributes, or pass it to the step",
                    stacklevel=4,
                )
        elif count >= MOST_VALUES:
            raise CaptureError(
                f"the step {missed.what} that keeps changing: {MOST_VALUES} captures so far",
                "values that say what kind of call it is, of which there are few",
                "compute with the tensor instead of its value, or pass the value as a Python number",
                missed.where,
            )

    # -- what was made -----------------------------------------------------------------
    @property
    def plan(self) -> Plan | None:
        """The plan of the program that ran last; None before the first call."""
        return self.programs[-1].plan if self.programs else None

    @property
    def train_graph(self) -> TrainGraph | None:
        """The graph of one device, as captured for the program that ran last."""
        return self.programs[-1].capture.graph if self.programs else None

    @property
    def local_graph(self) -> LocalGraph | None:
        """What this rank runs."""
        return self.programs[-1].local if self.programs else None

    @property
    def cache_log(self) -> list[str]:
        """What the compile cache did at each compile: `hit`, `from rank 0`, `miss: why`, `off: why`, or
        `nothing to choose`.
        """
        return list(self._kept.log) if self._kept else []

    # -- compiling -----------------------------------------------------------------------
    def _build(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: BatchSizes | None) -> Program:
        failure, made, world = "", None, None
        flush_pending()
        try:
            state, *_ = find_state(self.fn, args, kwargs, self.options.capture.extra)
            world = self.world or self._join(state)
            self._agreement.label = self._label or _next_label(world, self.__name__)
            made = self._compile(args, kwargs, world, sizes)
        except WholestepError as error:
            failure = str(error).splitlines()[0]
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            if world is not None and world.mesh.size > 1:
                if failure:
                    self._agreement.fail(failure)
                elif made is not None:
                    again = partial(self._capture, world=world, sizes=None)
                    given = self._given(args, kwargs, world, sizes)
                    self._agreement.program(made, given, self.options, self._kept is not None, again)
        assert made is not None, "compiled or raised"
        assert world is not None, "joined or raised"
        return self._install(self._finish(made, world), args, kwargs, world, sizes)

    @property
    def _label(self) -> str:
        return self._agreement.label

    def _given(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], world: World, sizes: BatchSizes | None
    ) -> CallInputs:
        _, structure, leaves, names = find_state(self.fn, args, kwargs, self.options.capture.extra)
        return CallInputs(structure, tuple(names), leaves, self._whole(leaves, sizes) or {}, world.rank, world.device)

    def _whole(self, leaves: Sequence[Any], sizes: BatchSizes | None) -> dict[str, tuple[int, ...]] | None:
        sharder = self._sharder[1] if self._sharder else None
        return sharder.whole_shapes(leaves, sizes) if sharder and sizes else None

    def _tell_waiting(self, ranks: list[int]) -> None:
        self._tell(f"agree: waiting for ranks {ranks}", "start", 0.0)

    def _choosing(self, captured: Capture, world: World) -> CachedChoices:
        """What is chosen for a program, and what an earlier start chose."""
        label = f"{self._label}/{self._agreement.round}"
        situation = partial(self._situation, captured, world)
        return CachedChoices(self._kept, situation, label, world.rank, self.options.agree_timeout_s)

    def _situation(self, captured: Capture, world: World) -> dict[str, object]:
        """What choices follow from."""
        o = self.options
        return {
            "versions": versions(), "hardware": hardware(world.device), "mesh": str(world.mesh),
            "measured machine": self._finisher.machine, "option schedule": o.schedule,
            "option backend": (o.backend.name, [getattr(o.backend, flag) for flag in CAPABILITIES]),
            "option hardware": o.hardware,
            "option parallel": o.auto or o.parallel, "option memory_bytes": (o.memory_bytes, o.gathers_again),
            "layouts of what is placed": {k: str(v) for k, v in placed(captured.state, world).items()},
            "constants": digest(constant_lines(captured)),
            "captured graph": digest([*graph_lines(captured, world.device), *metas_of(captured.graph)]),
        }  # fmt: skip

    def _compile(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], world: World, sizes: BatchSizes | None
    ) -> RankProgram:
        options = self.options
        with self._stage("capture"):
            captured = self._capture(args, kwargs, world, sizes)
        self.captures += 1
        self._carried |= captured.effects.carried
        self._dumped = 0
        self._dump("1-train-graph", captured.graph)
        choosing = self._finisher.choosing = self._choosing(captured, world)
        decided = self._decide(captured, world) if options.auto is not None else None
        solves = world.mesh.size > 1 and has_open_layouts(self.options.parallel)
        if solves and self._agreement.is_new:
            self._meet(self.options.parallel.describe(world.mesh))
            choosing.look_up()
        if lacks_hardware(self.options.parallel) and world.mesh.size > 1:
            parallel = with_hardware(self.options.parallel, self._finisher.finish_of(world)[0])
            self.options = replace(self.options, parallel=parallel)
        options = self.options
        with self._stage("plan"):
            on = decided.hardware if decided else options.planned_on
            parallel = choosing.earlier.solved or options.parallel
            planned = plan(captured.graph, world.mesh, parallel, placed(captured.state, world), on)
        if solves:
            choosing.note(solved=planned.strategies)
        if options.plan is not None:
            refuse_other_parameters(options.plan, planned)
        if not self.programs:
            warn_of_semantics(planned, world)
        planned = decided.explained(planned) if decided else planned
        self._dump("2-plan", planned)
        with self._stage("partition"):
            local = partition(captured.graph, planned)
            self._dump("3-local-graph", local)
        return RankProgram(captured, planned, local, tuple(program_lines(local, planned)))

    def _meet(self, chooses: str) -> None:
        """Before the first rank chooses for all, ranks that failed until here stop all."""
        self._agreement.lines([chooses, said_of_cache(self._kept is not None)])

    def _decide(self, captured: Capture, world: World) -> StrategyChoice:
        """What `Auto` chooses: at the first compile, the first rank, for all; ranks that failed until here stop all."""
        options = self.options
        assert options.auto is not None, "asked where there is something to choose"
        if self._decided is None:
            if world.mesh.size > 1:
                self._meet(options.auto.describe(world.mesh))
            with self._stage("choose"):
                self._decided = choose_strategy(
                    options.auto, captured.graph, world, placed(captured.state, world), self._finisher,
                    f"{self._label}/auto/{self._agreement.round}", options.agree_timeout_s,
                )  # fmt: skip
            self.options = replace(options, parallel=self._decided.strategies)
            if options.memory_bytes is not None:
                self._finisher.budget = options.memory_bytes, self._decided.gathers
        return self._decided

    def _finish(self, got: RankProgram, world: World) -> RankProgram:
        made = self._finisher.finish(got, world, self._label)
        self._dump("4-final-graph", made.local)
        for name, program in zip(("first", "flush"), made.local.across or (), strict=False):
            self._dump(f"4-final-graph-{name}", program)
        return made

    def _capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], world: World, sizes: BatchSizes | None
    ) -> Capture:
        leaves = take_apart((args, dict(kwargs))).leaves
        if self.programs:
            note_changed(self.programs[-1].guards.numbers)
        options = replace(self.options.capture, device=world.device)
        whole = self._whole(leaves, sizes)
        return capture_step(self.fn, args, kwargs, options, whole=whole, carried=self._carried, changing=self._changing)

    def _scheduled(self, state: StepState) -> list[str]:
        """Options of the optimizers that are inputs of the next program."""
        if self.programs:
            note_changed(self.programs[-1].guards.numbers)
        return sorted(scheduled(state.optimizers.values()))

    def _install(
        self,
        made: RankProgram,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        world: World,
        sizes: BatchSizes | None,
    ) -> Program:
        state = made.capture.state
        call, names = take_apart((args, dict(kwargs))), leaf_names(self.fn, args, kwargs)
        drawn = random_state.take() if self.on_placed else None
        with self._stage("place"):
            place(state, made.plan, world, self.options.parallel.options.sync_state and self.state is None)
            offload = self.options.capture.offload
            if world.devices is not None or offload is not None:
                gather_before_eager_call(state.modules, self.options.agree_timeout_s, world.device if offload else None)
            for optimizer in set(state.optimizers.values()) - set(self._met):
                gather_before_eager_step(optimizer)
                self._met.add(optimizer)
        self.state = state
        now = ambient(world.device, sizes)
        guards = guards_of(made.capture, call, names, now)
        sharder = self._sharder[1] if self._sharder else None
        shard = partial(sharder.shard, sizes=sizes) if sharder and sizes else None
        stream = self._random(made, world)
        program = Program(made.capture, made.plan, made.local, world, guards, _not_yet, names, shard, stream)
        if drawn is not None:
            live = self._scheduled(state)
            self._tell_placed()
            random_state.put(drawn)
            why = guards.check(call.structure, call.leaves, ambient(world.device, sizes)) or program.refresh()
            why = why or ("other options change between calls" if self._scheduled(state) != live else "")
            if why:
                self.misses.append(why)
                return self._build(args, kwargs, sizes)
        with self._stage("backend"):
            inputs = program.gather_inputs(call.leaves)
            if made.local.across is not None:
                program.run = self._carrying(made.local, program, inputs)
            else:
                program.run = self._run_of(made.local, world, inputs)
        if self.options.check_every and world.mesh.size > 1 and connects_all_ranks(made.local):
            data = self.options.parallel.data
            axes = data.axes(world.mesh) if data else ()
            self._check = self._check or ReplicaCheck(self.options.check_every, world, axes)
            program.check = self._check.count
        self.programs.append(program)
        return program

    def _run_of(self, local: LocalGraph, world: World, example_inputs: Sequence[Any]) -> Run:
        bound = bind(local, world.coordinate, world.groups, exchange=world.device[:3] == "cpu")
        return compiled(self.options.backend, bound, local.inputs, example_inputs, self._clock)

    def _carrying(self, steady: LocalGraph, program: Program, inputs: Sequence[Any]) -> CrossStepRunner:
        state = program.capture.state
        if not self._hooked:
            modules = [module for root in state.modules.values() for module in root.modules()]
            flush_before_use(modules, state.optimizers.values())
            gather_before_eager_call(state.modules, self.options.agree_timeout_s)
            self._hooked = True
        assert steady.across is not None, "the end of a step is left to the next call"
        first, flush = steady.across
        count = sum(out.kind == "carry" for out in steady.outputs)
        carried, world = [None] * count, program.world  # no call has made them yet
        return CrossStepRunner(
            self._run_of(first, world, inputs),
            self._run_of(steady, world, [*inputs, *carried]),
            self._run_of(flush, world, [*program.gather_lasting(), *carried]),
            count,
            program.gather_lasting,
        )

    def _tell_placed(self) -> None:
        """Those that waited for the state to be where it rests may change it now; one that raises is called again."""
        for call_back in self.on_placed:
            call_back(self)
        self.on_placed.clear()

    def _random(self, made: RankProgram, world: World) -> SharedRng | None:
        """The stream of random numbers of ranks that compute one thing together."""
        data = self.options.parallel.data
        per_rank = frozenset(data.axes(world.mesh) if data and data.semantics == "per_rank" else ())
        together = any(a.size > 1 and a.name not in per_rank for a in world.mesh.axes)
        if not together or not draws_random(made.local):
            return None
        self._stream = self._stream or SharedRng.of(world, per_rank)
        return self._stream

    # -- small things ------------------------------------------------------------------------
    @contextmanager
    def _stage(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        self._tell(name, "start", 0.0)
        yield
        self._tell(name, "done", time.perf_counter() - start)

    def _tell(self, stage: str, what: str, seconds: float) -> None:
        if self._progress:
            self._progress(stage, what, seconds)

    def _say(self, text: str) -> None:
        self._tell(f"cache: {text}", "done", 0.0)

    def _watch(self) -> Watch | None:
        return self._dump_pass if os.environ.get("WHOLESTEP_DUMP") else None

    def _dump_pass(self, name: str, local: LocalGraph) -> None:
        self._dumped += 1
        self._dump(f"3-pass-{self._dumped:02}-{name}", local)

    def _dump(self, name: str, value: object) -> None:
        folder = os.environ.get("WHOLESTEP_DUMP")
        if folder:
            rank = self.world.rank if self.world else 0
            path = Path(folder) / f"rank{rank}" / f"{self.__name__}-{self.captures}-{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")


def _not_yet(inputs: Sequence[Any]) -> list[Any]:
    raise StateError("the program is not compiled yet")


def _next_label(world: World, name: str) -> str:
    """The same on every rank for the same compiled step: ranks count their steps in the store."""
    if world.mesh.size == 1 or not torch.distributed.is_initialized():
        return name
    number = _torch.default_store().add(f"wholestep/steps/{world.rank}", 1)
    return f"wholestep/{number}"
