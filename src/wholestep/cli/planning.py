"""The work of `wholestep plan`, `simulate` and `diff` once their options are parsed: capture, choose, show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import wholestep as ws
from wholestep.cost.reserved import reserved_bytes
from wholestep.mesh import STAGES
from wholestep.passes.base import Pass
from wholestep.plan.strategy import Strategy
from wholestep.planner import batch_sizes, search_result
from wholestep.planner.ahead import usable_cores
from wholestep.planner.bounds import Costs, costs, costs_from
from wholestep.planner.candidates import batches, templates
from wholestep.planner.recompute_kinds import passes_of
from wholestep.planner.search_result import SearchResult
from wholestep.planner.short_steps import ShortSteps
from wholestep.report import what_if
from wholestep.report.compare import PlanRow, as_json, compare, show
from wholestep.report.figures import Figures
from wholestep.report.page import program, step_of
from wholestep.report.what_if import WhatIf, WhatIfCase
from wholestep.units import parse_bytes

from .device_memory import within_device
from .hf import ModelSpec, build, tokens_of
from .screen import Screen
from .shared_options import SharedOptions
from .target import FULLY_SHARD, ZERO1, Target, hardware_of, refuse, write_output


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
    def strategies(self) -> list[Strategy]:
        """Data parallelism on the axes besides tensor parallelism and stages. Raises why the model has no plan for
        tensor parallelism.
        """
        if isinstance(self.tensor, ws.WholestepError):
            raise self.tensor
        style: Any = style_of(self.options, self.mesh)
        if self.tensor is None and self.pipeline is None:
            return [replace(self.data, style=style)]
        used = {self.options.tp_axis if self.tensor is not None else "", STAGES}
        others = tuple(name for name in ws.Mesh(self.mesh).names if name not in used)
        data: list[Strategy] = [replace(self.data, style=style, axis=others)] if others else []
        return [*data, *filter(None, (self.pipeline, self.tensor))]

    def passes_on(self, hardware: ws.Hardware, tensor_bytes: int | None = None) -> tuple[Pass, ...]:
        """The passes that programs go through, with those of `--recompute`, which fits tensors into so many bytes."""
        memory, stack = tensor_bytes or self.options.memory, self.options.software.stack
        return passes_of(self.options.recomputes(), hardware, memory, stack)

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
class Done:
    """The text of a command, and what it may write: the plan of `graph`, the rows of a comparison. A comparison of
    pipelines plans none with all layers. `tensor_bytes`: that recomputation fits tensors into.
    """

    text: str
    target: Target
    graph: ws.TrainGraph | None
    plan: ws.Plan | None
    rows: Sequence[PlanRow] = ()
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
            refuse("--html, --trace and --what-if need a plan: no template has one")
        return self.plan

    @property
    def planned(self) -> ws.TrainGraph:
        """The graph of the plan."""
        assert self.graph is not None, "there is a plan"
        return self.graph


def request(
    found: Target, mesh: str, hardware: ws.Hardware, planned_on: ws.Hardware | None, step: SharedOptions,
    own_plan: bool = True, **asked: Any,
) -> PlanRequest:  # fmt: skip
    """The request with tensor parallelism by `--tp`; else by the model's `own_plan` where the mesh has the axis."""
    own = mesh if own_plan else ""
    tensor = tensor_parallel(found, step.tp or [], step.tp_axis, own, hardware, step.async_tp, step.tp_regather)
    return PlanRequest(found, mesh, hardware, planned_on, step, tensor, **asked)


def style_of(step: SharedOptions, mesh: str) -> str:
    """The data-parallel style; beside a pipeline by default one that gathers nothing while pieces run."""
    return (step.style or (ZERO1 if STAGES in ws.Mesh(mesh).names else FULLY_SHARD)).value


def capture(
    shown: Screen, target: Target, stage: str = "capture", options: ws.CaptureOptions | None = None
) -> ws.TrainGraph:
    """The step as one graph."""
    with shown.stage(stage) as details:
        graph = ws.capture(target.step, *target.args, options=options, **target.kwargs)
        details.append(f"{len(graph.graph.nodes):,} operations")
        return graph


