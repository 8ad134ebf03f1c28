"""The options of `wholestep.compile`, declared once, and what follows from them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..backend.build import backend_of
from ..backend.pipeline import Edit
from ..backend.protocol import Backend
from ..cache.step_cache import folder_of
from ..capture.capture_options import CaptureOptions
from ..errors import BackendError, MeshError, PlanError
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.schedule import Schedule
from ..plan.plan import Plan
from ..plan.strategies import Strategies, compose
from ..plan.strategy import Strategy
from ..planner.auto import Auto
from ..precision import MixedPrecision
from ..units import parse_bytes
from .memory_budget import with_kept_gathers
from .progress import Progress


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options of `compile`.

    Args:
        parallel: where tensors rest: a strategy, or several for different axes of the mesh, as in
            `[DataParallel("fully_shard", axis="dp"), TensorParallel({...}, axis="tp")]`. By default
            `DataParallel("fully_shard")`. `Auto(...)` chooses at the first call, by what the machine is measured to do.
            A `Plan`, as from `Plan.load("plan.json")`, is applied with its mesh and budget, to steps whose parameters
            are those it was made for.
        mesh: the ranks, e.g. `"dp=8"`; one axis over the whole job by default.
        backend: what runs the program of a rank: `"eager"` calls op after op; `"inductor"` compiles the arithmetic
            between collectives; `"cudagraphs"` records a step on a GPU and replays it; or an object of your own
            (`Backend`).
        model: modules that the step uses without being given them; those it closes over are found by themselves.
        optimizer: optimizers, likewise.
        module_overrides: submodules to swap for the time of the trace, by path (globs allowed).
        passes: from the list of passes that a program goes through (`pipeline`) to the one that it shall go through:
            `lambda passes: [mine, *passes]` runs a pass of your own first. Ranks must give the same.
        schedule: how collectives are merged and ordered. `"auto"` measures the machine and the link at the first call,
            in a fraction of a second; `"across_steps"` does too, and leaves the end of a step to the next call, or to
            `step.flush()`; `Schedule(...)` says how fast they are, or sets sizes; None leaves each collective where the
            partition puts it.
        memory_bytes: what the tensors of a rank may take at most, e.g. `"3GiB"`. To keep to it, the backward
            rematerializes activations and gathers parameters a second time, whichever costs less time. It replaces
            `keep_gathered_bytes`; an explicit `reshard_after_forward` is followed. None sets no bound.
        mixed_precision: dtypes in which modules compute and gradients are reduced.
        offload: `"cpu"` keeps parameters, gradients and optimizer state in host memory, where the update runs; shards
            go to the device to be gathered. On the CPU only the program changes.
        keep_grads: leave gradients in `param.grad` also when the step resets them at its start.
        measure: time what a step spends blocked on communication: `step.waited_seconds`, in seconds, of the last one.
        progress: called as `progress(stage, "start" | "done", seconds)`. `"auto"` shows what is being done in one
            line of the first rank's terminal, where compiling takes more than two seconds; None, or
            WHOLESTEP_PROGRESS=0, shows nothing.
        agree_timeout: seconds to wait for the other ranks to compile their program.
        check_every: after so many calls, ranks compare a checksum of what should be equal on them (parameters,
            optimizer state, options of optimizers); 0 for never.
        hardware: what plans and schedules are made for. By default layouts are priced on one host, so that every start
            makes the same program, and the schedule on the machine as it is measured.
        device: where the step runs; by default where the model is (cpu for a model on `meta`).
        cache: a folder for what the first call measures and searches for: the speed of the machine, what `Auto`
            chooses, layouts that are solved for, tensors that a budget rematerializes. A later start of the same step
            reads them. By default what WHOLESTEP_CACHE says; "" for none.

    Raises:
        PlanError, BackendError: an option is malformed.
    """

    parallel: Strategy | Sequence[Strategy] | Auto | Plan | None = None
    mesh: Mesh | str | None = None
    backend: Backend | str = "eager"
    model: nn.Module | Sequence[nn.Module] | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    module_overrides: Mapping[str, nn.Module] | None = None
    passes: Edit | None = None
    schedule: Schedule | Literal["auto", "across_steps"] | None = "auto"
    memory_bytes: int | str | None = None
    mixed_precision: MixedPrecision | None = None
    offload: Literal["cpu"] | None = None
    keep_grads: bool = False
    measure: bool = False
    progress: Progress | Literal["auto"] | None = "auto"
    agree_timeout: float = 120.0
    check_every: int = 1000
    hardware: Hardware | None = None
    device: str | None = None
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in ("auto", "across_steps"):
            found, one_of = f"schedule={self.schedule!r} is unknown", "'auto', 'across_steps', a Schedule or None"
            raise PlanError(found, one_of, "correct it")
        if self.check_every < 0:
            raise PlanError(f"check_every={self.check_every}", "a number of calls, 0 for never", "correct it")

    @staticmethod
    def of(given: Mapping[str, Any]) -> CompileOptions:
        """Options by name.

        Raises:
            PlanError: a name is unknown.
        """
        names = [field.name for field in fields(CompileOptions)]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                next_step = f"write {near[0]}=" if near else "leave it out"
                raise PlanError(f"compile has no option {name!r}", f"one of {', '.join(names)}", next_step)
        return CompileOptions(**given)


