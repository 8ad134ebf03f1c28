"""CompiledStep: called like the user's function, runs the program of this rank."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backend.eager import WaitClock
from ..cache.step_cache import StepCache
from ..capture.call_structure import StepCall, Structure, leaf_names, take_apart
from ..capture.capture import device_of
from ..capture.state import StepState
from ..distributed.launch import World, join
from ..distributed.rendezvous import Rendezvous
from ..errors import CaptureError
from ..graph.graph import LocalGraph, TrainGraph
from ..hardware.hardware import Hardware
from ..passes.schedule import Schedule
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from ..tuning import TUNING
from . import random_state
from .batch_sharding import BatchSharder, BatchSizes, batch_sharder
from .compile_options import StepOptions
from .compiler import Compiler
from .cross_step_runner import CrossStepRunner, flush_pending
from .guards import Miss, ambient
from .installer import Installer
from .program import Program
from .progress import Stages
from .step_inputs import StepInputs
from .step_repr import step_html, step_line

if TYPE_CHECKING:
    from ..profiling.profile import Profile

MOST_VALUES = TUNING.most_captures


@dataclass(frozen=True)
class _SharedBatch:
    """How ranks share the batch of a call, and the sizes of its parts on all ranks. `inputs` are there on a first call,
    which needs them to join the job.
    """

    sharder: BatchSharder | None = None
    sizes: BatchSizes | None = None
    inputs: StepInputs | None = None


_OWN_BATCH = _SharedBatch()  # each rank runs on what it is given


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
        self.calls, self.waited_seconds = 0, 0.0
        self.misses: list[str] = []
        self.on_placed: list[Callable[[CompiledStep], None]] = []
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__
        self._clock = WaitClock() if options.given.measure else None
        self._stages = Stages(options.given.progress, self.__name__)
        self._cache = StepCache(options.cache, self._stages.report_cache) if options.cache else None
        self._compiler: Compiler | None = None
        self._installer = Installer(options, self._stages, self._clock)
        self._shares_batches = options.strategies.shares_batches
        self._missed = Counter[str]()
        self._sharder: tuple[Structure, BatchSharder | None] | None = None

    # -- calling ----------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; returns what the function returns."""
        call = take_apart((args, kwargs))
        batch = self._shared_batch(call, args, kwargs) if self._shares_batches else _OWN_BATCH
        program = self._program(call, args, kwargs, batch)
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
        given = self.options.given.schedule
        if not isinstance(given, str):
            return given
        return self._compiler.measured.schedule if self._compiler else None

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
    def captures(self) -> int:
        """How often it was captured."""
        return self._compiler.captures if self._compiler else 0

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
        return list(self._cache.log) if self._cache else []

    # -- programs ------------------------------------------------------------------------
    def _shared_batch(self, call: StepCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _SharedBatch:
        """How ranks share the batch of a call."""
        inputs = None
        if self._compiler is None:
            inputs = self._inputs(args, kwargs)
            self._start(inputs)
        if self._sharder is None or self._sharder[0] != call.structure:
            names = leaf_names(self.fn, args, kwargs)
            assert self.world is not None, "joined"
            self._sharder = (call.structure, batch_sharder(self.strategies, names, call.leaves, self.world))
        sharder = self._sharder[1]
        return _SharedBatch(sharder, None if sharder is None else sharder.sizes(call.leaves), inputs)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepInputs:
        return StepInputs.of(self.fn, args, kwargs, self.options.capture.extra)

    def _start(self, inputs: StepInputs) -> Compiler:
        """Join the job."""
        options = self.options
        world = join(options.mesh, options.capture.device or device_of(inputs.state), options.capture.offload)
        ranks = Rendezvous.of_job(options.given.agree_timeout, self._stages.report_waiting)
        self._compiler = Compiler(self.fn, self.__name__, options, world, ranks, self._stages, self._cache)
        return self._compiler

    def _program(
        self,
        call: StepCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch: _SharedBatch,
    ) -> Program:
        """The program that fits a call, compiled where there is none."""
        if self.programs:
            now = ambient(self.programs[-1].world.device, batch.sizes)
            newest: Miss | None = None
            for i in range(len(self.programs) - 1, -1, -1):
                program = self.programs[i]
                miss = program.guards.check(call.structure, call.leaves, now) or program.refresh()
                if miss is None:
                    if i != len(self.programs) - 1:
                        self.programs.append(self.programs.pop(i))
                    return program
                newest = newest or miss
            assert newest is not None, "no program fits"
            self.misses.append(newest.text)
            self._note_change(newest)
        with self._stages.reporting():
            flush_pending()
            inputs = batch.inputs or self._inputs(args, kwargs)
            return self._compile(inputs.sharing(batch.sharder, batch.sizes))

    def _compile(self, inputs: StepInputs) -> Program:
        compiler = self._compiler or self._start(inputs)
        made = compiler.compile(inputs, self.programs[-1].guards.numbers if self.programs else None)
        drawn = random_state.take() if self.on_placed else None
        placed = self._installer.place(made, inputs, compiler.world, compiler.strategies)
        if drawn is not None:
            self._call_on_placed()
            random_state.put(drawn)
            miss = placed.outdated()
            if miss is not None:
                self.misses.append(miss.text)
                again = self._inputs(inputs.args, inputs.kwargs)
                return self._compile(again.sharing(inputs.sharder, inputs.sizes))
        self.programs.append(self._installer.finish(placed))
        return self.programs[-1]

    def _note_change(self, miss: Miss) -> None:
        """A number that changes between calls is carried from now on; what else keeps changing is refused at last."""
        change = miss.change
        if change is None:
            return
        if change.number and self._compiler is not None:
            self._compiler.note_changing(change.where)
        self._missed[change.where] += 1
        count = self._missed[change.where]
        if change.replaced and count >= MOST_VALUES:
            self.programs.pop()  # what it was captured for is gone
            if count == MOST_VALUES:
                warnings.warn(
                    f"{self.__name__} was captured {count} times because {change.where} is another object, or holds "
                    "other items, in each of these calls: change its items or attributes, or pass it to the step",
                    stacklevel=4,
                )
        elif count >= MOST_VALUES:
            raise CaptureError(
                f"the step {change.what} that keeps changing: {MOST_VALUES} captures so far",
                "values that say what kind of call it is, of which there are few",
                "compute with the tensor instead of its value, or pass the value as a Python number",
                change.where,
            )

    def _call_on_placed(self) -> None:
        """What waits until the state is placed may change it now; one that raises is called again."""
        for call_back in self.on_placed:
            call_back(self)
        self.on_placed.clear()
