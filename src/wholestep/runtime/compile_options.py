"""The options of `wholestep.compile`, declared once, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from ..backend.build import backend_of
from ..backend.default_passes import Edit
from ..backend.eager import Eager
from ..backend.protocol import Backend
from ..cache.step_cache import folder_of
from ..capture.call_structure import Modules, Optimizers
from ..capture.capture_options import CaptureOptions
from ..errors import BackendError, MeshError, PlanError, shown
from ..hardware.hardware import Hardware
from ..mesh import Mesh, refuse_time
from ..passes.schedule import Schedule
from ..plan.pad_to import PadTo
from ..plan.plan import Plan
from ..plan.plan_form import check_form
from ..plan.strategies import Strategies, compose
from ..plan.strategy import Strategy
from ..planner.auto import Auto
from ..planner.piece_search import PieceSearch
from ..precision import Float8, MixedPrecision
from ..typed_values import check_fields
from ..units import parse_bytes, parse_seconds
from .nonfinite import OnNonfinite
from .progress import Progress


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options of `compile`.

    Args:
        parallel: how tensors are stored on the mesh: a strategy, or one for each of several axes, as in
            `[DataParallel("fully_shard", axis="dp"), TensorParallel({...}, axis="tp")]`. By default
            `DataParallel("fully_shard")`. `Auto(...)` measures the hardware and chooses at the first call. A `Plan`,
            as from `Plan.load("plan.json")`, is applied with its mesh and its memory budget; the parameters of the
            step must be those of the plan.
        mesh: the ranks, e.g. `"dp=8"`; one axis over the whole job by default.
        backend: runs the program of a rank. `"eager"` calls one op after the other; `"inductor"` compiles the
            arithmetic between collectives. An object of your own follows the protocol `Backend`.
        cuda_graphs: whether the whole step is recorded as one CUDA graph, whatever `backend` compiled it.
            `"auto"` records on a GPU where the ranks are on one node and the step can be recorded: the first two calls
            run op by op, the third is recorded, later ones replay. `step.cuda_graph` says what was recorded, or why
            not. True warns of what cannot be recorded; False records nothing.
        max_recordings: number of CUDA graphs to hold, one for each kind of call or size of the batch. They share the
            memory of a step; each adds a copy of the batch and the device's list of its launches, some MiB for
            thousands of kernels. Sizes are recorded in the order in which they are called again; others run op by op.
        model: modules that are not arguments of the step; modules in its closure are found without this.
        optimizer: optimizers that are not arguments of the step.
        module_overrides: submodules to replace during the trace, by path (globs allowed).
        passes: a function from the default list of passes (`default_passes`) to the list to run:
            `lambda passes: [mine, *passes]` runs a pass of your own first. All ranks must pass the same function.
        schedule: how collectives are bucketed and ordered. `"auto"` measures compute and links at the first call, in a
            fraction of a second. `"across_steps"` also lets the last reductions of a step complete in the next call, or
            in `step.flush()`. `Schedule(...)` sets the hardware or the sizes. None keeps each collective where
            partitioning puts it.
        memory_bytes: bound on the tensors of a rank, e.g. `"3GiB"`; None for no bound. To meet it, the backward
            recomputes activations and re-gathers parameters, the cheapest first; with `MicroBatches("auto")`, the first
            call also chooses their number. It replaces `keep_gathered_bytes`; an explicit `reshard_after_forward`
            is respected.
        mixed_precision: dtypes of the modules' computation and of gradient reductions.
        float8: linear layers whose products multiply numbers of 8 bits ([page](mixed-precision.md#float8)).
        offload: `"cpu"` stores parameters, gradients and optimizer state in host memory, where the update runs; shards
            are copied to the device before they are gathered. On a CPU only the program changes.
        keep_grads: keep gradients in `param.grad`, even if the step resets them at its start.
        on_nonfinite: what to do about a call whose loss or gradients are NaN or infinite on any rank. `"skip"`,
            `"raise"` or a function: the call changes no parameter, optimizer state or buffer on any rank. With `"skip"`
            the first such call warns, and `step.skipped` counts them; with `"raise"` every rank raises NonFiniteError
            before the next call (on a GPU, before the one after that), in `step.flush()` or in `ws.save`; a function is
            called at these points with the number of the call and the names of what was not finite. None does not look.
        measure: time how long the last step waited for communication: `step.waited_seconds`.
        count_expert_rows: count how many rows each expert has in a call: `step.metrics()`.
        progress: a function, called as `progress(stage, "start" | "done", seconds)`. `"auto"` shows the current stage
            in one line of the first rank's terminal, if compiling takes more than two seconds; None, or
            WHOLESTEP_PROGRESS=0, shows nothing.
        timeout: a rank that died, left, is stopped or hangs ends all others within this time, with a RankFailedError
            that names it: `"60s"`, `"5min"`, or a number of seconds. A rank hangs if others have waited for it for
            three quarters of the time. None watches no rank. [When a rank fails](launching.md#when-a-rank-fails).
        agree_timeout: how long a rank may compile its program while the others wait.
        check_every: number of calls between two comparisons over the ranks, by checksum, of replicated state
            (parameters, optimizer state, options of optimizers) and of batches that ranks share; 0 for never.
        verify: trace the step again and compare it with the program that the call is about to run: a value that the
            step reads and that nothing else compares is found ([page](effects.md#what-is-compared-before-a-call)).
            `"auto"`: at calls 2 and 8, at 5 if that took a second at most, and at 17, 32, ... while it takes less than
            2 % of the run time on every rank; WHOLESTEP_VERIFY=0 in the environment switches it off. True: at all of
            these calls, and programs for all sizes of the batch are compared with those of some. False: never. A
            difference on one rank is an error of all. `progress` is told how long it takes ("trace again").
        max_programs: number of programs to hold, one for each kind of call (a size of the batch, say). The one that was
            not used for longest goes; a call of its kind compiles it again, on this rank alone.
        dynamic: which sizes of the batch are symbols of the captured step, so that a call of another size runs the same
            program ([page](sizes.md)). True: the sizes that have changed. `{"tokens": (0, 1)}`: these dims of an
            argument, or of each tensor in it, from the first call. False: none, each size is captured.
        pad_to: dims of the batch that are padded to one of a few lengths, with what, where that is proved to change no
            number ([page](sizes.md#padding)); several lengths have a `PadTo` each.
        hardware: prices plans and schedules. By default, layouts are priced on one host, so that every start compiles
            the same program, and the schedule on the measured hardware.
        device: where the step runs; by default where the model is (cpu for a model on `meta`).
        cache: a folder for the results of measurements and searches: the measured hardware, the choice of `Auto`, the
            solved layouts, the tensors to recompute. The next start of the same step reads them. By default the folder
            in WHOLESTEP_CACHE; "" for none.

    Raises:
        PlanError, BackendError: an option is malformed.
    """

    parallel: Strategy | Sequence[Strategy] | Auto | Plan | None = None
    mesh: Mesh | str | None = None
    backend: Backend | str = "eager"
    cuda_graphs: bool | Literal["auto"] = "auto"
    max_recordings: int = 8
    model: Modules | None = None
    optimizer: Optimizers | None = None
    module_overrides: Mapping[str, nn.Module] | None = None
    passes: Edit | None = None
    schedule: Schedule | Literal["auto", "across_steps"] | None = "auto"
    memory_bytes: int | str | None = None
    mixed_precision: MixedPrecision | None = None
    float8: Float8 | None = None
    offload: Literal["cpu"] | None = None
    keep_grads: bool = False
    on_nonfinite: OnNonfinite | None = None
    measure: bool = False
    count_expert_rows: bool = False
    progress: Progress | Literal["auto"] | None = "auto"
    timeout: float | str | None = "5min"
    agree_timeout: float | str = "2min"
    check_every: int = 1000
    verify: bool | Literal["auto"] = "auto"
    max_programs: int = 32
    dynamic: bool | Mapping[str, Sequence[int]] = True
    pad_to: PadTo | Sequence[PadTo] = ()
    hardware: Hardware | None = None
    device: str | None = None
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.timeout_s, self.agree_timeout_s
        if self.check_every < 0:
            raise PlanError(f"check_every={shown(self.check_every)}", "a number of calls, 0 for never", "correct it")
        if self.count_expert_rows and self.paddings:
            problem = "count_expert_rows with pad_to"
            raise PlanError(problem, "one of them: rows of padding would count", "leave out one")
        if self.max_recordings < 1:
            problem, needed = f"max_recordings={shown(self.max_recordings)}", "a number of recordings, 1 or more"
            raise PlanError(problem, needed, "correct it, or give cuda_graphs=False")
        if self.max_programs < 1:
            raise PlanError(f"max_programs={shown(self.max_programs)}", "a number of programs, 1 or more", "correct it")

    @property
    def paddings(self) -> tuple[PadTo, ...]:
        """`pad_to`, one for each length."""
        return (self.pad_to,) if isinstance(self.pad_to, PadTo) else tuple(self.pad_to)

    @property
    def timeout_s(self) -> float | None:
        """`timeout` in seconds."""
        return None if self.timeout is None else parse_seconds(self.timeout, "timeout")

    @property
    def agree_timeout_s(self) -> float:
        """`agree_timeout` in seconds."""
        return parse_seconds(self.agree_timeout, "agree_timeout")

    @property
    def verifies(self) -> bool | Literal["auto"]:
        """`verify`; the environment switches "auto" off."""
        return False if self.verify == "auto" and os.environ.get("WHOLESTEP_VERIFY") in ("0", "sizes") else self.verify

    @property
    def across_steps(self) -> bool:
        """True where the end of a step is left to the next call."""
        chosen = self.schedule
        return chosen.across_steps if isinstance(chosen, Schedule) else chosen == "across_steps"


