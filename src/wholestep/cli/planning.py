"""The work of `wholestep plan` and `simulate` once their options are parsed: capture, choose, show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import wholestep as ws
from wholestep.cost.reserved import reserved_bytes
from wholestep.cost.timeline import timeline as predict_timeline
from wholestep.graph.text import human
from wholestep.mesh import CONTEXT, STAGES
from wholestep.passes.base import Pass
from wholestep.plan.strategy import Strategy
from wholestep.planner import search_result
from wholestep.planner.bounds import Costs, costs, costs_from
from wholestep.planner.candidates import batches, is_open, templates
from wholestep.planner.folded_step import FoldedStep, from_few_layers
from wholestep.planner.recompute_kinds import passes_of
from wholestep.planner.search_result import Candidate, SearchResult
from wholestep.report.compare import as_json, compare, show
from wholestep.report.figures import Figures
from wholestep.report.page import program, step_of
from wholestep.units import parse_bytes

from .hf import tokens_of
from .screen import Screen
from .shared_options import Attention, SharedOptions
from .target import FULLY_SHARD, ZERO1, Target, refuse, write_output

T = TypeVar("T")
_TRIES = 3  # with less for tensors each time: blocks are packed otherwise


@dataclass(frozen=True)
class PlanRequest:
    """A step, its hardware, and what to print.

    `hardware` prices layouts, if the user named it. `tensor`: tensor parallelism on the axis of `--tp-axis`, or the
    error why the model has none. `stop_after`: the pass after which the program is printed.
    """

    target: Target
    mesh: str
    hardware: ws.Hardware
    planned_on: ws.Hardware | None
    options: SharedOptions
    tensor: Strategy | ws.WholestepError | None
    explain: Sequence[str] = ()
    program: bool = False
    stop_after: str | None = None

    @property
    def data(self) -> ws.DataParallel:
        """Data parallelism with the options that are not searched."""
        return ws.DataParallel(semantics=cast(Any, self.options.semantics.value))

    @property
    def pipeline(self) -> ws.Pipeline | None:
        """The pipeline, where the mesh has an axis of stages."""
        on = ws.Mesh(self.mesh)
        return self.options.pipeline(on.axis_size(STAGES)) if STAGES in on.names else None

    @property
    def context(self) -> ws.ContextParallel | None:
        """Context parallelism, where the mesh has its axis, or a search may give it one."""
        method, on = self.options.cp, ws.Mesh(self.mesh)
        if method is None and CONTEXT not in on.names:
            return None
        return ws.ContextParallel(method=cast(Any, (method or Attention.auto).value))

    @property
    def strategies(self) -> list[Strategy]:
        """Data parallelism on the axes that tokens, stages and tensor parallelism leave. Raises why a model has no plan
        for the last.
        """
        if isinstance(self.tensor, ws.WholestepError):
            raise self.tensor
        style: Any = style_of(self.options, self.mesh)
        names = ws.Mesh(self.mesh).names
        if self.tensor is None and self.pipeline is None and self.context is None:
            return [replace(self.data, style=style), *self._experts(names)]
        used = {self.options.tp_axis if self.tensor is not None else "", STAGES, CONTEXT}
        axes = tuple(name for name in names if name not in used)
        data: list[Strategy] = [replace(self.data, style=style, axis=axes)] if axes else []
        experts = self._experts(axes or tuple(name for name in names if name != STAGES))
        return [*data, *filter(None, (self.pipeline, self.tensor, self.context)), *experts]

    def _experts(self, axes: Sequence[str]) -> list[ws.ExpertParallel]:
        method = self.options.experts
        return [ws.ExpertParallel(axis, cast(Any, method.value)) for axis in axes[:1]] if method is not None else []

    def passes_on(self, hardware: ws.Hardware, tensor_bytes: int | None = None) -> tuple[Pass, ...]:
        """The passes that programs go through, with those of `--recompute`, which fits tensors into so many bytes."""
        options, memory = self.options, tensor_bytes or self.options.memory
        return passes_of(
            options.recomputes(), hardware, memory, options.software, options.tile_rows, options.offload_saved
        )

    @property
    def fitted_bytes(self) -> int | None:
        """The memory of a device that `--recompute auto` fits a step into; None without it."""
        if self.options.recomputes() != "auto":
            return None
        return parse_bytes(self.options.memory) if self.options.memory else self.hardware.memory_bytes

    @property
    def on(self) -> str:
        """The hardware, and the software where that is not wholestep."""
        return f"{self.hardware}, {self.options.stack}" if self.options.stack else str(self.hardware)

    @property
    def batch_tokens(self) -> float | None:
        """Tokens in the captured batch; None where that is not known."""
        return float(tokens_of(self.target)) if self.options.hf is not None else self.options.batch_tokens

    def figures(self, costs: Costs, mesh: ws.Mesh, count: int) -> Figures:
        """Those of a step with `count` captured batches."""
        memory, tokens = self.options.memory, self.batch_tokens
        return Figures(
            costs, self.hardware, mesh.size, None if tokens is None else tokens * count,
            parse_bytes(memory) if memory else self.hardware.memory_bytes, self.options.wanted_tokens,
            self.options.gpu_hour,
        )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The text of a command, and what it may write: the plan of `graph`, the rows of a comparison. A comparison of
    pipelines plans none with all layers. `tensor_bytes`: that recomputation fits tensors into.
    """

    text: str
    target: Target
    graph: ws.TrainGraph | None
    plan: ws.Plan | None
    rows: Sequence[Candidate] = ()
    table: str = ""
    tensor_bytes: int | None = None

    @property
    def as_json(self) -> str:
        """The comparison, else the plan."""
        return self.table or (self.plan.to_json() if self.plan else "")

    @property
    def made(self) -> ws.Plan:
        """The plan; refuses where there is none."""
        if self.plan is None:
            refuse("--html and --trace need a plan: no template has one")
        return self.plan

    @property
    def planned(self) -> ws.TrainGraph:
        """The graph of the plan."""
        assert self.graph is not None, "there is a plan"
        return self.graph


