"""The work of `wholestep plan`, `simulate` and `diff` once their options are parsed: capture, choose, show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import wholestep as ws
from wholestep.passes.base import Pass
from wholestep.plan.strategy import Strategy
from wholestep.planner import batch_sizes, search_result
from wholestep.planner.bounds import costs
from wholestep.planner.candidates import batches, templates
from wholestep.planner.search_result import SearchResult
from wholestep.report import what_if
from wholestep.report.compare import PlanRow, as_json, compare, show
from wholestep.report.page import program
from wholestep.report.what_if import WhatIf, WhatIfCase

from .hf import ModelSpec, build
from .screen import Screen
from .target import Style, Target, hardware_of, refuse, write_output


@dataclass(frozen=True)
class PlanRequest:
    """A step, its hardware, and what to print.

    `hardware` prices layouts, if the user named it. `tensor`: tensor parallelism on `tp_axis`, or the error why the
    model has none. `stop_after`: the pass after which the program is printed.
    """

    target: Target
    mesh: str
    hardware: ws.Hardware
    planned_on: ws.Hardware | None
    semantics: Literal["per_rank", "global"]
    tensor: Strategy | ws.WholestepError | None
    tp_axis: str
    explain: Sequence[str] = ()
    program: bool = False
    stop_after: str | None = None


@dataclass(frozen=True)
class Done:
    """The text of a command, and what it may write: the plan of `graph`, the rows of a comparison."""

    text: str
    target: Target
    graph: ws.TrainGraph
    plan: ws.Plan | None
    rows: Sequence[PlanRow] = ()
    table: str = ""

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


def capture(
    shown: Screen, target: Target, hardware: ws.Hardware, stage: str = "capture", float8: ws.Float8 | None = None
) -> ws.TrainGraph:
    """The step as one graph, with the kernels that run on `hardware`."""
    with shown.stage(stage) as details:
        options = ws.CaptureOptions(float8=float8, kernels="cuda" if hardware.has_gpus else None)
        graph = ws.capture(target.step, *target.args, options=options, **target.kwargs)
        details.append(f"{len(graph.graph.nodes):,} operations")
        return graph


def chooser(shown: Screen, asked: PlanRequest, memory: str | None, constraints: dict[str, Any]) -> ws.Auto:
    """What chooses; a model without a plan for tensor parallelism is planned without."""
    tensor, data = asked.tensor, ws.DataParallel(semantics=asked.semantics)
    if isinstance(tensor, ws.WholestepError):
        shown.note(f"without tensor parallelism: {tensor.found}")
    used = tensor if isinstance(tensor, ws.TensorParallel) else None
    return ws.Auto(memory, asked.hardware, used, data, **constraints)


def planned(shown: Screen, asked: PlanRequest, style: Style) -> Done:
    """The plan of one style."""
    strategies = _strategies(asked.mesh, style, asked.tensor, asked.tp_axis, asked.semantics)
    graph = capture(shown, asked.target, asked.hardware)
    with shown.stage("plan"):
        made = ws.plan(graph, asked.mesh, strategies, hardware=asked.planned_on)
    return Done("\n".join([str(made), *_asked_of(shown, made, graph, asked)]), asked.target, graph, made)


def chosen(
    shown: Screen, asked: PlanRequest, auto: ws.Auto, sizes: tuple[int, ...] | None, spec: ModelSpec | None
) -> tuple[Done, ModelSpec | None]:
    """The candidates of `auto` as a table, and the best plan; with several `sizes`, the model with the best batch."""
    graph = capture(shown, asked.target, asked.hardware)
    if sizes is not None and len(sizes) != 1 and spec is not None:
        return _chosen_by_batch(shown, asked, auto, sizes, spec, graph)
    with shown.each(len(auto.candidates(ws.Mesh(asked.mesh)))) as watch:
        found = auto.search(graph, asked.mesh, watch=watch)
    return _search_done(shown, found, graph, asked, f"{asked.target.name} on mesh {asked.mesh}"), spec


def _chosen_by_batch(
    shown: Screen, asked: PlanRequest, auto: ws.Auto, sizes: tuple[int, ...], spec: ModelSpec, first: ws.TrainGraph
) -> tuple[Done, ModelSpec]:
    """The best plan of the fastest size, below a table of all sizes. `first` is the graph of the first size."""
    targets, graphs = {spec.batch: asked.target}, {spec.batch: first}

    def captured(size: int) -> ws.TrainGraph:
        if size in graphs:
            return graphs.pop(size)
        targets[size] = build(replace(spec, batch=size))
        return capture(shown, targets[size], asked.hardware, f"capture batch {size}")

    with shown.each(0) as watch:
        best = batch_sizes.search_batches(auto, captured, asked.mesh, sizes or None, watch=watch)
    head = (
        f"{asked.target.name} on mesh {asked.mesh}, by batch\n{batch_sizes.show(best)}\n\nwith batches of {best.batch}"
    )
    done = _search_done(shown, best.found, best.graph, replace(asked, target=targets[best.batch]), head)
    return done, replace(spec, batch=best.batch)


def compared(shown: Screen, asked: PlanRequest) -> Done:
    """All templates as a table, and the plan of the fastest."""
    on, name = ws.Mesh(asked.mesh), asked.target.name
    among = templates(on, asked.tensor, asked.tp_axis, ws.DataParallel(semantics=asked.semantics))
    graph = capture(shown, asked.target, asked.hardware)
    with shown.each(len(among)) as watch:
        rows = compare(graph, on, among, asked.hardware, watch)
    best = next((one.strategies for one in among if rows[0].costs is not None and one.name == rows[0].name), None)
    made = ws.plan(graph, on, list(best), hardware=asked.hardware) if isinstance(best, tuple) else None
    table = json.dumps(as_json(rows, on, name, asked.hardware), indent=1) + "\n"
    return Done(f"{name} on mesh {on}\n{show(rows)}", asked.target, graph, made, rows, table)


def tensor_parallel(
    target: Target, tp: Sequence[str], axis: str, mesh: str, hardware: ws.Hardware, async_tp: str | None = None
) -> Strategy | ws.WholestepError | None:
    """Tensor parallelism by `--tp`; by default the model's plan, if `mesh` has the axis or axes to choose. An error,
    which is not raised, if the model has no plan.
    """
    options: Any = {"async_tp": str(async_tp) if async_tp else None}  # an enum on the command line
    if list(tp) == ["auto"]:
        return ws.TensorParallel("auto", axis=axis, hardware=hardware, **options)
    if not tp and (not mesh or {axis, "auto"}.isdisjoint(ws.Mesh(mesh).names)):
        if async_tp:
            refuse("--async-tp without tensor parallelism: needed an axis of --tp")
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
    made = search_result.explained(found)
    text = "\n".join([head, search_result.show(found), f"\n{made}", *_asked_of(shown, made, graph, asked)])
    return Done(text, asked.target, graph, made)


def _asked_of(shown: Screen, plan: ws.Plan, graph: ws.TrainGraph, asked: PlanRequest) -> list[str]:
    """The texts of `--explain` and `--program`."""
    parts = [f"\n{plan.explain(name)}" for name in asked.explain]
    if asked.program:
        with shown.stage("partition"):
            local = ws.partition(graph, plan)
            if asked.stop_after:
                local = ws.run_passes(local, _until(asked.stop_after, ws.pipeline(asked.hardware)))
            parts.append(f"\n{local}")
    return parts


def _until(name: str, passes: Sequence[Pass]) -> Sequence[Pass]:
    """`passes` up to the last one with that name."""
    names = [type(one).__name__ for one in passes]
    if name not in names:
        refuse(f"--stop-after {name}: needed one of {', '.join(dict.fromkeys(names))}")
    return passes[: len(names) - names[::-1].index(name)]


def _strategies(
    mesh: str, style: Style, tensor: Strategy | ws.WholestepError | None, tp_axis: str,
    semantics: Literal["per_rank", "global"] = "per_rank",
) -> list[Strategy]:  # fmt: skip
    """Data parallelism on the axes besides tensor parallelism. Raises the error of a model without a plan for it."""
    kind: Any = style.value
    if tensor is None:
        return [ws.DataParallel(kind, semantics=semantics)]
    if isinstance(tensor, ws.WholestepError):
        raise tensor
    others = tuple(name for name in ws.Mesh(mesh).names if name != tp_axis)
    data = [ws.DataParallel(kind, axis=others, semantics=semantics)] if others else []
    return [*data, tensor]


def what_ifs(
    shown: Screen, asked: Sequence[str], done: Done, hardware: ws.Hardware, spec: ModelSpec | None
) -> list[WhatIf]:
    """Costs of the plan and of each case; by default twice and half the ranks."""
    cases = [_case(shown, text, done.target, hardware, spec) for text in asked] or what_if.other_sizes(done.made.mesh)
    with shown.stage("what if"):
        return what_if.what_if(done.made, done.graph, hardware, cases)


def _case(shown: Screen, text: str, found: Target, hardware: ws.Hardware, spec: ModelSpec | None) -> WhatIfCase:
    kind, _, value = text.partition("=")
    if kind == "mesh":
        return WhatIfCase(text, mesh=ws.Mesh(value))
    if kind == "hardware":
        return WhatIfCase(text, hardware=hardware_of(value))
    assert spec is not None, "checked before"
    other = build(replace(spec, batch=int(value)) if kind == "batch" else replace(spec, seq=int(value)))
    tokens = [target.args[2]["tokens"].numel() for target in (other, found)]
    return WhatIfCase(text, graph=capture(shown, other, hardware, f"capture {text}"), batch_parts=tokens[0] / tokens[1])


def draw(
    shown: Screen, done: Done, hardware: ws.Hardware, html: Path | None, trace: Path | None, cases: Sequence[WhatIf]
) -> None:
    """Write the page and the trace, after a comparison of the fastest template."""
    with shown.stage("simulate"):
        local = program(done.made, done.graph, hardware)
    chosen = done.rows[0].name if done.rows else ""
    page = partial(ws.report, model=done.target.name, alternatives=done.rows, chosen=chosen, what_if=cases)
    write_output(shown, html, lambda path: page(path, done.made, local, hardware))
    write_output(shown, trace, lambda path: ws.timeline(local, hardware).save(path))


def simulated(
    shown: Screen,
    found: Target,
    mesh: str,
    style: Style,
    hardware: ws.Hardware,
    backend: str = "eager",
    float8: ws.Float8 | None = None,
    tp: Sequence[str] = (),
    async_tp: str | None = None,
) -> ws.Timeline:
    """The timeline of one style, with tensor parallelism along an axis `tp`: by default the model's own plan."""
    tensor = tensor_parallel(found, tp, "tp", mesh, hardware, async_tp)
    strategies = _strategies(mesh, style, tensor, "tp")
    graph = capture(shown, found, hardware, float8=float8)
    with shown.stage("plan"):
        planned = ws.plan(graph, mesh, strategies, hardware=hardware)
    with shown.stage("schedule"):
        local = program(planned, graph, hardware)
    with shown.stage("simulate"):
        return ws.timeline(local, hardware, compiled=backend == "inductor")


def costs_of(shown: Screen, graph: ws.TrainGraph, plans: Mapping[Path, ws.Plan], hardware: ws.Hardware) -> str:
    """A table of simulated costs with a row for each plan."""
    rows: list[PlanRow] = []
    for path, plan in plans.items():
        with shown.stage(f"simulate {path}"):
            count = batches(plan.strategies, plan.mesh) if plan.strategies else 1
            rows.append(PlanRow(str(path), count, costs(ws.partition(graph, plan), plan, hardware)))
    return show(rows, "plan")