@dataclass(frozen=True)
class StepOptions:
    """The options of one compiled step, resolved.

    `strategies`: as given; if `auto` (`Auto`, or the search for a number of micro-batches) chooses, the strategies that
    decide how ranks share batches. `plan`: the plan to apply. `may_regather`: a budget may re-gather parameters that
    the plan keeps gathered.
    """

    user: CompileOptions
    backend: Backend
    strategies: Strategies
    mesh: Mesh | None
    memory_bytes: int | None
    auto: Auto | PieceSearch | None
    plan: Plan | None
    may_regather: bool
    capture: CaptureOptions
    cache: Path | None

    @property
    def proves_sizes(self) -> bool:
        """Programs for all sizes are compared with what is planned for some: where a pass or a budget may differ."""
        requested = self.user.verify is True or os.environ.get("WHOLESTEP_VERIFY") == "sizes"
        return requested or self.user.passes is not None or self.memory_bytes is not None

    @staticmethod
    def of(user: CompileOptions) -> StepOptions:
        """What follows from the options that were given, unless they contradict each other."""
        backend = backend_of(user.backend)
        _check_backend(backend, user)
        mesh = Mesh(user.mesh) if isinstance(user.mesh, str) else user.mesh
        budget = None if user.memory_bytes is None else parse_bytes(user.memory_bytes)
        plan = auto = None
        if isinstance(user.parallel, Plan):
            plan, (strategies, mesh) = user.parallel, _applied(user.parallel, mesh)
            if budget is None and plan.objective is not None:
                budget = plan.objective.budget_bytes
        elif not isinstance(user.parallel, Auto):
            strategies = compose(user.parallel)
        elif budget is not None:
            raise PlanError("memory_bytes with parallel=Auto(...)", "one budget", "give Auto(memory_bytes=...) alone")
        else:
            may_save = user.passes is None and backend.name != "inductor"  # a search puts passes before these
            auto = user.parallel if may_save else replace(user.parallel, saves=False)
            strategies, budget = auto.base(mesh), auto.budget_bytes
        if not isinstance(backend, Eager) or user.cuda_graphs is True:
            strategies = strategies.without_host_reads()
        if strategies.pipeline is not None and user.cuda_graphs is True:
            problem = f"cuda_graphs=True, but {STAGES_RUN_OP_BY_OP}"
            raise BackendError(problem, "one of them", 'leave out cuda_graphs=True: it is "auto"')
        if strategies.pipeline is not None and user.across_steps:
            needed = "a schedule within the step: collectives of a stage run while it waits for others"
            raise PlanError("a schedule across steps with Pipeline", needed, 'give schedule="auto"')
        cut = auto.micro_batches if auto is not None else strategies.micro_batches
        if cut is not None and cut.pieces == "auto" and backend.name == "inductor":
            problem, needed = "backend 'inductor' with MicroBatches('auto')", "a number: the search runs loops op by op"
            raise BackendError(problem, needed, 'give the number that backend="eager" finds')
        keeps = auto is None and strategies.options.reshard_after_forward is False
        if budget is not None:
            _refuse_beside_budget(user)
            strategies = _with_kept_gathers(strategies)
        chooser = _piece_search(strategies, budget, not keeps, user) if strategies.has_open_pieces else auto
        if mesh is not None:
            strategies.axes(refuse_time(mesh))
        elif (style := strategies.options.kind).grouped:
            needed = "a mesh of two axes"
            raise MeshError(f"style {style.name!r} without a mesh", needed, 'give mesh="replicate=2,shard=2", say')
        capture = CaptureOptions(
            mixed_precision=user.mixed_precision, float8=user.float8, offload=user.offload,
            fused=backend.fused_optimizers, keep_grads=user.keep_grads, skip_nonfinite=user.on_nonfinite is not None,
            module_overrides=user.module_overrides or {}, model=user.model, optimizer=user.optimizer,
            device=user.device,
        )  # fmt: skip
        may_regather, cache = keeps if plan is not None else not keeps, folder_of(user.cache)
        return StepOptions(user, backend, strategies, mesh, budget, chooser, plan, may_regather, capture, cache)