def captured(shown: Screen, asked: PlanRequest, stage: str = "capture") -> ws.TrainGraph:
    """The step of a request as one graph, in its precision."""
    target, hardware = asked.target, asked.hardware
    return captured_of(shown, target, hardware, asked.options.capture_options(target, hardware), stage)


def captured_of(
    shown: Screen, target: Target, hardware: ws.Hardware, options: ws.CaptureOptions, stage: str = "capture"
) -> ws.TrainGraph:
    """Of a model of `--hf` from few of its layers where all are equal."""
    make, model = target.with_layers, target.args[0]
    layers = None if make is None else getattr(model.config, "num_hidden_layers", None)
    if make is None or not isinstance(layers, int):
        return capture(shown, target, stage, options)

    def short(_batch: int, _pieces: int, count: int) -> ws.TrainGraph:
        some = target if count == layers else make(count)
        return ws.capture(some.step, *some.args[:2], target.args[2], options=options)

    with shown.stage(stage) as details:
        graph = ShortSteps(short, layers, hardware, model=model).whole_step(1)
        details.append(f"{len(graph.graph.nodes):,} operations")
    return graph


def chooser(shown: Screen, asked: PlanRequest, constraints: dict[str, Any]) -> ws.Auto:
    """What chooses; a model without a plan for tensor parallelism is planned without."""
    tensor, data = asked.tensor, asked.data
    if isinstance(tensor, ws.WholestepError):
        shown.note(f"without tensor parallelism: {tensor.found}")
    used = tensor if isinstance(tensor, ws.TensorParallel) else None
    refits = asked.options.recomputes("auto") == "auto"
    if asked.pipeline is not None:
        constraints = {**constraints, "pipeline": asked.options.open_pipeline()}
    return ws.Auto(asked.options.memory, asked.hardware, used, data, recompute=refits, **constraints)


def planned(shown: Screen, asked: PlanRequest) -> Done:
    """The plan of one style; where the user named the hardware, with its figures."""
    strategies = asked.strategies
    graph = captured(shown, asked)
    with shown.stage("plan"):
        made = ws.plan(graph, asked.mesh, strategies, hardware=asked.planned_on)
    text, fitted = "\n".join([str(made), *asked_of(shown, made, graph, asked)]), None
    if asked.planned_on is not None:
        with shown.stage("simulate"):
            local = ws.partition(graph, made)

            def attempt(tensor_bytes: int | None) -> tuple[Costs, int | None]:
                passes = asked.passes_on(asked.hardware, tensor_bytes)
                return costs(local, made, asked.hardware, passes, asked.options.software), tensor_bytes

            found, fitted = within_device(shown, asked.fitted_bytes, attempt, lambda one: one[0].reserved_bytes)
        text += f"\n\non {asked.on}\n{asked.figures(found, made.mesh, batches_of(made))}"
    return Done(text, asked.target, graph, made, tensor_bytes=fitted)


def chosen(
    shown: Screen, asked: PlanRequest, auto: ws.Auto, sizes: tuple[int, ...] | None, spec: ModelSpec | None
) -> tuple[Done, ModelSpec | None]:
    """The candidates of `auto` as a table, and the best plan; with several `sizes`, the model with the best batch."""
    graph, passes = captured(shown, asked), searched_passes(asked)
    if sizes is not None and len(sizes) != 1 and spec is not None:
        return _chosen_by_batch(shown, asked, auto, sizes, spec, graph)
    known = len(auto.candidates(ws.Mesh(asked.mesh))) if auto.pipeline is None else 0

    def attempt(tensor_bytes: int | None) -> SearchResult:
        with shown.each(known) as watch:
            within, software = replace(auto, memory_bytes=tensor_bytes), asked.options.software
            return within.search(graph, asked.mesh, watch=watch, passes=passes, software=software, cores=usable_cores())

    found = within_device(shown, auto.budget_bytes, attempt, _reserved_by_best)
    return _search_done(shown, found, graph, asked, f"{asked.target.name} on mesh {asked.mesh}"), spec