def plan_request(
    target: Target, mesh: str, hardware: ws.Hardware, planned_on: ws.Hardware | None, step: SharedOptions,
    own_plan: bool = True, **printed: Any,
) -> PlanRequest:  # fmt: skip
    """The request with tensor parallelism by `--tp`; else by the model's `own_plan` where the mesh has the axis."""
    if step.cp and CONTEXT not in (on := ws.Mesh(mesh)).names and not is_open(on):
        refuse(f"--cp {step.cp} on mesh {mesh}: needed an axis cp, or auto=N")
    plan_mesh = mesh if own_plan else ""
    tensor = tensor_parallel(target, step.tp or [], step.tp_axis, plan_mesh, hardware, step.async_tp, step.tp_regather)
    return PlanRequest(target, mesh, hardware, planned_on, step, tensor, **printed)


def style_of(step: SharedOptions, mesh: str) -> str:
    """The data-parallel style; beside a pipeline by default one that gathers nothing while pieces run."""
    return (step.style or (ZERO1 if STAGES in ws.Mesh(mesh).names else FULLY_SHARD)).value


def capture(shown: Screen, target: Target, stage: str, options: ws.CaptureOptions) -> ws.TrainGraph:
    """The step as one graph."""
    with shown.stage(stage) as details:
        graph = ws.capture(target.step, *target.args, options=options, **target.kwargs)
        details.append(f"{len(graph.graph.nodes):,} operations")
        return graph


def captured(shown: Screen, request: PlanRequest) -> ws.TrainGraph:
    """The step of a request as one graph, in its precision; a model of `--hf` from few of its layers where all are
    equal.
    """
    target, hardware = request.target, request.hardware
    options = request.options.capture_options(target, hardware)
    make, model = target.with_layers, target.args[0]
    layers = None if make is None else getattr(model.config, "num_hidden_layers", None)
    if make is None or not isinstance(layers, int):
        return capture(shown, target, "capture", options)

    def short(count: int) -> ws.TrainGraph:
        some = target if count == layers else make(count)
        return ws.capture(some.step, *some.args[:2], target.args[2], options=options)

    with shown.stage("capture") as details:
        step = from_few_layers(short, layers, hardware, model=model)
        graph = step.with_blocks(step.count) if isinstance(step, FoldedStep) else step
        details.append(f"{len(graph.graph.nodes):,} operations")
    return graph


def chooser(shown: Screen, request: PlanRequest) -> ws.Auto:
    """What chooses; a model without a plan for tensor parallelism is planned without."""
    tensor, data = request.tensor, request.data
    if isinstance(tensor, ws.WholestepError):
        shown.note(f"without tensor parallelism: {tensor.found}")
    used = tensor if isinstance(tensor, ws.TensorParallel) else None
    refits = request.options.recomputes("auto") == "auto"
    pipeline = None if request.pipeline is None else request.options.pipeline()
    return ws.Auto(
        request.options.memory, request.hardware, used, data, pipeline=pipeline, recompute=refits,
        context=request.context,
    )  # fmt: skip