@dataclass(frozen=True)
class StepOptions:
    """The options of one compiled step, resolved.

    `strategies` are those by which ranks share batches where `auto` is to choose; `plan` is applied where there is
    one. `gathers_again` is true where parameters that are kept gathered may be gathered again to fit into memory.
    """

    given: CompileOptions
    backend: Backend
    strategies: Strategies
    mesh: Mesh | None
    memory_bytes: int | None
    auto: Auto | None
    plan: Plan | None
    gathers_again: bool
    capture: CaptureOptions
    cache: Path | None

    @staticmethod
    def of(given: CompileOptions) -> StepOptions:
        """What follows from the options that were given.

        Raises:
            PlanError, MeshError, BackendError, CacheError: they contradict each other.
        """
        backend = backend_of(given.backend)
        _check_backend(backend, given)
        mesh = Mesh(given.mesh) if isinstance(given.mesh, str) else given.mesh
        chosen = _chosen(given.parallel, given.memory_bytes, mesh)
        keeps = chosen.strategies.options.reshard_after_forward is False
        budgeted = chosen.memory_bytes is not None
        strategies = (
            with_kept_gathers(chosen.strategies, given.schedule, given.offload) if budgeted else chosen.strategies
        )
        if chosen.mesh is not None:
            strategies.axes(chosen.mesh)
        elif (style := strategies.options.kind).grouped:
            needed = "a mesh of two axes"
            raise MeshError(f"style {style.name!r} without a mesh", needed, 'give mesh="replicate=2,shard=2", say')
        capture = CaptureOptions(
            mixed_precision=given.mixed_precision,
            offload=given.offload,
            fused=backend.fused_optimizers,
            keep_grads=given.keep_grads,
            module_overrides=given.module_overrides or {},
            model=given.model,
            optimizer=given.optimizer,
            device=given.device,
        )
        return StepOptions(
            given,
            backend,
            strategies,
            chosen.mesh,
            chosen.memory_bytes,
            chosen.auto,
            chosen.plan,
            gathers_again=keeps if chosen.plan is not None else not keeps,
            capture=capture,
            cache=folder_of(given.cache),
        )

    @property
    def planned_on(self) -> Hardware | None:
        """The hardware that layouts are priced on: that of a plan that is applied, or as given."""
        return self.plan.hardware if self.plan is not None else self.given.hardware


def _check_backend(backend: Backend, given: CompileOptions) -> None:
    across = given.schedule == "across_steps" or (isinstance(given.schedule, Schedule) and given.schedule.across_steps)
    if across and not backend.splits_steps:
        raise BackendError(
            f"backend {backend.name!r} cannot leave collectives to the next call",
            "one with splits_steps, as 'eager', for a schedule across steps",
            'use schedule="auto", or backend="eager"',
        )
    if given.measure and not backend.times_nodes:
        raise BackendError(
            f"measure=True with backend {backend.name!r}, which does not time nodes",
            "one with times_nodes",
            'leave out measure=True, or use backend="eager"',
        )


@dataclass(frozen=True)
class _Chosen:
    """What `parallel` decides."""

    strategies: Strategies
    memory_bytes: int | None = None
    mesh: Mesh | None = None
    auto: Auto | None = None
    plan: Plan | None = None


def _chosen(
    parallel: Strategy | Sequence[Strategy] | Auto | Plan | None, memory_bytes: int | str | None, mesh: Mesh | None
) -> _Chosen:
    most = None if memory_bytes is None else parse_bytes(memory_bytes)
    if isinstance(parallel, Plan):
        return _applied(parallel, most, mesh)
    if not isinstance(parallel, Auto):
        return _Chosen(compose(parallel), most, mesh)
    if most is not None:
        raise PlanError("memory_bytes with parallel=Auto(...)", "one budget", "give Auto(memory_bytes=...) alone")
    return _Chosen(parallel.base(mesh), parallel.budget_bytes, mesh, parallel)


def _applied(plan: Plan, most: int | None, mesh: Mesh | None) -> _Chosen:
    if plan.strategies is None:
        raise PlanError(
            f"the plan does not hold what made it ({plan.strategy})",
            "one of wholestep's own strategies, in a file that this version writes",
            "give the strategy as parallel=",
        )
    if mesh is not None and mesh != plan.mesh:
        raise MeshError(f"mesh {mesh} with a plan for {plan.mesh}", "the plan's mesh", "leave out mesh=, or plan again")
    if most is None and plan.objective is not None:
        most = plan.objective.budget_bytes
    return _Chosen(plan.strategies, most, plan.mesh, plan=plan)
