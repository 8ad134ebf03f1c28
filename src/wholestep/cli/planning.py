"""The work of `wholestep plan` once its options are parsed: capture, choose, show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from . import batch_search
from .screen import Screen, each, staged
from .target import Style, Target, refuse

if TYPE_CHECKING:
    from wholestep.errors import WholestepError
    from wholestep.graph.graph import TrainGraph
    from wholestep.hardware.hardware import Hardware
    from wholestep.passes.base import Pass
    from wholestep.plan.plan import Plan
    from wholestep.plan.strategy import Strategy
    from wholestep.planner.auto import Auto
    from wholestep.planner.search_result import SearchResult
    from wholestep.report.compare import PlanRow

    from .hf import ModelSpec


@dataclass(frozen=True)
class PlanRequest:
    """A step, its hardware, and what to print.

    `hardware` prices layouts, if the user named it. `tensor`: tensor parallelism on `tp_axis`, or the error why the
    model has none. `stop_after`: the pass after which the program is printed.
    """

    target: Target
    mesh: str
    hardware: Hardware
    planned_on: Hardware | None
    semantics: Literal["per_rank", "global"]
    tensor: Strategy | WholestepError | None
    tp_axis: str
    explain: Sequence[str] = ()
    program: bool = False
    stop_after: str | None = None


@dataclass(frozen=True)
class Done:
    """The text of a command, and what it may write: the plan of `graph`, the rows of a comparison."""

    text: str
    target: Target
    graph: TrainGraph
    plan: Plan | None
    rows: Sequence[PlanRow] = ()
    table: str = ""

    @property
    def as_json(self) -> str:
        """The comparison, else the plan."""
        return self.table or (self.plan.to_json() if self.plan else "")


def capture(shown: Screen, target: Target) -> TrainGraph:
    """The step as one graph."""
    with staged(shown, "capture") as details:
        import wholestep as ws

        graph = ws.capture(target.step, *target.args, **target.kwargs)
        details.append(f"{len(graph.graph.nodes):,} operations")
        return graph


def chooser(shown: Screen, asked: PlanRequest, memory: str | None, wishes: dict[str, Any]) -> Auto:
    """What chooses; a model without a plan for tensor parallelism is planned without."""
    import wholestep as ws

    tensor, data = asked.tensor, ws.DataParallel(semantics=asked.semantics)
    if isinstance(tensor, ws.WholestepError):
        shown.note(f"without tensor parallelism: {tensor.found}")
    used = tensor if isinstance(tensor, ws.TensorParallel) else None
    return ws.Auto(memory, asked.hardware, used, data, **wishes)


def planned(shown: Screen, asked: PlanRequest, style: Style) -> Done:
    """The plan of one style."""
    import wholestep as ws

    strategies = _strategies(asked, style)
    graph = capture(shown, asked.target)
    with staged(shown, "plan"):
        made = ws.plan(graph, asked.mesh, strategies, hardware=asked.planned_on)
    return Done("\n".join([str(made), *_asked_of(shown, made, graph, asked)]), asked.target, graph, made)


def chosen(
    shown: Screen, asked: PlanRequest, auto: Auto, sizes: batch_search.BatchSizes | None, wanted: ModelSpec | None
) -> tuple[Done, ModelSpec | None]:
    """The candidates of `auto` as a table, and the best plan; with several `sizes`, the model with the best batch."""
    import wholestep as ws

    graph = capture(shown, asked.target)
    if sizes is not None and sizes.several and wanted is not None:
        best, target, head = batch_search.chosen(shown, sizes, wanted, (asked.target, graph), asked.mesh, auto)
        done = _search_done(shown, best.found, best.graph, replace(asked, target=target), head)
        return done, replace(wanted, batch=best.batch)
    with each(shown, len(auto.candidates(ws.Mesh(asked.mesh)))) as watch:
        found = auto.search(graph, asked.mesh, watch=watch)
    return _search_done(shown, found, graph, asked, f"{asked.target.name} on mesh {asked.mesh}"), wanted


def compared(shown: Screen, asked: PlanRequest) -> Done:
    """All templates as a table, and the plan of the fastest."""
    import wholestep as ws
    from wholestep.report.compare import as_json, compare, show, templates

    on, name = ws.Mesh(asked.mesh), asked.target.name
    among = templates(on, asked.tensor, asked.tp_axis, ws.DataParallel(semantics=asked.semantics))
    graph = capture(shown, asked.target)
    with each(shown, len(among)) as watch:
        rows = compare(graph, on, among, asked.hardware, watch)
    best = next((one.strategies for one in among if rows[0].costs is not None and one.name == rows[0].name), None)
    made = ws.plan(graph, on, list(best), hardware=asked.hardware) if isinstance(best, tuple) else None
    table = json.dumps(as_json(rows, on, name, asked.hardware), indent=1) + "\n"
    return Done(f"{name} on mesh {on}\n{show(rows)}", asked.target, graph, made, rows, table)


def tensor_parallel(
    target: Target, tp: Sequence[str], axis: str, mesh: str, hardware: Hardware
) -> Strategy | WholestepError | None:
    """Tensor parallelism by `--tp`; by default the model's plan, if `mesh` has the axis or axes to choose.

    An error, which is not raised, if the model has no plan.
    """
    import wholestep as ws

    if list(tp) == ["auto"]:
        return ws.TensorParallel("auto", axis=axis, hardware=hardware)
    if not tp and (not mesh or {axis, "auto"}.isdisjoint(ws.Mesh(mesh).names)):
        return None
    if not tp or list(tp) == ["model"]:
        try:
            return ws.TensorParallel.of((*target.models(), cast(Any, None))[0], axis=axis)
        except ws.PlanError as error:
            return error
    pairs: dict[str, str] = {}
    for entry in tp:
        pattern, _, how = entry.rpartition("=")
        if not pattern:
            refuse(f"--tp {entry}: needed pattern=colwise, pattern=rowwise or the like, or model or auto alone")
        pairs[pattern] = how
    return ws.TensorParallel(pairs, axis=axis)


def _search_done(shown: Screen, found: SearchResult, graph: TrainGraph, asked: PlanRequest, head: str) -> Done:
    """The report of a search, below `head`."""
    from wholestep.planner.search_result import explained, show

    made = explained(found)
    text = "\n".join([head, show(found), f"\n{made}", *_asked_of(shown, made, graph, asked)])
    return Done(text, asked.target, graph, made)


def _asked_of(shown: Screen, plan: Plan, graph: TrainGraph, asked: PlanRequest) -> list[str]:
    """The texts of `--explain` and `--program`."""
    import wholestep as ws

    parts = [f"\n{plan.explain(name)}" for name in asked.explain]
    if asked.program:
        with staged(shown, "partition"):
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


def _strategies(asked: PlanRequest, style: Style) -> list[Strategy]:
    """Data parallelism in `style` on all axes but that of tensor parallelism.

    Raises:
        WholestepError: tensor parallelism is requested, and the model has no plan for it.
    """
    import wholestep as ws

    kind: Any = style.value
    if asked.tensor is None:
        return [ws.DataParallel(kind, semantics=asked.semantics)]
    if isinstance(asked.tensor, ws.WholestepError):
        raise asked.tensor
    others = tuple(name for name in ws.Mesh(asked.mesh).names if name != asked.tp_axis)
    data = [ws.DataParallel(kind, axis=others, semantics=asked.semantics)] if others else []
    return [*data, asked.tensor]