STAGES_RUN_OP_BY_OP = "stages of a pipeline run op by op: Python orders their blocks and messages"


def _check_backend(backend: Backend, options: CompileOptions) -> None:
    if options.across_steps and not backend.splits_steps:
        problem = f"backend {backend.name!r} cannot leave collectives to the next call"
        needed = "one with splits_steps, as 'eager', for a schedule across steps"
        raise BackendError(problem, needed, 'use schedule="auto", or backend="eager"')
    if options.cuda_graphs is True and (why := not_recorded(backend, options)):
        raise BackendError(f"cuda_graphs=True, but {why}", "one of them", 'leave out cuda_graphs=True: it is "auto"')
    if options.measure and not backend.times_nodes:
        problem = f"measure=True with backend {backend.name!r}, which does not time nodes"
        raise BackendError(problem, "one with times_nodes", 'leave out measure=True, or use backend="eager"')


def not_recorded(backend: Backend, options: CompileOptions) -> str:
    """Why these options leave nothing to record as a CUDA graph, or ''."""
    if not backend.recordable:
        return f"backend {backend.name!r} is not recordable"
    if options.measure:
        return "measure=True times the ops of each call"
    return "a schedule across steps leaves collectives to the next call" if options.across_steps else ""


def _refuse_beside_budget(options: CompileOptions) -> None:
    """Raise PlanError for offload, or a schedule across steps: their memory is not counted."""
    if options.across_steps:
        raise PlanError("memory_bytes with a schedule across steps", "one of them", 'give schedule="auto"')
    if options.offload is not None:
        raise PlanError(f"memory_bytes with offload={options.offload!r}", "one of them", "drop memory_bytes")


