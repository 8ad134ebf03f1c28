"""CompiledStep: called like the user's function, runs the program of this rank."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any, cast

import torch

from .._torch import drop_modes, modes_now
from ..backend.eager import WaitClock
from ..cache.step_cache import StepCache
from ..capture.branches import OtherBranchError, too_many_branches
from ..capture.call_structure import StepCall, Structure, leaf_names, take_apart
from ..capture.capture import Capture, device_of, find_state
from ..capture.scheduled_numbers import scheduled
from ..capture.state import StepState
from ..cost.timeline import Timeline, timeline
from ..distributed.activity import ACTIVITY
from ..distributed.launch import World, join, watch
from ..distributed.rendezvous import Rendezvous
from ..errors import CaptureError, PlanError, StateError, WholestepError
from ..graph.gc_control import collected_after, collector_paused, source_lines_dropped
from ..graph.graph import LocalGraph, TrainGraph
from ..hardware.hardware import Hardware
from ..passes.schedule import Schedule
from ..plan.data_parallel import DataParallel
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from ..profiling.profile import Profile, SpanClock, measured_kernels, measured_timeline
from ..tuning import TUNING
from . import random_state
from .between_steps import CrossStepRunner, flush_pending
from .compile_options import StepOptions
from .compiler import Compiler
from .failed_call import FailedCall, uninterrupted
from .guards import Miss, ambient
from .installer import Installer
from .nonfinite import NonfiniteWatch
from .pad_batches import PaddedCall, padded, refuse_cut, refuse_fixed, with_lengths
from .piece_check import PieceCheck, piece_check
from .program import Phase, Program
from .progress import Stages
from .repeated_capture import Verification
from .size_check import other_dims
from .step_inputs import BatchSharder, BatchSizes, GivenSizes, KnownSizes, StepInputs, batch_shapes, batch_sharder

MOST_VALUES = TUNING.most_captures
MOST_TRIES = MOST_VALUES // 2  # programs of one call, each for other branches


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
        self.calls = 0
        self.misses: list[str] = []
        self._expert_rows: dict[str, torch.Tensor] = {}
        self.on_placed: list[Callable[[CompiledStep], None]] = []
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__
        watch(options.user.timeout_s)
        ACTIVITY.compiled[self.__name__] += 1
        self.number = ACTIVITY.compiled[self.__name__]
        self._clock = WaitClock() if options.user.measure else None
        self._stages = Stages(options.user.progress, self.__name__)
        self._cache = StepCache(options.cache, self._stages.report) if options.cache else None
        self._compiler: Compiler | None = None
        self._installer = Installer(options, self._stages, self._clock)
        self._shares_batches, self._pads = options.strategies.shares_batches, bool(options.user.paddings)
        self._cuts_batches = options.auto is not None or options.strategies.micro_batches is not None
        self._pieces: PieceCheck | None = None
        self._missed = Counter[str]()
        self._failed: FailedCall | None = None
        self._failures = 0
        self._weak = weakref.ref(self)
        self._evicted = False
        action = options.user.on_nonfinite
        self._nonfinite = None if action is None else NonfiniteWatch(self.__name__, action)
        self._sharder: tuple[Structure, BatchSharder | None] | None = None
        self._known_sizes: KnownSizes | None = None
        self._verification = Verification(fn, self.__name__, options.capture, options.user.verifies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; returns what the function returns."""
        if ACTIVITY.failure is not None:
            ACTIVITY.raise_failure()
        if self._nonfinite is not None:
            self._nonfinite.before_call()
        if ACTIVITY.inside:  # the last call ended in what is no Exception
            ACTIVITY.unfinished += 1
        ACTIVITY.step, ACTIVITY.inside, ACTIVITY.meets = self._weak, True, 0
        modes = modes_now()
        program: Program | None = None
        try:
            self._settle()
            opened = self.programs[-1].guards.opened((args, kwargs)) if self.programs else None
            call = opened or take_apart((args, kwargs))
            if self._cuts_batches:
                self._check_pieces(call, args, kwargs)
            padding: tuple[PaddedCall, Program, GivenSizes | None] | None = None
            if self._pads:
                names = leaf_names(self.fn, call.structure)
                call, args, kwargs = with_lengths(self.options.user.paddings, call, names)
                padding = self._padding(call, args, kwargs)
            if padding is not None:
                padded_call, fits, sizes = padding
                call, args, kwargs = padded_call.call, padded_call.args, padded_call.kwargs
            else:
                sizes = self._given_sizes(call, args, kwargs) if self._shares_batches else None
                fits = self._program(call, args, kwargs, sizes)
            tries = 0
            while True:
                flush_pending(but=fits.run)
                program = fits
                program.phase = Phase.BEFORE
                if self._clock is not None:
                    self._clock.reset(program.world.device)
                if program.acts:
                    objects = call.objects or take_apart((args, kwargs)).objects  # a padded call has none
                    program.capture.effects.arguments.update(enumerate(objects))
                try:
                    with uninterrupted():
                        result = program(call.leaves)
                        self.calls += 1
                        if program.meets:
                            ACTIVITY.note_program(program.key)
                        if self._nonfinite is not None and program.nonfinite:
                            self._nonfinite.note(self.calls, program.capture.checked, *program.nonfinite)
                        self._expert_rows = program.expert_rows
                        program.phase = Phase.DONE
                    break
                except OtherBranchError as other:
                    tries += 1
                    if tries == MOST_TRIES:
                        raise too_many_branches(other, tries) from None
                    fits = self._along(other, call, args, kwargs, sizes)
        except BaseException as error:
            self._note_failed(error, program)
            if isinstance(error, Exception):
                ACTIVITY.note_error(error)
            else:  # an interruption, which may have left the end of a context out
                drop_modes(modes)
            raise
        ACTIVITY.inside = False
        return result

    def _note_failed(self, error: BaseException, program: Program | None) -> None:
        """A call raises: the next one begins with the question of what this one has left."""
        ACTIVITY.meets = 0
        if program is not None:
            program.capture.effects.arguments.clear()
        if (self._failed is not None and program is None) or (program is not None and program.phase is Phase.DONE):
            return  # the question stays, as long as it is not answered; a Ctrl-C that has waited asks none
        failed = FailedCall.of(self.__name__, self.calls + 1, error, program)
        if not failed.is_done:
            self._failed = failed

    def _settle(self) -> None:
        """Go on after a call that raised, if one did. Raises StateError or RankMismatchError: the step cannot."""
        if (failed := self._failed) is None:
            return
        self._failures += 1
        if self._compiler is not None and self.programs:
            ranks, label = self._compiler.rendezvous, f"{self._compiler.consistency.label}/failed/{self._failures}"
            failed.agree(self.programs, ranks, label)
        self._failed = None
        self._complete()

    def __repr__(self) -> str:
        options, plan = self.options, self.plan
        if plan is not None:
            how = f"{plan.strategy}; mesh {plan.mesh}"
        elif options.auto is not None:
            how = "Auto"
        else:
            parts = options.strategies.parts
            how = ", ".join(p.kind.name if isinstance(p, DataParallel) else type(p).__name__ for p in parts)
            how += f"; mesh {options.mesh}" if options.mesh is not None else ""
        calls = f"{self.calls} call" + ("" if self.calls == 1 else "s")
        captures = f"{self.captures} capture" + ("" if self.captures == 1 else "s")
        state = f"{calls}, {captures}" if plan is not None else "not compiled yet"
        if self._installer.recordings is not None:
            state = f"{state}; CUDA graph: {self.cuda_graph}"
        return f"<CompiledStep {self.__name__}: {how}; backend {options.backend.name}; {state}>"

    def _repr_html_(self) -> str:
        plan = f"\n{self.plan._repr_html_()}" if self.plan is not None else ""  # pyright: ignore[reportPrivateUsage]
        return f"<p>{escape(repr(self).strip('<>'))}</p>{plan}"

    def flush(self) -> None:
        """Complete the last call, where the schedule leaves the end of one to the next (`schedule="across_steps"`).

        Reading or loading `state_dict()`, an eager forward or update, saving a checkpoint and calling another compiled
        step do it by themselves. Call it before reading or writing parameters directly. All ranks have to. With
        `on_nonfinite`, it also waits for what the last call found. Raises NonFiniteError with `on_nonfinite="raise"`.
        """
        self._complete()
        if self._nonfinite is not None:
            self._nonfinite.read_all()

    def _complete(self) -> None:
        for program in self.programs:
            if isinstance(program.run, CrossStepRunner):
                program.run.flush()

    def profile(self, *args: Any, hardware: Hardware | None = None, repeat: int = 5, **kwargs: Any) -> Profile:
        """Train `repeat` steps and two more on these arguments with every node timed, beside the prediction.

        `hardware` is what to predict for; by default that of the schedule. On a GPU the device is waited for after each
        node: times of ops are right, what overlaps is not. All ranks call it.

        Example:
            >>> profile = step.profile(model, optimizer, batch)
            >>> print(profile), profile.save("step.json")

        Raises:
            PlanError: the schedule is across steps, there is no hardware to predict for, or the step has stages.
        """
        self(*args, **kwargs)
        program = self.programs[-1]
        if isinstance(program.run, CrossStepRunner):
            text = "a step that ends in the next one (schedule='across_steps') has no timeline of its own"
            raise PlanError(text, "a schedule within the step", 'compile it with schedule="auto" to profile it')
        if program.local.stage_axis:
            text = "step.profile of a Pipeline, whose ranks wait for each other"
            raise PlanError(text, "no stages", "use torch.profiler, and ws.timeline for what is simulated")
        hardware = hardware or (self.schedule.hardware if self.schedule else None)
        if hardware is None:
            needed = "hardware to predict for"
            raise PlanError("this step was scheduled for none (one rank, or schedule=None)", needed, "give hardware=")
        world, usual, clock = program.world, program.run, SpanClock(program.world.device.startswith("cuda"))
        inputs = program.gather_inputs(take_apart((args, kwargs)).leaves)
        program.run = self._installer.compiled(program.local, world, inputs, clock)
        timelines: list[Timeline] = []
        try:
            for _ in range(repeat + 1):  # the first one checks strides, and does not count
                clock.clear()
                begin = time.perf_counter()
                self(*args, **kwargs)
                took = time.perf_counter() - begin
                timelines.append(measured_timeline(program.local, clock.spans, begin, took))
        finally:
            program.run = usual
        middle = sorted(timelines[1:], key=lambda measured: measured.simulated.step_us)[(repeat - 1) // 2]
        kernels = measured_kernels(program.local, middle)
        return Profile(replace(middle, title="measured"), timeline(program.local, hardware), kernels)

    @property
    def schedule(self) -> Schedule | None:
        """What orders its collectives: as it was given, or as measured at the first call; None where nothing does."""
        schedule = self.options.user.schedule
        if not isinstance(schedule, str):
            return schedule
        return self._compiler.finalizer.schedule if self._compiler else None

    @property
    def strategies(self) -> Strategies:
        """Where tensors rest: as given, or as chosen at the first call."""
        return self._compiler.strategies if self._compiler else self.options.strategies

    @property
    def world(self) -> World | None:
        """The ranks that it runs on; None before the first call."""
        return self._compiler.world if self._compiler else None

    @property
    def state(self) -> StepState | None:
        """The modules and optimizers of the program that was compiled last; None before the first call."""
        return self._installer.state

    @property
    def cuda_graph(self) -> str:
        """What is recorded as CUDA graphs and the memory that it takes, or why nothing is; empty before the first call.

        `recorded, 1.2 GiB of memory (1.1 GiB before)`: what the step computes, besides what rests, takes that much;
        op by op, it took the second number.
        """
        return str(self._installer.recordings or self._installer.not_recorded)

    @property
    def waited_seconds(self) -> float:
        """How long the last call was blocked in waits for collectives, with `measure=True`; else 0. On a GPU: how long
        the stream that computes was blocked. Reading it waits for the GPU.
        """
        return self._clock.seconds if self._clock is not None else 0.0

    def metrics(self) -> dict[str, torch.Tensor]:
        """How many rows each expert had in the last call, with `count_expert_rows=True`, by the path of the layer: of
        layers whose rows are sorted by expert for grouped products, as those of transformers. Under
        `semantics="per_rank"` of the batch of this rank, else of the whole batch. Reading it waits for the GPU.

        Example:
            >>> loads = {layer: rows.max() / rows.double().mean() for layer, rows in step.metrics().items()}
        """
        if not self.options.user.count_expert_rows:
            raise StateError("step.metrics() without counts", "count_expert_rows=True", "give it to ws.compile")
        return {layer: rows.cpu() for layer, rows in self._expert_rows.items()}

    @property
    def skipped(self) -> int:
        """How many calls changed nothing because of `on_nonfinite`, as far as read (`flush` reads all)."""
        return self._nonfinite.skipped if self._nonfinite is not None else 0

    @property
    def captures(self) -> int:
        """How often it was captured."""
        return self._compiler.captures if self._compiler else 0

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
        return list(self._cache.log) if self._cache else []

    def _given_sizes(self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GivenSizes | None:
        """Tell the other ranks the sizes of a batch that they share; None where each rank runs on what it is given."""
        sharder = self._sharder_of(call, args, kwargs)
        return None if sharder is None else sharder.give(call.leaves)

    def _check_pieces(self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the numbers of micro-batches of ranks, where these may differ."""
        if self.options.auto is not None and not self.programs:
            return  # the first rank chooses, and ranks compare their programs
        compiler = self._compiler or self._start(self._inputs(args, kwargs, None))
        if self._pieces is None:
            self._pieces = piece_check(compiler.strategies, compiler.world.mesh, compiler.rendezvous)
            self._cuts_batches = self._pieces is not None
        if self._pieces is not None:
            names, programs = partial(leaf_names, self.fn, call.structure), [program.local for program in self.programs]
            self._pieces.check(call, names, programs)

    def _sharder_of(self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchSharder | None:
        """What makes this rank's part of such a batch; None where each rank runs on what it is given."""
        if self._compiler is None:
            self._start(self._inputs(args, kwargs, None))
        if self._sharder is None or self._sharder[0] != call.structure:
            names = leaf_names(self.fn, call.structure)
            assert self.world is not None, "joined"
            sharder = batch_sharder(self.strategies, names, call.leaves, self.world, self._sizes_known_to_ranks)
            self._sharder = (call.structure, sharder)
        return self._sharder[1]

    def _padding(
        self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[PaddedCall, Program, GivenSizes | None] | None:
        """A call whose batch was padded, and its program; None where the batch runs as it is."""
        paddings = self.options.user.paddings
        sharder = self._sharder_of(call, args, kwargs) if self._shares_batches else None
        greatest = int if sharder is None else sharder.greatest
        if sharder is not None:
            refuse_cut(paddings, {(sharder.names[cut.leaf], cut.dim) for cut in sharder.shared})
        padded_call = padded(paddings, call, leaf_names(self.fn, call.structure), greatest)
        if padded_call is None:
            return None
        sizes = None if sharder is None else sharder.give(padded_call.call.leaves)
        program = self._program(padded_call.call, padded_call.args, padded_call.kwargs, sizes)
        check = program.guards.sizes
        if check is None or not set(padded_call.lengths) <= set(check.record.dims.values()):
            refuse_fixed(paddings, program.capture)  # raises: a length is no symbol of this program
        assert check is not None, "a program with symbols"
        broken = check.broken_at(padded_call.lengths)
        if not greatest(int(broken is not None)):
            return padded_call, program, sizes
        text = check.record.shown(broken.text) if broken is not None else "that another rank has"
        why = f"not padded: without padding, sizes break the guard {text}"
        if why not in self.misses:
            self._note_miss(Miss(why))
        return None

    def _along(
        self, other: OtherBranchError, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        sizes: GivenSizes | None,
    ) -> Program:  # fmt: skip
        """The program that takes other branches than one that ran and has changed nothing. Where the step raises on
        these, its error is raised.
        """
        assert self._compiler is not None, "a program ran"
        self._compiler.branches = other.taken
        try:
            return self._program(call, args, kwargs, sizes, Miss(other.found, "takes a branch", other.where))
        except CaptureError as error:
            raised = error.__cause__
            from_user = raised is not None and not isinstance(raised, WholestepError) and not error.reads_value
            if not from_user or error.branches != other.taken:
                raise
            raise cast(BaseException, raised) from None
        finally:
            self._compiler.branches = ()

    def _sizes_known_to_ranks(self) -> KnownSizes:
        assert self._compiler is not None, "joined"
        self._known_sizes = self._known_sizes or KnownSizes.of(self._compiler.rendezvous)
        return self._known_sizes

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: BatchSizes | None) -> StepInputs:
        sharder = self._sharder[1] if self._sharder else None
        state, call, names = find_state(self.fn, args, kwargs, self.options.capture.extra)
        shapes = sharder.global_shapes(call.leaves, sizes) if sharder is not None and sizes else {}
        return StepInputs(args, kwargs, call.structure, call.leaves, tuple(names), state, sharder, sizes, shapes)

    def _start(self, inputs: StepInputs) -> Compiler:
        """Join the job."""
        options = self.options
        user, device = options.user, options.capture.device or device_of(inputs.state)
        wait = user.agree_timeout_s, self._stages.waits
        world = join(options.mesh, device, options.capture.offload, user.timeout_s, *wait)
        ranks = Rendezvous.of_job(*wait)
        who, log = (self.fn, self.__name__, self.number), self.misses.append
        self._compiler = Compiler(*who, options, world, ranks, self._stages, self._cache, log)
        return self._compiler

    def _program(
        self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: GivenSizes | None,
        other: Miss | None = None,
    ) -> Program:  # fmt: skip
        """The program that fits a call, compiled where there is none. What others have given is taken last."""
        if self.programs:
            now = ambient(self.programs[-1].world.device)
            newest = other
            branches = self._compiler.branches if self._compiler else ()
            last = len(self.programs) - 1
            for i in range(last, -1, -1) if self._installer.recordings is None else self._in_order():
                program = self.programs[i]
                if not program.follows(branches):
                    continue
                miss = program.guards.check(call.structure, call.leaves, now) or program.refresh()
                miss = miss or program.guards.check_sizes(call.leaves, sizes and sizes.of_all)
                if miss is None:
                    if i != last:
                        self.programs.append(self.programs.pop(i))
                    ACTIVITY.meets = (self.calls + 1) * program.meets
                    if self._verification.is_due(self.calls + 1):
                        self._verify(program, self._inputs(args, kwargs, sizes and sizes.of_all))
                    return program
                newest = newest or miss
            assert newest is not None, "no program fits"
            self._note_miss(newest)
            self._note_change(newest)
        ACTIVITY.meets = 0
        busy = ACTIVITY.doing(f"compiling {self.__name__}", self.options.user.agree_timeout_s)
        new_only = None if self.options.auto else self._holds_all
        with self._stages.reporting(), busy, collected_after(new_only), source_lines_dropped():
            flush_pending()
            inputs = self._inputs(args, kwargs, sizes and sizes.of_all)
            program = self._compile(inputs, self._other_sizes(inputs))
        ACTIVITY.meets = (self.calls + 1) * program.meets
        if self._verification.is_due(self.calls + 1):
            self._verify(program, None)
        return program

    def _holds_all(self) -> bool:
        """Whether this process has let go of nothing that it compiled: it has one step, which has all its programs."""
        compiler = self._compiler
        return ACTIVITY.compiled.total() == 1 and compiler is not None and len(self.programs) == compiler.captures

    def _verify(self, program: Program, inputs: StepInputs | None) -> None:
        """Trace the step again; if it is another one on any rank, ranks forget their programs, and compare the next."""
        compiler = self._compiler
        assert compiler is not None, "joined"
        ranks = compiler.consistency
        busy = ACTIVITY.doing(f"tracing {self.__name__} again", self.options.user.agree_timeout_s)
        with self._stages.reporting(), busy, self._stages.stage("trace again"), collector_paused():
            flush_pending()  # on all ranks: what a trace calls would do it, with tensors of the trace in their places
            try:
                self._verification.verify(self.calls + 1, program, inputs, compiler.rendezvous, ranks.label)
            except CaptureError:
                self.programs.clear()
                ranks.forget()
                raise

    def _in_order(self) -> Sequence[int]:
        """Places of the programs in the order in which they are looked at where calls are recorded: the latest first,
        those without symbols before: what ranks recorded together for one size serves it on all of them.
        """
        latest = range(len(self.programs) - 1, -1, -1)
        return sorted(latest, key=lambda i: self.programs[i].guards.sizes is not None)

    def _other_sizes(self, inputs: StepInputs) -> list[Capture]:
        """Captures of calls that differ in sizes alone, the latest first: these sizes are symbols from now on."""
        programs: list[Program] = []
        if self.programs and self._compiler is not None:
            now = ambient(self.programs[-1].world.device)
            branches = self._compiler.branches
            fits = (p for p in reversed(self.programs) if p.follows(branches) and p.refresh() is None)
            programs = [p for p in fits if p.guards.differ_in_sizes(inputs.structure, inputs.leaves, now)]
            for program in programs[:1]:
                self._compiler.sizes.note(other_dims(program.guards.shapes, batch_shapes(inputs)))
        return [program.capture for program in programs]

    def _compile(self, inputs: StepInputs, earlier: Sequence[Capture] = ()) -> Program:
        compiler = self._compiler or self._start(inputs)
        ranks = compiler.consistency
        try:
            numbers = self.programs[-1].guards.numbers if self.programs else None
            ranks.before = (self.misses[-1], self.programs[-1].capture) if self.programs else None
            rank_program = compiler.compile(inputs, numbers, earlier)
        finally:  # ranks have to compare these again: none may run one that the others let go of
            ranks.before = None
            self.programs[:] = [program for program in self.programs if ranks.knows(program.compared)]
        drawn = random_state.take() if self.on_placed else None
        with uninterrupted():
            program = self._installer.place(rank_program, inputs, compiler.world, compiler.strategies)
        if drawn is not None:
            miss = self._call_on_placed(program, inputs)
            random_state.put(drawn)
            if miss is not None:
                self._note_miss(miss)
                return self._compile(self._inputs(inputs.args, inputs.kwargs, inputs.sizes), earlier)
        program = self._installer.finish(program, inputs.leaves, compiler.strategies, compiler.rendezvous)
        if isinstance(program.run, CrossStepRunner):
            weak = self._weak
            program.run.settle = lambda: (step := weak()) and step._settle()  # no cycle keeps a step that is dropped
        self.programs.append(program)
        self._evict()
        return self.programs[-1]

    def _evict(self) -> None:
        """Let go of the programs that were not used for longest. This rank compiles them alone where it needs them."""
        most = self.options.user.max_programs
        if len(self.programs) > most and not self._evicted:
            self._evicted = True
            text = f"{self.__name__} met more than max_programs={most} kinds of calls, and keeps the latest programs"
            warnings.warn(f"{text}. Why the last one was captured: {self.misses[-1]}", stacklevel=5)
        del self.programs[:-most]

    def _call_on_placed(self, program: Program, inputs: StepInputs) -> Miss | None:
        """What waits until the state is placed may change it now, as a checkpoint does; one that raises stays. Returns
        why the program does not fit its own call any more.
        """
        optimizers = program.capture.state.optimizers.values()
        before = set(scheduled(optimizers))
        with program.primed:
            for call_back in self.on_placed:
                call_back(self)
            program.primed.entries.clear()
        self.on_placed.clear()
        program.phase = Phase.DONE  # what is loaded is there as after a call
        now = ambient(program.world.device)
        miss = program.guards.check(inputs.structure, inputs.leaves, now) or program.refresh()
        if miss is None and set(scheduled(optimizers)) != before:
            miss = Miss("other options change between calls")
        return miss

    def _note_miss(self, miss: Miss) -> None:
        self.misses.append(miss.text)
        del self.misses[: -TUNING.kept_log]

    def _note_change(self, miss: Miss) -> None:
        """A number that changes between calls is carried from now on; what else keeps changing is refused at last."""
        self._missed[miss.where] += 1
        if len(self._missed) > TUNING.kept_log:
            del self._missed[next(iter(self._missed))]
        count = self._missed[miss.where]
        if miss.where and count == 2:
            cure = "pass it as a tensor" if miss.arguments else "compute with tensors, or pass it to the step as one"
            text = f"{self.__name__} is captured a third time because {miss.text}: the step reads its value"
            warnings.warn(f"{text}. To capture it once, {cure}", stacklevel=4)
        if self._compiler is not None:
            for name in miss.arguments:
                self._compiler.note_changing(name)
        if not miss.use:
            return
        if self._compiler is not None and (miss.number or (miss.counts and self._compiler.may_count)):
            self._compiler.note_changing(miss.where)
        if miss.replaced and count >= MOST_VALUES:
            self.programs.pop()  # what it was captured for is gone
            if count == MOST_VALUES:
                warnings.warn(
                    f"{self.__name__} was captured {count} times because {miss.where} is another object, or holds "
                    "other items, in each of these calls: change its items or attributes, or pass it to the step",
                    stacklevel=4,
                )
        elif count >= MOST_VALUES:
            problem = f"the step {miss.use} that keeps changing: {MOST_VALUES} captures so far"
            needed = "values that say what kind of call it is, of which there are few"
            next_step = "compute with the tensor instead of its value, or pass the value as a Python number"
            raise CaptureError(problem, needed, next_step, miss.where)