def _chosen_by_batch(
    shown: Screen, asked: PlanRequest, auto: ws.Auto, sizes: tuple[int, ...], spec: ModelSpec, first: ws.TrainGraph
) -> tuple[Done, ModelSpec]:
    """The best plan of the fastest size, below a table of all sizes. `first` is the graph of the first size."""
    targets, graphs = {spec.batch: asked.target}, {spec.batch: first}

    def of_size(size: int) -> ws.TrainGraph:
        if size in graphs:
            return graphs[size]
        targets[size] = build(replace(spec, batch=size))
        return captured(shown, replace(asked, target=targets[size]), f"capture batch {size}")

    def attempt(tensor_bytes: int | None) -> batch_sizes.BatchSearch:
        with shown.each(0) as watch:
            return batch_sizes.search_batches(
                replace(auto, memory_bytes=tensor_bytes), of_size, asked.mesh, sizes or None, watch=watch,
                passes=searched_passes(asked), software=asked.options.software,
            )  # fmt: skip

    best = within_device(shown, auto.budget_bytes, attempt, lambda one: _reserved_by_best(one.found))
    head = (
        f"{asked.target.name} on mesh {asked.mesh}, by batch\n{batch_sizes.show(best)}\n\nwith batches of {best.batch}"
    )
    done = _search_done(shown, best.found, best.graph, replace(asked, target=targets[best.batch]), head)
    return done, replace(spec, batch=best.batch)


def _reserved_by_best(found: SearchResult) -> int | None:
    return None if found.best.costs is None else found.best.costs.reserved_bytes


def compared(shown: Screen, asked: PlanRequest) -> Done:
    """All templates as a table, and the plan of the fastest."""
    on, name = ws.Mesh(asked.mesh), asked.target.name
    among = templates(on, asked.tensor, asked.options.tp_axis, asked.data)
    graph = captured(shown, asked)
    with shown.each(len(among)) as watch:
        passes = asked.passes_on(asked.hardware)
        rows = compare(graph, on, among, asked.hardware, watch, passes, asked.options.software)
    best = next((one.strategies for one in among if rows[0].costs is not None and one.name == rows[0].name), None)
    made = ws.plan(graph, on, list(best), hardware=asked.hardware) if isinstance(best, tuple) else None
    table = json.dumps(as_json(rows, on, name, asked.hardware), indent=1) + "\n"
    text = f"{name} on mesh {on}\n{show(rows, batch_tokens=asked.batch_tokens, ranks=on.size)}"
    if rows[0].costs is not None:
        text += f"\n\n{rows[0].name} on {asked.on}\n{asked.figures(rows[0].costs, on, rows[0].batches)}"
    return Done(text, asked.target, graph, made, rows, table)


def tensor_parallel(
    target: Target,
    tp: Sequence[str],
    axis: str,
    mesh: str,
    hardware: ws.Hardware,
    async_tp: bool = False,
    again: bool = False,
) -> Strategy | ws.WholestepError | None:
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


def _search_done(shown: Screen, found: SearchResult, graph: ws.TrainGraph, asked: PlanRequest, head: str) -> Done:
    """The report of a search, below `head`."""
    made, best = search_result.explained(found), found.best
    parts = [head, search_result.show(found)]
    if best.costs is not None:
        figures = asked.figures(best.costs, best.mesh, best.batches)
        parts.append(f"\n{best.name} on {best.mesh}, {asked.on}\n{figures}")
    return Done("\n".join([*parts, f"\n{made}", *asked_of(shown, made, graph, asked)]), asked.target, graph, made)


def searched_passes(asked: PlanRequest) -> tuple[Pass, ...] | None:
    """The passes of a search: it fits candidates into the memory itself, so `auto` adds none."""
    return None if asked.options.recomputes("auto") == "auto" else asked.passes_on(asked.hardware)


def asked_of(shown: Screen, plan: ws.Plan, graph: ws.TrainGraph, asked: PlanRequest) -> list[str]:
    """The texts of `--explain` and `--program`."""
    parts = [f"\n{plan.explain(name)}" for name in asked.explain]
    if asked.program:
        with shown.stage("partition"):
            local = ws.partition(graph, plan)
            if asked.stop_after:
                local = ws.run_passes(local, _until(asked.stop_after, asked.passes_on(asked.hardware)))
            parts.append(f"\n{local}")
    return parts


def _until(name: str, passes: Sequence[Pass]) -> Sequence[Pass]:
    """`passes` up to the last one with that name."""
    names = [type(one).__name__ for one in passes]
    if name not in names:
        refuse(f"--stop-after {name}: needed one of {', '.join(dict.fromkeys(names))}")
    return passes[: len(names) - names[::-1].index(name)]


