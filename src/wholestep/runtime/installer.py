"""Installs a compiled program: places the state, makes guards and hooks, and builds what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from ..backend.build import compiled
from ..backend.eager import WaitClock
from ..backend.gloo.exchange import exchanges
from ..backend.protocol import Run
from ..backend.rank_binding import bind
from ..capture.scheduled_numbers import scheduled
from ..capture.state import StepState
from ..distributed.launch import World
from ..errors import StateError
from ..graph.graph import LocalGraph
from ..plan.strategies import Strategies
from .compile_options import StepOptions
from .cross_step_runner import CrossStepRunner, flush_before_use
from .eager_gather import gather_before_eager_call
from .guards import Miss, ambient, guards_of
from .placement import gather_before_eager_step, place
from .program import Program
from .progress import Stages
from .rank_program import RankProgram
from .replica_check import ReplicaCheck, connects_all_ranks
from .shared_rng import SharedRng, draws_random
from .step_inputs import StepInputs


@dataclass(frozen=True)
class Placed:
    """A program whose state is placed, before it has something to run. `options` of optimizers were its inputs."""

    program: Program
    inputs: StepInputs
    strategies: Strategies
    options: tuple[str, ...]

    def outdated(self) -> Miss | None:
        """Why the program does not fit its own call any more: a checkpoint that was restored meanwhile changed it."""
        program, inputs = self.program, self.inputs
        now = ambient(program.world.device, inputs.sizes)
        miss = program.guards.check(inputs.structure, inputs.leaves, now) or program.refresh()
        if miss is None and _options_of(program.capture.state) != self.options:
            miss = Miss("other options change between calls")
        return miss


class Installer:
    """Installs the programs of one step, which share state, hooks, random numbers and checks."""

    def __init__(self, options: StepOptions, stages: Stages, clock: WaitClock | None) -> None:
        self.state: StepState | None = None
        self._options, self._stages, self._clock = options, stages, clock
        self._optimizers = WeakSet[Optimizer]()
        self._flushes = False
        self._rng: SharedRng | None = None
        self._check: ReplicaCheck | None = None

    def place(self, made: RankProgram, inputs: StepInputs, world: World, strategies: Strategies) -> Placed:
        """Move the state to where the plan says, and take the guards of the call."""
        state, offload, timeout_s = made.capture.state, self._options.capture.offload, self._options.given.agree_timeout
        with self._stages.stage("place"):
            place(state, made.plan, world, strategies.options.sync_state and self.state is None)
            if world.devices is not None or offload is not None:
                gather_before_eager_call(state.modules, timeout_s, world.device if offload else None)
            for optimizer in set(state.optimizers.values()) - set(self._optimizers):
                gather_before_eager_step(optimizer)
                self._optimizers.add(optimizer)
        self.state = state
        guards = guards_of(made.capture, inputs.call, inputs.names, ambient(world.device, inputs.sizes))
        shard = None
        if inputs.sharder is not None and inputs.sizes:
            shard = partial(inputs.sharder.shard, sizes=inputs.sizes)
        rng = self._shared_rng(made.local, world, strategies)
        program = Program(made.capture, made.plan, made.local, world, guards, _not_yet, inputs.names, shard, rng)
        return Placed(program, inputs, strategies, _options_of(state))

    def finish(self, placed: Placed) -> Program:
        """Compile what the program runs."""
        program, world = placed.program, placed.program.world
        with self._stages.stage("backend"):
            if program.local.across is not None:
                program.run = self._across_steps(program, program.local.across, placed.inputs.leaves)
            else:
                inputs = program.gather_inputs(placed.inputs.leaves)
                program.run = self._compiled(program.local, world, inputs)
        every = self._options.given.check_every
        if every and world.mesh.size > 1 and connects_all_ranks(program.local):
            data = placed.strategies.data
            self._check = self._check or ReplicaCheck(every, world, data.axes(world.mesh) if data else ())
            program.check = self._check.count
        return program

    def _across_steps(self, program: Program, parts: tuple[LocalGraph, LocalGraph], leaves: Sequence[Any]) -> Run:
        """Runs a step whose end is left to the next call."""
        state = program.capture.state
        if not self._flushes:
            modules = [module for root in state.modules.values() for module in root.modules()]
            flush_before_use(modules, state.optimizers.values())
            gather_before_eager_call(state.modules, self._options.given.agree_timeout)
            self._flushes = True
        first, flush = parts
        count = sum(out.kind == "carry" for out in program.local.outputs)
        carried, world = [None] * count, program.world  # no call has computed them yet
        inputs = program.gather_inputs(leaves)
        return CrossStepRunner(
            self._compiled(first, world, inputs),
            self._compiled(program.local, world, [*inputs, *carried]),
            self._compiled(flush, world, [*program.gather_lasting(), *carried]),
            count,
            program.gather_lasting,
        )

    def _compiled(self, local: LocalGraph, world: World, example_inputs: Sequence[Any]) -> Run:
        bound = bind(local, world.coordinate, world.groups, exchange=exchanges(world.device))
        return compiled(self._options.backend, bound, local.inputs, example_inputs, self._clock)

    def _shared_rng(self, local: LocalGraph, world: World, strategies: Strategies) -> SharedRng | None:
        """Random numbers of ranks that compute one thing together."""
        data = strategies.data
        per_rank = frozenset(data.axes(world.mesh) if data and data.semantics == "per_rank" else ())
        together = any(a.size > 1 and a.name not in per_rank for a in world.mesh.axes)
        if not together or not draws_random(local):
            return None
        self._rng = self._rng or SharedRng.of(world, per_rank)
        return self._rng


def _options_of(state: StepState) -> tuple[str, ...]:
    """Options of the optimizers that are inputs of the next program."""
    return tuple(sorted(scheduled(state.optimizers.values())))


def _not_yet(inputs: Sequence[Any]) -> list[Any]:
    raise StateError("the program is not compiled yet")
