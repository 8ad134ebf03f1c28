"""`wholestep plan`: layouts of all tensors of a step on a mesh, and the reasons, without process group or device."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from wholestep.tuning import table

from .hf import load, spec_of
from .plan_options import WHAT_IF_FORMS, batch_sizes, check_what_if, constraints
from .target import (
    FULLY_SHARD,
    RETURNS,
    AsyncTp,
    HardwareName,
    Hf,
    Layers,
    Seq,
    Style,
    Tp,
    check_given,
    check_mesh,
    check_outputs,
    hardware_of,
    refuse,
    working,
    write_output,
)

Semantics = StrEnum("Semantics", ["per_rank", "global"])
Dtype = StrEnum("Dtype", ["bfloat16", "float16", "float32"])
Optimizer = StrEnum("Optimizer", ["adamw", "sgd"])
_Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=f"file.py:function or module:function that returns {RETURNS}.")
]

_Batch = Annotated[
    str | None, typer.Option(help="With --hf: sequences for each rank (1); with --auto several, 1,2,4, or auto.")
]
_Pin = Annotated[
    list[str] | None,
    typer.Option("--pin", help="With --auto: a layout, as embed.weight=tp:replicate or lm_head=tp:2; repeatable."),
]
_Replicated = Annotated[
    list[str] | None,
    typer.Option(
        "--replicated", help="With --auto: axes along which a module stays replicated, as norm=dp,tp; repeatable."
    ),
]
_Explain = Annotated[
    list[str] | None, typer.Option("--explain", help="Explain the layout of a tensor or operation; repeatable.")
]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write one page that shows the plan; with --compare, the fastest.")
]
_WhatIf = Annotated[list[str] | None, typer.Option("--what-if", help=f"Its cost if: {WHAT_IF_FORMS}; repeatable.")]


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
    tp: Tp = None,
    async_tp: AsyncTp = None,
    tp_axis: Annotated[str, typer.Option(help="The axis of --tp; with --hf, of the model's own plan.")] = "tp",
    compare: Annotated[bool, typer.Option("--compare", help="Rank all templates that apply, in one table.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Choose by step time; on mesh auto=N, axes too.")] = False,
    memory: Annotated[str | None, typer.Option(help="With --auto: memory of a rank, as 80GiB.")] = None,
    pin: _Pin = None,
    replicated: _Replicated = None,
    explain: _Explain = None,
    show: Annotated[bool, typer.Option("--program", help="Print the program of one rank too.")] = False,
    stop_after: Annotated[
        str | None, typer.Option(help="With --program: print it after this pass (`wholestep passes` lists them).")
    ] = None,
    hardware: HardwareName = None,
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
    from . import planning

    sizes = batch_sizes(batch, auto)
    first = None if sizes is None else min(sizes, default=1)
    given = {"batch": first, "seq": seq, "dtype": dtype, "layers": layers, "optimizer": optimizer}
    check_given(target, hf)
    single = {"style": style, "explain": explain, "program": show or None}
    _check_effects(hf, given, compare, single, auto, style, {"memory": memory, "pin": pin, "replicated": replicated})
    if hardware is not None and not (auto or compare or explain or html or trace or what_if):
        refuse("--hardware without --auto, --compare, --explain, --html or --trace: nothing else shows times")
    if stop_after and not show:
        refuse("--stop-after without --program: it has no effect")
    check_outputs(json=out, html=html, trace=trace)
    with working() as shown:
        check_mesh(mesh)
        check_what_if(what_if or [], hf is not None)
        described, spec = hardware_of(hardware), spec_of(hf, **given)
        found, kind = load(shown, target, spec), cast(Literal["per_rank", "global"], semantics.value)
        tensor = planning.tensor_parallel(found, tp or [], tp_axis, mesh if hf is not None else "", described, async_tp)
        asked = planning.PlanRequest(
            found, mesh, described, described if hardware else None, kind, tensor, tp_axis, explain or (), show,
            stop_after,
        )  # fmt: skip
        if compare:
            done = planning.compared(shown, asked)
        elif auto:
            chooser = planning.chooser(shown, asked, memory, constraints(pin or [], replicated or []))
            done, spec = planning.chosen(shown, asked, chooser, sizes, spec)
        else:
            done = planning.planned(shown, asked, style or FULLY_SHARD)
    typer.echo(done.text)
    if verbose:
        typer.echo(f"\n{table()}")
    cases: list[planning.WhatIf] = []
    with working() as shown:
        write_output(shown, out, lambda path: path.write_text(done.as_json))
        if what_if or html:
            cases = planning.what_ifs(shown, what_if or [], done, described, spec)
    if what_if:
        typer.echo(f"\n{planning.what_if.show(cases)}")
    if html or trace:
        with working() as shown:
            planning.draw(shown, done, described, html, trace, cases)


def _check_effects(
    hf: str | None, model: dict[str, Any], compare: bool, single: dict[str, Any], auto: bool, style: Style | None,
    chosen_by: dict[str, Any],
) -> None:  # fmt: skip
    """Refuse options that would have no effect, or that contradict each other."""
    if hf is None and (unused := [name for name, value in model.items() if value is not None]):
        refuse(f"--{unused[0]} without --hf: the function that returns the step decides that")
    if compare and (about_one := [name for name, value in single.items() if value]):
        refuse(f"--{about_one[0]} with --compare: it applies to one plan, the table shows all")
    if auto and (compare or style):
        refuse(f"--{'compare' if compare else 'style'} with --auto: needed one of them")
    if not auto and (unused := [name for name, value in chosen_by.items() if value]):
        refuse(f"--{unused[0]} without --auto: it has no effect")
