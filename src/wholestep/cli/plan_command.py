"""`wholestep plan`: layouts of all tensors of a step on a mesh, and the reasons, without process group or device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .hf import ModelSpec, load
from .screen import Screen
from .shared_options import SharedOptions, with_shared_options
from .target import (
    RETURNS,
    HardwareName,
    check_given,
    check_mesh,
    check_outputs,
    hardware_of,
    refuse,
    working,
    write_output,
)

if TYPE_CHECKING:
    from .planning import PlanRequest, Report

_Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=f"file.py:function or module:function that returns {RETURNS}.")
]
_Explain = Annotated[
    list[str] | None, typer.Option("--explain", help="Explain the layout of a tensor or operation; repeatable.")
]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write one page that shows the plan; with --compare, the fastest.")
]


@with_shared_options
def plan(
    step: SharedOptions, target: _Model = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=2",
    compare: Annotated[bool, typer.Option("--compare", help="Rank all templates that apply, in one table.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Choose by step time; on mesh auto=N, axes too.")] = False,
    explain: _Explain = None,
    show: Annotated[bool, typer.Option("--program", help="Print the program of one rank too.")] = False,
    stop_after: Annotated[
    str | None, typer.Option(help="With --program: print it after this pass; names them if wrong.") ] = None,
    hardware: HardwareName = None, html: _Html = None, trace: Annotated[
    Path | None, typer.Option("--trace", help="Write the predicted step as a trace that Perfetto opens.") ] = None,
    out: Annotated[
    Path | None, typer.Option("--out", "--json", help="Write the plan, or the table of --compare, as JSON.") ] = None,
) -> None:  # fmt: skip
    """Plan a training step: capture it, choose the layout of every tensor, print a table.

    Needs no weights, no process group and no GPU.
    """
    from wholestep.mesh import STAGES

    from . import planning

    check_given(target, step.hf)
    single = {"style": step.style, "explain": explain, "program": show or None}
    _check_effects(compare, single, auto, step)
    if stop_after and not show:
        refuse("--stop-after without --program: it has no effect")
    check_outputs(json=out, html=html, trace=trace)
    with working() as shown:
        on = check_mesh(mesh)
        stages = on.axis_size(STAGES) if STAGES in on.names else 0
        step.check(chooses=auto, pipeline=bool(stages))
        described, spec = hardware_of(hardware), step.spec(step.batch)
        if stages:
            _check_stages(compare, html=html, trace=trace)
        request = planning.plan_request(
            load(shown, target, _whole(spec, step, stages)), mesh, described, described if hardware else None, step,
            own_plan=step.hf is not None, explain=explain or (), program=show, stop_after=stop_after,
        )  # fmt: skip
        report = _report(shown, request, spec, compare, auto)
    typer.echo(report.text)
    with working() as shown:
        write_output(shown, out, lambda path: path.write_text(report.as_json))
        if html or trace:
            planning.draw(shown, report, request, html, trace)


def _whole(spec: ModelSpec | None, step: SharedOptions, stages: int) -> ModelSpec | None:
    """The model with the batch that is planned: that of all pieces of a pipeline."""
    from . import staged_setups

    return staged_setups.whole_spec(spec, step, stages) if stages and spec is not None else spec


def _report(shown: Screen, request: "PlanRequest", spec: ModelSpec | None, compare: bool, auto: bool) -> "Report":
    """The work of the command: a comparison, a search, or one plan."""
    from . import planning, staged_setups

    if request.pipeline is not None and not auto:
        setups = staged_setups.StagedSetups(shown, request, spec)
        return setups.compared() if compare else setups.planned()
    if compare:
        return planning.compared(shown, request)
    if auto:
        return planning.chosen(shown, request, planning.chooser(shown, request))
    return planning.planned(shown, request)


def _check_stages(compare: bool, **of_one: Path | None) -> None:
    """Refuse what a comparison of pipelines does not write."""
    names = [name for name, value in of_one.items() if value and compare]
    if names:
        refuse(f"--{names[0]} with an axis pp and --compare: needed one of them")


def _check_effects(compare: bool, single: dict[str, Any], auto: bool, step: SharedOptions) -> None:
    """Refuse options that would have no effect, or that contradict each other."""
    if compare and (about_one := [name for name, value in single.items() if value]):
        refuse(f"--{about_one[0]} with --compare: it applies to one plan, the table shows all")
    if auto and (compare or step.style):
        refuse(f"--{'compare' if compare else 'style'} with --auto: needed one of them")