def _with_kept_gathers(strategies: Strategies) -> Strategies:
    """The same with gathered parameters kept, unless `reshard_after_forward` is given: the budget decides. Nothing is
    gathered again in stages.
    """
    data = strategies.data
    if strategies.pipeline is not None or data is None or data.reshard_after_forward is not None:
        return strategies
    keeping = replace(data, reshard_after_forward=False)
    return Strategies(tuple(keeping if part is data else part for part in strategies.parts))


def _piece_search(
    strategies: Strategies, budget: int | None, may_regather: bool, options: CompileOptions
) -> PieceSearch:  # fmt: skip
    """What chooses the number of micro-batches. Raises PlanError: without a budget, or layouts are to be found too."""
    if budget is None:
        assert strategies.pieces, "it raises"
    if strategies.open_parts:
        problem, needed = 'MicroBatches("auto") with TensorParallel("auto")', "one of them to choose"
        raise PlanError(problem, needed, 'give Auto(tensor=TensorParallel("auto"), micro_batches=...), or a number')
    return PieceSearch(strategies, budget or 0, may_regather, options.hardware)


def _applied(plan: Plan, mesh: Mesh | None) -> tuple[Strategies, Mesh]:
    """The strategies and the mesh of a plan that is applied; `mesh` is what was given beside it."""
    check_form(plan)
    if plan.strategies is None:
        problem = f"the plan does not hold what made it ({plan.strategy})"
        needed = "one of wholestep's own strategies, in a file that this version writes"
        raise PlanError(problem, needed, "give the strategy as parallel=")
    ranks = plan.mesh.of_ranks
    if mesh is not None and mesh != ranks:
        raise MeshError(f"mesh {mesh} with a plan for {ranks}", "the plan's mesh", "leave out mesh=, or plan again")
    return plan.strategies, ranks
