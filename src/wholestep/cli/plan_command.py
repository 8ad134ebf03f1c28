"""`wholestep plan`: layouts of all tensors of a step on a mesh, and the reasons, without process group or device."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from wholestep.graph.gc_control import collector_paused
from wholestep.tuning import table

from . import batch_search, output_files, planning
from . import what_if_options as what_ifs
from .constraint_options import wishes
from .planning import Done, PlanRequest
from .screen import Screen, staged
from .target import (
    FULLY_SHARD,
    RETURNS,
    Hf,
    Layers,
    Seq,
    Style,
    Target,
    check_given,
    check_mesh,
    from_function,
    hardware_of,
    refuse,
    working,
)  # fmt: skip

if TYPE_CHECKING:
    from wholestep.hardware.hardware import Hardware
    from wholestep.plan.plan import Plan
    from wholestep.report.what_if import WhatIf

    from .hf import ModelSpec

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
    typer.Option("--whole", help="With --auto: axes that may not shard a module, as norm=dp,tp; repeatable."),
]
_Explain = Annotated[
    list[str] | None, typer.Option("--explain", help="Explain the layout of a tensor or operation; repeatable.")
]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write one page that shows the plan; with --compare, the fastest.")
]
_WhatIf = Annotated[list[str] | None, typer.Option("--what-if", help=f"Its cost if: {what_ifs.FORMS}; repeatable.")]


def plan(
    target: _Model = None,
    hf: Hf = None,
    batch: _Batch = None,
    seq: Seq = None,
    dtype: Annotated[Dtype | None, typer.Option(help="With --hf: of parameters and state (bfloat16).")] = None,
    layers: Layers = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="With --hf (adamw).")] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=2",
    style: Annotated[Style | None, typer.Option(help="The data-parallel style (fully_shard).")] = None,
    semantics: Annotated[
        Semantics, typer.Option(help="per_rank: as DDP; global: as one device on the whole batch.")
    ] = Semantics.per_rank,
    tp: _Tp = None,
    tp_axis: Annotated[str, typer.Option(help="The axis of --tp; with --hf, of the model's own plan.")] = "tp",
    compare: Annotated[bool, typer.Option("--compare", help="Rank all templates that apply, in one table.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Choose by step time; on mesh auto=N, axes too.")] = False,
    memory: Annotated[str | None, typer.Option(help="With --auto: memory of a rank, as 80GiB.")] = None,
    pin: _Pin = None,
    whole: _Whole = None,
    explain: _Explain = None,
    show: Annotated[bool, typer.Option("--program", help="Print the program of one rank too.")] = False,
    stop_after: Annotated[
        str | None, typer.Option(help="With --program: print it after this pass (`wholestep passes` lists them).")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Predict for this hardware: a preset, or a file of wholestep calibrate.")
    ] = None,
    html: _Html = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the predicted step as a trace that Perfetto opens.")
    ] = None,
    what_if: _WhatIf = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the tuned thresholds too.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "--json", help="Write the plan, or the table of --compare, as JSON.")
    ] = None,
) -> None:
    """Plan a training step: capture it, choose the layout of every tensor, print a table.

    Needs no weights, no process group and no GPU.
    """
    sizes = batch_search.sizes(batch, auto)
    given = {"batch": sizes and sizes.first, "seq": seq, "dtype": dtype, "layers": layers, "optimizer": optimizer}
    check_given(target, hf)
    _check_together(hf, given, compare, {"style": style, "explain": explain, "program": show or None})
    timed = hardware is None or bool(auto or compare or explain or html or trace or what_if)
    _check_choice(auto, compare, style, {"memory": memory, "pin": pin, "whole": whole}, timed)
    if stop_after and not show:
        refuse("--stop-after without --program: it has no effect")
    output_files.check(json=out, html=html, trace=trace)
    with working() as shown:
        check_mesh(mesh)
        what_ifs.check(what_if or [], hf is not None)
        described, wanted = hardware_of(hardware), _wanted(hf, given)
        found, kind = _target(shown, target, wanted), cast(Literal["per_rank", "global"], semantics.value)
        tensor = planning.tensor_parallel(found, tp or [], tp_axis, mesh if hf is not None else "", described)
        asked = PlanRequest(
            found, mesh, described, described if hardware else None, kind, tensor, tp_axis, explain or (), show,
            stop_after,
        )  # fmt: skip
        if compare:
            done = planning.compared(shown, asked)
        elif auto:
            chooser = planning.chooser(shown, asked, memory, wishes(pin or [], whole or []))
            done, wanted = planning.chosen(shown, asked, chooser, sizes, wanted)
        else:
            done = planning.planned(shown, asked, style or FULLY_SHARD)
    typer.echo(done.text)
    if verbose:
        typer.echo(f"\n{table()}")
    cases: list[WhatIf] = []
    with working() as shown:
        output_files.written(out, lambda path: path.write_text(done.as_json), shown.note)
        if what_if or html:
            cases = what_ifs.rows(shown, what_if or [], _plan(done), done.graph, described, done.target, wanted)
    if what_if:
        from wholestep.report.what_if import show as show_cases

        typer.echo(f"\n{show_cases(cases)}")
    if html or trace:
        with working() as shown:
            _draw(shown, done, described, html, trace, cases)


def _draw(
    shown: Screen, done: Done, hardware: "Hardware", html: Path | None, trace: Path | None,
    cases: "list[WhatIf]",
) -> None:  # fmt: skip
    """Write the page and the trace, after a comparison of the fastest template."""
    import wholestep as ws
    from wholestep.report.page import program

    made, rows = _plan(done), done.rows
    with staged(shown, "simulate"):
        local = program(made, done.graph, hardware)
    chosen = rows[0].name if rows else ""
    page = partial(ws.report, model=done.target.name, alternatives=rows, chosen=chosen, what_if=cases)
    output_files.written(html, lambda path: page(path, made, local, hardware), shown.note)
    output_files.written(trace, lambda path: ws.timeline(local, hardware).save(path), shown.note)


def _plan(done: Done) -> "Plan":
    if done.plan is None:
        refuse("--html, --trace and --what-if need a plan: no template has one")
    return done.plan


def _check_together(hf: str | None, given: dict[str, Any], compare: bool, single: dict[str, Any]) -> None:
    """Refuse options that would have no effect."""
    unused = [name for name, value in given.items() if value is not None]
    if hf is None and unused:
        refuse(f"--{unused[0]} without --hf: the function that returns the step decides that")
    about_one = [name for name, value in single.items() if value]
    if compare and about_one:
        refuse(f"--{about_one[0]} with --compare: it applies to one plan, the table shows all")


def _check_choice(auto: bool, compare: bool, style: Style | None, chosen_by: dict[str, Any], timed: bool) -> None:
    """Refuse options that would have no effect, or that contradict each other."""
    if auto and (compare or style):
        refuse(f"--{'compare' if compare else 'style'} with --auto: needed one of them")
    unused = [name for name, value in chosen_by.items() if value]
    if unused and not auto:
        refuse(f"--{unused[0]} without --auto: it has no effect")
    if not timed:
        refuse("--hardware without --auto, --compare, --explain, --html or --trace: nothing else shows times")


def _target(shown: Screen, target: str | None, wanted: "ModelSpec | None") -> Target:
    with staged(shown, "model") as details, collector_paused():
        if wanted is None:
            assert target is not None, "checked before"
            return from_function(target)
        from .hf import build

        found = build(wanted)
        count = sum(p.numel() for p in found.args[0].parameters())
        details.append(f"{found.name}, {count:,} parameters")
        return found


def _wanted(hf: str | None, given: dict[str, Any]) -> "ModelSpec | None":
    from .hf import ModelSpec

    return ModelSpec(hf, **{k: getattr(v, "value", v) for k, v in given.items() if v is not None}) if hf else None
