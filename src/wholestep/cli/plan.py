"""`wholestep plan`: where every tensor of a step would rest on a mesh, and why, without a process group or a device."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from wholestep.graph.quiet import collector_paused

from . import batches
from . import what_if as what_ifs
from .screen import Screen, each, screen, staged
from .target import DEMO, RETURNS, Style, Target, from_function, machine_of, refuse, refusing
from .wanted import wishes

if TYPE_CHECKING:
    from wholestep.auto.auto import Auto
    from wholestep.auto.search import Found
    from wholestep.cost.machine import Machine
    from wholestep.cost.topology import Topology
    from wholestep.errors import WholestepError
    from wholestep.graph.graph import TrainGraph
    from wholestep.plan.plan import Plan
    from wholestep.plan.strategy import Strategy
    from wholestep.report.compare import Row
    from wholestep.report.what_if import WhatIf

    from .hf import Wanted

Semantics = StrEnum("Semantics", ["per_rank", "global"])
Dtype = StrEnum("Dtype", ["bfloat16", "float16", "float32"])
Optimizer = StrEnum("Optimizer", ["adamw", "sgd"])
_Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"file.py:function or module:function that returns {RETURNS}."),
]

_Batch = Annotated[
    str | None, typer.Option(help="With --hf: sequences for each rank (1); with --auto several, 1,2,4, or auto.")
]
_Tp = Annotated[
    list[str] | None,
    typer.Option("--tp", help="Tensor parallel: pattern=colwise|rowwise|..., repeatable; model: its own plan; auto."),
]
_Pin = Annotated[
    list[str] | None,
    typer.Option("--pin", help="With --auto: a layout, as embed.weight=tp:replicate or lm_head=tp:2; repeatable."),
]
_Whole = Annotated[
    list[str] | None,
    typer.Option("--whole", help="With --auto: axes that may not cut a module, as norm=dp,tp; repeatable."),
]
_Explain = Annotated[
    list[str] | None, typer.Option("--explain", help="Why a tensor or operation is laid out so; repeatable.")
]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write one page that shows the plan; with --compare, the fastest.")
]
_WhatIf = Annotated[list[str] | None, typer.Option("--what-if", help=f"Its cost if: {what_ifs.FORMS}; repeatable.")]


def plan(
    target: _Model = None,
    hf: Annotated[
        str | None, typer.Option("--hf", help="In place of MODEL: a transformers config, by preset name or file.")
    ] = None,
    batch: _Batch = None,
    seq: Annotated[int | None, typer.Option(min=2, help="With --hf: tokens in each (2048, or what it takes).")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="With --hf: of parameters and state (bfloat16).")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --hf: the first so many layers only.")] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="With --hf (adamw).")] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=2",
    style: Annotated[
        Style | None, typer.Option(help="Where the data-parallel axes keep parameters (fully_shard).")
    ] = None,
    semantics: Annotated[
        Semantics, typer.Option(help="per_rank: as DDP; global: as one device on the whole batch.")
    ] = Semantics.per_rank,
    tp: _Tp = None,
    tp_axis: Annotated[str, typer.Option(help="The axis of --tp; with --hf, of the model's own plan.")] = "tp",
    compare: Annotated[bool, typer.Option("--compare", help="Rank all templates that apply, in one table.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Choose by step time; on mesh auto=N, axes too.")] = False,
    memory: Annotated[str | None, typer.Option(help="With --auto: bytes a rank may take, as 80GiB.")] = None,
    pin: _Pin = None,
    whole: _Whole = None,
    explain: _Explain = None,
    show: Annotated[bool, typer.Option("--program", help="Print the program of one rank too.")] = False,
    topology: Annotated[
        str | None, typer.Option(help="Predict for this machine: a preset, or a file of wholestep calibrate.")
    ] = None,
    html: _Html = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the predicted step as a trace that Perfetto opens.")
    ] = None,
    what_if: _WhatIf = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--json", help="Write the plan, or the table of --compare, as JSON.")
    ] = None,
) -> None:
    """Plan a training step: capture it, decide where every tensor rests, print that as a table.

    Without a model it plans the demo's own step. Nothing is trained, no weights are made and no rank is started.
    """
    sizes = batches.sizes(batch, auto)
    given = {"batch": sizes and sizes.first, "seq": seq, "dtype": dtype, "layers": layers, "optimizer": optimizer}
    _check_together(target, hf, given, compare, {"style": style, "explain": explain, "program": show or None})
    timed = topology is None or bool(auto or compare or html or trace or what_if)
    _check_choice(auto, compare, style, {"memory": memory, "pin": pin, "whole": whole}, timed)
    what_ifs.check(what_if or [], hf is not None)
    shown = screen(Console(stderr=True))
    with refusing(shown):
        machine = machine_of(topology)
        found = _target(shown, target, hf, given)
        graph = _captured(shown, found)
        kind: Any = semantics.value
        tensor = _tensor(found, tp or [], tp_axis, mesh if hf is not None else "", machine)
        rows, compared = list["Row"](), ""
        if compare:
            text, compared, made, rows = _compared(shown, graph, found, mesh, tensor, tp_axis, kind, machine)
        elif auto and sizes is not None and sizes.several:
            assert hf is not None, "sizes without it are refused"
            choice = _auto(shown, memory, machine, tensor, kind, wishes(pin or [], whole or []))
            best, found, head = batches.chosen(shown, sizes, _wanted(hf, given), (found, graph), mesh, choice)
            given["batch"], graph = best.batch, best.graph
            text, made = _told(best.found, graph, [head], explain or [], show)
        elif auto:
            choice = _auto(shown, memory, machine, tensor, kind, wishes(pin or [], whole or []))
            text, made = _chosen(shown, graph, found, mesh, choice, explain or [], show)
        else:
            chosen = _strategies(style or Style.fully_shard, kind, mesh, tensor, tp_axis)
            text, made = _planned(shown, graph, mesh, chosen, explain or [], show)
        cases: list[WhatIf] = []
        if made is not None and (what_if or html is not None):
            wanted = _wanted(hf, given) if hf is not None else None
            cases = what_ifs.rows(shown, what_if or [], made, graph, machine, found, wanted)
            text += what_ifs.text(cases) if what_if else ""
        if html is not None or trace is not None:
            _drawn(shown, graph, found, made, rows, machine, html, trace, cases)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(compared or (made.to_json() if made else ""))
        shown.note(f"written to {out}")
    shown.close()
    typer.echo(text)


def _check_together(
    target: str | None, hf: str | None, given: dict[str, Any], compare: bool, single: dict[str, Any]
) -> None:
    """Refuse options that would have no effect."""
    if target is not None and hf is not None:
        refuse(f"both {target} and --hf {hf}: needed one of them")
    idle = [name for name, value in given.items() if value is not None]
    if hf is None and idle:
        refuse(f"--{idle[0]} without --hf: a function that returns the step decides that itself")
    alone = [name for name, value in single.items() if value]
    if compare and alone:
        refuse(f"--{alone[0]} with --compare: that is about one plan, the table about all")


def _check_choice(auto: bool, compare: bool, style: Style | None, chosen_by: dict[str, Any], timed: bool) -> None:
    """Refuse options that would have no effect, or two ways to choose."""
    if auto and (compare or style):
        refuse(f"--{'compare' if compare else 'style'} with --auto: needed one of them")
    idle = [name for name, value in chosen_by.items() if value]
    if idle and not auto:
        refuse(f"--{idle[0]} without --auto: nothing would be chosen by it")
    if not timed:
        refuse("--topology without --auto, --compare, --html or --trace: nothing else here is a time")


def _auto(
    shown: Screen,
    memory: str | None,
    machine: "Machine | Topology",
    tensor: "Strategy | WholestepError | None",
    kind: Any,
    asked: dict[str, Any],
) -> "Auto":
    """What chooses; a model without a plan for tensor parallelism is planned without."""
    import wholestep as ws

    if isinstance(tensor, ws.WholestepError):
        shown.note(f"without tensor parallelism: {tensor.found}")
    used = tensor if isinstance(tensor, ws.TensorParallel) else None
    return ws.Auto(memory, machine, used, ws.DataParallel(semantics=kind), **asked)


def _target(shown: Screen, target: str | None, hf: str | None, given: dict[str, Any]) -> Target:
    with staged(shown, "model") as said, collector_paused():
        if hf is None:
            return from_function(target or DEMO)
        from .hf import build

        found = build(_wanted(hf, given))
        count = sum(p.numel() for p in found.args[0].parameters())
        said.append(f"{found.name}, {count:,} parameters")
        return found


def _captured(shown: Screen, found: Target) -> "TrainGraph":
    with staged(shown, "capture") as said:
        import wholestep as ws

        graph = ws.capture(found.step, *found.args, **found.kwargs)
        said.append(f"{len(graph.graph.nodes):,} operations")
        return graph


def _wanted(hf: str, given: dict[str, Any]) -> "Wanted":
    from .hf import Wanted

    return Wanted(hf, **{k: getattr(v, "value", v) for k, v in given.items() if v is not None})


def _planned(
    shown: Screen, graph: "TrainGraph", mesh: str, chosen: "list[Strategy]", explain: list[str], program: bool
) -> "tuple[str, Plan]":
    """One plan as text, and itself."""
    import wholestep as ws

    with staged(shown, "plan"):
        made = ws.plan(graph, mesh, chosen)
    parts = [str(made), *(f"\n{made.explain(name)}" for name in explain)]
    if program:
        with staged(shown, "partition"):
            parts.append(f"\n{ws.partition(graph, made)}")
    return "\n".join(parts), made


def _drawn(
    shown: Screen, graph: "TrainGraph", found: Target, made: "Plan | None", rows: "list[Row]",
    machine: "Machine | Topology", html: Path | None, trace: Path | None, cases: "list[WhatIf]",
) -> None:  # fmt: skip
    """Write the page and the trace; of the fastest of `rows`, if they were compared."""
    import wholestep as ws
    from wholestep.report.page import program

    if made is None:
        refuse("--html and --trace need a plan: no template has one")
    with staged(shown, "simulate"):
        local = program(made, graph, machine)
        if html is not None:
            chosen = rows[0].name if rows else ""
            ws.report(html, made, local, machine, model=found.name, alternatives=rows, chosen=chosen, what_if=cases)
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            ws.timeline(local, machine).save(trace)
    for path in (html, trace):
        if path is not None:
            shown.note(f"written to {path}")


def _chosen(
    shown: Screen, graph: "TrainGraph", found: Target, mesh: str, auto: "Auto", explain: list[str], program: bool
) -> "tuple[str, Plan]":
    """What was considered as a table, and the plan that won, as text; and that plan."""
    import wholestep as ws

    with each(shown, len(auto.candidates(ws.Mesh(mesh)))) as watch:
        chosen = auto.search(graph, mesh, watch=watch)
    return _told(chosen, graph, [f"{found.name} on mesh {mesh}"], explain, program)


def _told(
    chosen: "Found", graph: "TrainGraph", head: list[str], explain: list[str], program: bool
) -> "tuple[str, Plan]":
    """The same of a search that is done, below `head`."""
    import wholestep as ws
    from wholestep.auto.report import explained
    from wholestep.auto.report import show as table

    made = explained(chosen)
    parts = [*head, table(chosen), f"\n{made}"]
    parts += [f"\n{made.explain(name)}" for name in explain]
    if program:
        parts.append(f"\n{ws.partition(graph, made)}")
    return "\n".join(parts), made


def _compared(
    shown: Screen, graph: "TrainGraph", found: Target, mesh: str, tensor: "Strategy | WholestepError | None",
    tp_axis: str, semantics: Literal["per_rank", "global"], machine: "Machine | Topology",
) -> "tuple[str, str, Plan | None, list[Row]]":  # fmt: skip
    """All templates as a table and as JSON; the plan of the fastest, and the rows."""
    import wholestep as ws
    from wholestep.mesh import Mesh
    from wholestep.report.compare import as_json, compare, show, templates

    on = Mesh(mesh)
    chosen = templates(on, tensor, tp_axis, semantics)
    with each(shown, len(chosen)) as watch:
        rows = compare(graph, on, chosen, machine, watch)
    best = next((one.strategies for one in chosen if rows[0].costs is not None and one.name == rows[0].name), None)
    made = ws.plan(graph, on, list(best)) if isinstance(best, tuple) else None
    table = json.dumps(as_json(rows, on, found.name, machine), indent=1) + "\n"
    return f"{found.name} on mesh {on}\n{show(rows)}", table, made, rows


def _tensor(
    found: Target, tp: list[str], tp_axis: str, mesh: str, machine: "Machine | Topology"
) -> "Strategy | WholestepError | None":
    """Tensor parallelism as asked for; if nothing is, by the model's own plan where `mesh` has its axis, or has axes to
    be chosen. An error if the model has none.
    """
    import wholestep as ws

    if tp == ["auto"]:
        return ws.TensorParallel("auto", axis=tp_axis, topology=machine)
    if not tp and (not mesh or {tp_axis, "auto"}.isdisjoint(ws.Mesh(mesh).names)):
        return None
    if not tp or tp == ["model"]:
        try:
            return ws.TensorParallel.of((*found.models(), cast(Any, None))[0], axis=tp_axis)
        except ws.PlanError as error:
            return error
    pairs: dict[str, str] = {}
    for entry in tp:
        pattern, _, how = entry.rpartition("=")
        if not pattern:
            refuse(f"--tp {entry}: needed pattern=colwise, pattern=rowwise or the like, or model or auto alone")
        pairs[pattern] = how
    return ws.TensorParallel(pairs, axis=tp_axis)


def _strategies(
    style: Style, semantics: Literal["per_rank", "global"], mesh: str, tensor: "Strategy | WholestepError | None",
    tp_axis: str,
) -> "list[Strategy]":  # fmt: skip
    import wholestep as ws

    kind: Any = style.value
    if tensor is None:
        return [ws.DataParallel(kind, semantics=semantics)]
    if isinstance(tensor, ws.WholestepError):
        raise tensor
    others = tuple(name for name in ws.Mesh(mesh).names if name != tp_axis)
    return [ws.DataParallel(kind, axis=others, semantics=semantics), tensor] if others else [tensor]