def what_ifs(
    shown: Screen, cases: Sequence[str], asked: PlanRequest, done: Done, spec: ModelSpec | None
) -> list[WhatIf]:
    """Costs of the plan and of each case; by default twice and half the ranks."""
    made = [_case(shown, text, replace(asked, target=done.target), spec) for text in cases]
    with shown.stage("what if"):
        others = made or what_if.other_sizes(done.made.mesh)
        return what_if.what_if(done.made, done.planned, asked.hardware, others, asked.passes_on, asked.options.software)


def _case(shown: Screen, text: str, asked: PlanRequest, spec: ModelSpec | None) -> WhatIfCase:
    kind, _, value = text.partition("=")
    if kind == "mesh":
        return WhatIfCase(text, mesh=ws.Mesh(value))
    if kind == "hardware":
        return WhatIfCase(text, hardware=hardware_of(value))
    assert spec is not None, "checked before"
    other = build(replace(spec, batch=int(value)) if kind == "batch" else replace(spec, seq=int(value)))
    graph = captured(shown, replace(asked, target=other), f"capture {text}")
    return WhatIfCase(text, graph=graph, batch_parts=tokens_of(other) / tokens_of(asked.target))


def draw(
    shown: Screen, done: Done, asked: PlanRequest, html: Path | None, trace: Path | None, cases: Sequence[WhatIf]
) -> None:
    """Write the page and the trace, after a comparison of the fastest template."""
    hardware, software = asked.hardware, asked.options.software
    with shown.stage("simulate"):
        local = program(done.made, done.planned, hardware, asked.passes_on(hardware, done.tensor_bytes))
    chosen = done.rows[0].name if done.rows else ""
    page = partial(
        ws.report, model=done.target.name, alternatives=done.rows, chosen=chosen, what_if=cases,
        compiled=software.compiled, stack=software.stack, profile=software.profile,
    )  # fmt: skip
    write_output(shown, html, lambda path: page(path, done.made, local, hardware))
    write_output(shown, trace, lambda path: step_of(done.made, local, hardware, software)[0].save(path))


def simulated(shown: Screen, asked: PlanRequest) -> tuple[ws.Timeline, Figures]:
    """The timeline of one style, and its figures."""
    strategies, hardware, software = asked.strategies, asked.hardware, asked.options.software
    graph = captured(shown, asked)
    with shown.stage("plan"):
        planned = ws.plan(graph, asked.mesh, strategies, hardware=hardware)

    def attempt(tensor_bytes: int | None) -> tuple[ws.LocalGraph, int | None]:
        made = program(planned, graph, hardware, asked.passes_on(hardware, tensor_bytes))
        return made, reserved_bytes(made, hardware, software.stack)

    with shown.stage("schedule"):
        local, taken = within_device(shown, asked.fitted_bytes, attempt, itemgetter(1))
    with shown.stage("simulate"):
        made = software.timeline(local, hardware)
    found = replace(costs_from(local, planned, made.simulated, made.peak), reserved_bytes=taken)
    return made, asked.figures(found, planned.mesh, batches_of(planned))


def batches_of(plan: ws.Plan) -> int:
    """Captured batches in one step of the mesh."""
    return batches(plan.strategies, plan.mesh) if plan.strategies else 1


def costs_of(shown: Screen, target: Target, plans: Mapping[Path, ws.Plan], hardware: ws.Hardware) -> str:
    """A table of simulated costs with a row for each plan, of the step in its precision."""
    rows, graphs = list[PlanRow](), dict[ws.MixedPrecision | None, ws.TrainGraph]()
    for path, plan in plans.items():
        mixed, kernels = plan.mixed_precision, "cuda" if hardware.has_gpus else None
        if mixed not in graphs:
            options = ws.CaptureOptions(mixed_precision=mixed, kernels=kernels)
            graphs[mixed] = captured_of(shown, target, hardware, options)
        graph = graphs[mixed]
        with shown.stage(f"simulate {path}"):
            rows.append(PlanRow(str(path), batches_of(plan), costs(ws.partition(graph, plan), plan, hardware)))
    return show(rows, "plan")