def planned(shown: Screen, request: PlanRequest) -> Report:
    """The plan of one style; where the user named the hardware, with its figures."""
    strategies = request.strategies
    graph = captured(shown, request)
    with shown.stage("plan"):
        plan = ws.plan(graph, request.mesh, strategies, hardware=request.planned_on)
    text, fitted = "\n".join([str(plan), *asked_of(shown, plan, graph, request)]), None
    if request.planned_on is not None:
        with shown.stage("simulate"):
            local = ws.partition(graph, plan)

            def attempt(tensor_bytes: int | None) -> tuple[Costs, int | None]:
                passes = request.passes_on(request.hardware, tensor_bytes)
                return costs(local, plan, request.hardware, passes, request.options.software), tensor_bytes

            priced, fitted = within_device(shown, request.fitted_bytes, attempt, lambda pair: pair[0].reserved_bytes)
        text += f"\n\non {request.on}\n{request.figures(priced, plan.mesh, batches_of(plan))}"
    return Report(text, request.target, graph, plan, tensor_bytes=fitted)


def chosen(shown: Screen, request: PlanRequest, auto: ws.Auto) -> Report:
    """The candidates of `auto` as a table, and the best plan."""
    graph, passes, mesh = captured(shown, request), searched_passes(request), request.mesh
    count = len(auto.candidates(ws.Mesh(request.mesh))) if auto.pipeline is None else 0

    def attempt(tensor_bytes: int | None) -> SearchResult:
        with shown.each(count) as watch:
            within, software = replace(auto, memory_bytes=tensor_bytes), request.options.software
            return within.search(graph, mesh, watch=watch, passes=passes, software=software)

    search = within_device(
        shown, auto.budget_bytes, attempt, lambda tried: tried.best.costs and tried.best.costs.reserved_bytes
    )
    return _search_done(shown, search, graph, request)


def compared(shown: Screen, request: PlanRequest) -> Report:
    """All templates as a table, and the plan of the fastest."""
    on, name = ws.Mesh(request.mesh), request.target.name
    among = templates(on, request.tensor, request.options.tp_axis, request.data, context=request.context)
    graph = captured(shown, request)
    with shown.each(len(among)) as watch:
        passes = request.passes_on(request.hardware)
        rows = compare(graph, on, among, request.hardware, watch, passes, request.options.software)
    best = next((template.strategies for template in among if rows[0].costs and template.name == rows[0].name), None)
    plan = ws.plan(graph, on, list(best), hardware=request.hardware) if isinstance(best, tuple) else None
    table = json.dumps(as_json(rows, on, name, request.hardware), indent=1) + "\n"
    text = f"{name} on mesh {on}\n{show(rows, batch_tokens=request.batch_tokens, ranks=on.size)}"
    if rows[0].costs is not None:
        text += f"\n\n{rows[0].name} on {request.on}\n{request.figures(rows[0].costs, on, rows[0].batches)}"
    return Report(text, request.target, graph, plan, rows, table)


def tensor_parallel(
    target: Target, tp: Sequence[str], axis: str, mesh: str, hardware: ws.Hardware, async_tp: bool = False,
    again: bool = False,
) -> Strategy | ws.WholestepError | None:  # fmt: skip
    """Tensor parallelism by `--tp`; by default the model's plan, if `mesh` has the axis or axes to choose. An error,
    which is not raised, if the model has no plan.
    """
    options: Any = {"async_tp": async_tp, "reshard_after_forward": again}
    if list(tp) == ["auto"]:
        return ws.TensorParallel("auto", axis=axis, hardware=hardware, **options)
    if not tp and (not mesh or {axis, "auto"}.isdisjoint(ws.Mesh(mesh).names)):
        if async_tp or again:
            name = "--async-tp" if async_tp else "--tp-regather"
            refuse(f"{name} without tensor parallelism: needed an axis of --tp")
        return None
    if not tp or list(tp) in (["model"], ["sequence"]):
        if list(tp) == ["sequence"]:
            options |= {"sequence": True, "loss_parallel": True}
        try:
            return ws.TensorParallel.of((*target.models(), cast(Any, None))[0], axis, **options)
        except ws.PlanError as error:
            return error
    pairs: dict[str, str] = {}
    for entry in tp:
        pattern, _, how = entry.rpartition("=")
        if not pattern:
            refuse(
                f"--tp {entry}: needed pattern=colwise, pattern=rowwise or the like, or model, sequence or auto alone"
            )
        pairs[pattern] = how
    return ws.TensorParallel(pairs, axis=axis, **options)


def _search_done(shown: Screen, search: SearchResult, graph: ws.TrainGraph, request: PlanRequest) -> Report:
    """The report of a search."""
    plan, best = search_result.explained(search), search.best
    parts = [f"{request.target.name} on mesh {request.mesh}", search_result.show(search)]
    if best.costs is not None:
        figures = request.figures(best.costs, best.mesh, best.batches)
        parts.append(f"\n{best.name} on {best.mesh}, {request.on}\n{figures}")
    parts += [f"\n{plan}", *asked_of(shown, plan, graph, request)]
    return Report("\n".join(parts), request.target, graph, plan)


