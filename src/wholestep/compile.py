"""`wholestep.compile`: the pipeline in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import nn
from torch.optim import Optimizer

from .auto.auto import Auto
from .backend.build import backend_of
from .backend.pipeline import Edit
from .backend.protocol import Backend
from .cache.step_cache import folder_of
from .capture.capture import capture_step
from .capture.capture_options import CaptureOptions
from .errors import MeshError, PlanError
from .graph.graph import TrainGraph
from .hardware.hardware import Hardware
from .mesh import Mesh
from .passes.schedule import Schedule
from .plan.plan import Plan
from .plan.strategy import Strategies, Strategy, compose
from .precision import MixedPrecision
from .runtime.compile_options import StepOptions
from .runtime.memory_budget import with_kept_gathers
from .runtime.progress import Progress
from .runtime.step import CompiledStep
from .units import parse_bytes


class _Options(TypedDict, total=False):
    parallel: Strategy | Sequence[Strategy] | Auto | Plan | None
    mesh: Mesh | str | None
    backend: Backend | str
    model: nn.Module | Sequence[nn.Module] | None
    optimizer: Optimizer | Sequence[Optimizer] | None
    module_overrides: Mapping[str, nn.Module] | None
    passes: Edit | None
    schedule: Schedule | Literal["auto", "across_steps"] | None
    memory_bytes: int | str | None
    mixed_precision: MixedPrecision | None
    offload: Literal["cpu"] | None
    keep_grads: bool
    measure: bool
    progress: Progress | Literal["auto"] | None
    agree_timeout: float
    check_every: int
    hardware: Hardware | None
    device: str | None
    cache: str | os.PathLike[str] | None


@overload
def compile(train_step: Callable[..., Any], **options: Unpack[_Options]) -> CompiledStep: ...
@overload
def compile(train_step: None = None, **options: Unpack[_Options]) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile(
    train_step: Callable[..., Any] | None = None,
    *,
    parallel: Strategy | Sequence[Strategy] | Auto | Plan | None = None,
    mesh: Mesh | str | None = None,
    backend: Backend | str = "eager",
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    module_overrides: Mapping[str, nn.Module] | None = None,
    passes: Edit | None = None,
    schedule: Schedule | Literal["auto", "across_steps"] | None = "auto",
    memory_bytes: int | str | None = None,
    mixed_precision: MixedPrecision | None = None,
    offload: Literal["cpu"] | None = None,
    keep_grads: bool = False,
    measure: bool = False,
    progress: Progress | Literal["auto"] | None = "auto",
    agree_timeout: float = 120.0,
    check_every: int = 1000,
    hardware: Hardware | None = None,
    device: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Compile a training step written for one device into what this rank of a mesh runs. Also a decorator.

    Args:
        train_step: the step: forward, backward, optimizer, on one device.
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

    Example:
        >>> step = wholestep.compile(train_step, parallel=wholestep.DataParallel("fully_shard"))
        >>> loss = step(model, optimizer, batch)

    Raises:
        PlanError, BackendError, MeshError, CacheError: an option is malformed; what depends on the model comes
            at the first call.
    """
    runs = backend_of(backend)
    capturing = CaptureOptions(
        mixed_precision=mixed_precision, offload=offload, fused=runs.fused_optimizers, keep_grads=keep_grads,
        module_overrides=module_overrides or {}, model=model, optimizer=optimizer, device=device,
    )  # fmt: skip
    chosen = _chosen(parallel, memory_bytes, Mesh(mesh) if isinstance(mesh, str) else mesh)
    strategies, most = chosen.strategies, chosen.memory_bytes
    keeps = strategies.options.reshard_after_forward is False
    gathers_again = keeps if chosen.plan is not None else not keeps
    options = StepOptions(
        strategies if most is None else with_kept_gathers(strategies, schedule, offload), chosen.mesh, runs,
        capturing, passes, measure, progress, agree_timeout, schedule, most, gathers_again, auto=chosen.auto,
        cache=folder_of(cache), plan=chosen.plan, check_every=check_every,
        hardware=hardware,
    )  # fmt: skip
    if options.mesh is not None:
        options.parallel.axes(options.mesh)
    elif options.parallel.options.style == "hybrid":
        raise MeshError("style 'hybrid' without a mesh", "a mesh of two axes", 'give mesh="replicate=2,shard=2", say')

    def decorate(fn: Callable[..., Any]) -> CompiledStep:
        return CompiledStep(fn, options)

    return decorate if train_step is None else decorate(train_step)


@dataclass(frozen=True)
class _Chosen:
    """What `parallel` says: strategies, those by which ranks share batches where `auto` is to choose; the bytes that
    they may take; the mesh; and the plan that is to be applied.
    """

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


def capture(fn: Callable[..., Any], *args: Any, options: CaptureOptions | None = None, **kwargs: Any) -> TrainGraph:
    """The graph of `fn(*args, **kwargs)` on one device; nothing real is computed or changed.

    The graph depends on `fn`, its arguments and `options`, on nothing else. With the options that `compile` is given,
    `plan`, `partition` and `pipeline` make the program that runs.

    Example:
        >>> options = wholestep.CaptureOptions(offload="cpu")
        >>> graph = wholestep.capture(train_step, model, optimizer, batch, options=options)
        >>> plan = wholestep.plan(graph, "dp=8")

    Raises:
        CaptureError: the step cannot become one graph.
    """
    return capture_step(fn, args, kwargs, options).graph
