"""Installs a compiled program: places the state, makes guards and hooks, and builds what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch.optim import Optimizer

from ..backend.build import compiled
from ..backend.cuda_recorder import cuda_recorder
from ..backend.eager import WaitClock
from ..backend.protocol import NodeClock, Run
from ..backend.recordable import transport
from ..backend.recordings import Recordings, alone
from ..capture.state import StepState
from ..cost.memory import peak_memory
from ..cost.stage_costs import resize_regions
from ..distributed.launch import World
from ..distributed.lockstep import lockstep
from ..distributed.rendezvous import Rendezvous
from ..graph.graph import LocalGraph
from ..graph.sizes_in_graph import at_sizes
from ..graph.text import human
from ..plan.strategies import Strategies
from .between_steps import CrossStepRunner, flush_before_use, gather_before_eager_call
from .compile_options import STAGES_RUN_OP_BY_OP, StepOptions, not_recorded
from .consistency import RankProgram
from .failed_call import mark_torn, params_of, refuse_torn
from .finalize import bound_to_rank
from .guards import Guards
from .placement import Primed, gather_before_eager_step, place, place_loaded
from .program import Program
from .progress import Stages
from .random_state import SharedRng, draws_random
from .replica_check import ReplicaCheck, connects_all_ranks
from .step_inputs import StepInputs


class Installer:
    """Installs the programs of one step, which share state, hooks, random numbers and checks."""

    def __init__(self, options: StepOptions, stages: Stages, clock: WaitClock | None) -> None:
        self.state: StepState | None = None
        self.recordings: Recordings | None = None
        self.not_recorded = "cuda_graphs=False" if options.user.cuda_graphs is False else ""
        self._options, self._stages, self.clock = options, stages, clock
        self._optimizers = WeakSet[Optimizer]()
        self._flushes = False
        self._rng: SharedRng | None = None
        self._check: ReplicaCheck | None = None

    def _place_loaded(self, optimizer: Optimizer) -> None:
        place_loaded(optimizer, *self._rests)

    def place(self, program: RankProgram, inputs: StepInputs, world: World, strategies: Strategies) -> Program:
        """Move the state to where the plan says, and take the guards of the call; `finish` makes what it runs."""
        state, offload = program.capture.state, self._options.capture.offload
        timeout_s = self._options.user.agree_timeout_s
        refuse_torn(params_of(state))
        primed = Primed()
        with self._stages.stage("place"), primed:
            sync = strategies.options.sync_state and self.state is None
            place(state, program.plan, program.capture.graph.outputs, world, sync, primed)
            if world.devices is not None or offload is not None:
                gather_before_eager_call(state.modules, timeout_s, world.device if offload else None)
            for optimizer in set(state.optimizers.values()) - set(self._optimizers):
                gather_before_eager_step(optimizer, WeakMethod(self._place_loaded))
                self._optimizers.add(optimizer)
            self.state, self._rests = state, (state, program.plan, world)
            guards = Guards(program.capture, inputs, world.device)
            shard = None
            if guards.sizes is not None:
                shard = guards.sizes.row_major
            elif inputs.sharder is not None and inputs.sizes:
                shard = partial(inputs.sharder.shard, sizes=inputs.sizes)
            rng = self._shared_rng(program.before, world, strategies)  # the program of all stages, alike on all ranks
            return Program(
                program.capture, program.plan, program.local, world, guards, inputs.names, primed, shard, rng,
                program.compared, program.before,
            )  # fmt: skip

    def finish(self, program: Program, leaves: Sequence[Any], strategies: Strategies, ranks: Rendezvous) -> Program:
        """Compile what the program runs; `leaves` are those of the call."""
        world = program.world
        if self.recordings is None and not self.not_recorded:
            self._prepare_recordings(world, ranks)
        with self._stages.stage("backend"):
            if program.local.across is not None:
                program.run = self._across_steps(program, program.local.across, leaves)
            else:
                inputs = program.gather_inputs(leaves)
                program.run = self.compiled(program.local, world, inputs, self.clock, self.recordings)
        if program.guards.sizes is not None:
            program.guards.sizes.prove()
            if self._options.memory_bytes is not None:
                program.guards.sizes.besides = partial(_over, self._options.memory_bytes, program)
        every = self._options.user.check_every
        if every and world.mesh.size > 1 and connects_all_ranks(program.local):
            self._check = self._check or ReplicaCheck(every, world, strategies)
            program.check = self._check.before
        return program

    def _across_steps(self, program: Program, parts: tuple[LocalGraph, LocalGraph], leaves: Sequence[Any]) -> Run:
        """Runs a step whose end is left to the next call."""
        state = program.capture.state
        if not self._flushes:
            modules = [module for root in state.modules.values() for module in root.modules()]
            flush_before_use(modules, state.optimizers.values())
            gather_before_eager_call(state.modules, self._options.user.agree_timeout_s)
            self._flushes = True
        first, flush = parts
        count = sum(out.kind == "carry" for out in program.local.outputs)
        carried, world = [None] * count, program.world  # no call has computed them yet
        inputs = program.gather_inputs(leaves)
        return CrossStepRunner(
            self.compiled(first, world, inputs, self.clock),
            self.compiled(program.local, world, [*inputs, *carried], self.clock),
            self.compiled(flush, world, [*program.lasting(), *carried], self.clock),
            count,
            program.gather_lasting,
            partial(mark_torn, state),
        )

    def compiled(
        self, local: LocalGraph, world: World, example_inputs: Sequence[Any], clock: NodeClock | None,
        recordings: Recordings | None = None,
    ) -> Run:  # fmt: skip
        """`local` as a function on this rank."""
        bound = bound_to_rank(local, world, runs=True)
        return compiled(self._options.backend, bound.graph, local.inputs, example_inputs, clock, recordings)

    def _prepare_recordings(self, world: World, ranks: Rendezvous) -> None:
        """Decide whether programs are recorded: the same on all ranks, at the first program (collective)."""
        user = self._options.user
        explicit, kind = user.cuda_graphs is True, torch.device(world.device).type
        self.not_recorded = not_recorded(self._options.backend, user)
        if not self.not_recorded and not explicit and kind != "cuda":
            self.not_recorded = f"the step runs on {kind}"
        if self._options.strategies.pipeline is not None:
            self.not_recorded = self.not_recorded or STAGES_RUN_OP_BY_OP
        if kind == "cuda" and torch.cuda.get_allocator_backend() != "native":
            self.not_recorded = self.not_recorded or "the allocator cudaMallocAsync has no pools of memory"
        if self.not_recorded:
            return
        agree = alone
        if world.mesh.size > 1 and transport(kind) == "nccl":
            memory = lockstep(ranks, ranks.next_label("lockstep"))
            if memory is None:
                self.not_recorded = "ranks are on several nodes"
                return
            agree = memory.extremes
        recorder = cuda_recorder(world.device if kind == "cuda" else "cuda:0")
        self.recordings = Recordings(recorder, explicit, user.max_recordings, agree)

    def _shared_rng(self, local: LocalGraph, world: World, strategies: Strategies) -> SharedRng | None:
        """Random numbers of ranks that compute one thing together."""
        data = strategies.data
        per_rank = frozenset(data.axes(world.mesh) if data and data.semantics == "per_rank" else ())
        together = any(a.size > 1 and a.name not in per_rank for a in world.mesh.axes)
        if not together or not draws_random(local):
            return None
        self._rng = self._rng or SharedRng.of(world, per_rank)
        return self._rng


def _over(budget_bytes: int, program: Program, sizes: Mapping[str, int]) -> str:
    """Why a batch of these sizes does not fit into the budget with what the program recomputes; empty if it does."""
    bound = bound_to_rank(program.local.copy(), program.world)
    at_sizes(bound.graph, sizes)
    resize_regions(bound.graph)
    peak_bytes = peak_memory(bound).size_bytes
    problem = f"the step holds {human(peak_bytes)} at these sizes, of memory_bytes={human(budget_bytes)}"
    return problem if peak_bytes > budget_bytes else ""