def searched_passes(request: PlanRequest) -> tuple[Pass, ...] | None:
    """The passes of a search, which fits candidates into the memory itself; None for the standard ones."""
    options = request.options
    if options.recomputes("auto") != "auto":
        return request.passes_on(request.hardware)
    tiles, ahead = options.tile_rows, options.offload_saved
    if tiles == 1 and not ahead:
        return None
    return passes_of("none", request.hardware, software=options.software, tiles=tiles, offload_saved=ahead)


def asked_of(shown: Screen, plan: ws.Plan, graph: ws.TrainGraph, request: PlanRequest) -> list[str]:
    """The texts of `--explain` and `--program`."""
    parts = [f"\n{plan.explain(name)}" for name in request.explain]
    if request.program:
        with shown.stage("partition"):
            local = ws.partition(graph, plan)
            if request.stop_after:
                local = ws.run_passes(local, _until(request.stop_after, request.passes_on(request.hardware)))
            parts.append(f"\n{local}")
    return parts


def _until(name: str, passes: Sequence[Pass]) -> Sequence[Pass]:
    """`passes` up to the last one with that name."""
    names = [type(pass_).__name__ for pass_ in passes]
    if name not in names:
        refuse(f"--stop-after {name}: needed one of {', '.join(dict.fromkeys(names))}")
    return passes[: len(names) - names[::-1].index(name)]


def draw(shown: Screen, report: Report, request: PlanRequest, html: Path | None, trace: Path | None) -> None:
    """Write the page and the trace, after a comparison of the fastest template."""
    hardware, software = request.hardware, request.options.software
    with shown.stage("simulate"):
        local = program(report.made, report.planned, hardware, request.passes_on(hardware, report.tensor_bytes))
    chosen = report.rows[0].name if report.rows else ""
    page = partial(ws.report, model=report.target.name, alternatives=report.rows, chosen=chosen, software=software)
    write_output(shown, html, lambda path: page(path, report.made, local, hardware))
    write_output(shown, trace, lambda path: step_of(report.made, local, hardware, software)[0].save(path))


def simulated(shown: Screen, request: PlanRequest) -> tuple[ws.Timeline, Figures]:
    """The timeline of one style, and its figures."""
    strategies, hardware, software = request.strategies, request.hardware, request.options.software
    graph = captured(shown, request)
    with shown.stage("plan"):
        planned = ws.plan(graph, request.mesh, strategies, hardware=hardware)

    def attempt(tensor_bytes: int | None) -> tuple[ws.LocalGraph, int | None]:
        fitted = program(planned, graph, hardware, request.passes_on(hardware, tensor_bytes))
        return fitted, reserved_bytes(fitted, hardware, software)

    with shown.stage("schedule"):
        local, reserved = within_device(shown, request.fitted_bytes, attempt, itemgetter(1))
    with shown.stage("simulate"):
        timeline = predict_timeline(local, hardware, software)
    step_costs = replace(costs_from(local, planned, timeline.simulated, timeline.peak), reserved_bytes=reserved)
    return timeline, request.figures(step_costs, planned.mesh, batches_of(planned))


def batches_of(plan: ws.Plan) -> int:
    """Captured batches in one step of the mesh."""
    return batches(plan.strategies, plan.mesh) if plan.strategies else 1


def within_device(
    shown: Screen, memory_bytes: int | None, attempt: Callable[[int | None], T], reserved: Callable[[T], int | None]
) -> T:
    """What `attempt` makes of a budget for tensors with which it reserves no more than `memory_bytes`. Bytes that it
    reserves beyond them are taken off the budget. Where that does not help, or nothing says what is `reserved`, the
    first is returned: its figures say so.

    Raises:
        PlanError: nothing fits into `memory_bytes`, tensors alone.
    """
    first = latest = attempt(memory_bytes)
    budget = memory_bytes
    for _ in range(_TRIES):
        needs = reserved(latest)
        if memory_bytes is None or budget is None or needs is None or needs <= memory_bytes:
            return latest
        budget -= needs - memory_bytes
        shown.note(
            f"torch's allocator would reserve {human(needs)} of {human(memory_bytes)}: again with tensors within "
            f"{human(max(budget, 0))}"
        )
        try:
            latest = attempt(budget)
        except ws.PlanError:  # nothing fits, or nothing can be recomputed as much
            break
    needs = reserved(latest)
    fits = memory_bytes is None or needs is None or needs <= memory_bytes
    return latest if fits else first
