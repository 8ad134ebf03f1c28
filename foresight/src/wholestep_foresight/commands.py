"""The commands that `wholestep` has with this package: `gpus`, `sizes` and `calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wholestep.cli.shared_options import SharedOptions, with_shared_options
from wholestep.cli.target import HardwareName, check_mesh, check_outputs, hardware_of, loaded, refuse, working

from .calibrate_command import calibrate


@with_shared_options
def gpus(
    step: SharedOptions,
    number: Annotated[int | None, typer.Argument(metavar="[N]", min=1, help="So many train the model.")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Sequences in a step of all.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="The search for each of gpus=8,16,...,1024 or seq=... or batch=...")
    ] = None,
    pipelines: Annotated[bool, typer.Option("--pipelines", help="Search pipelines too, along an axis pp.")] = False,
    hardware: HardwareName = "dgx-h100",
    html: Annotated[Path | None, typer.Option("--html", help="With --sweep: write one page that draws it.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write all setups, or the points of a sweep.")] = None,
) -> None:
    """Search how so many GPUs train a model of --hf: mesh, style, micro-batch and recomputation together.

    Needs no weights, no process group and no GPU.
    """
    from . import gpu_command

    check_outputs(json=out, html=html)
    with working() as shown:
        step.check(chooses=True)
        parsed = None if sweep is None else gpu_command.sweep_of(sweep)
        gpu_command.check(step, number, global_batch, parsed)
        if html is not None and parsed is None:
            refuse("--html without --sweep: `wholestep plan --mesh ...` draws one setup")
        spec = step.spec(None)
        assert spec is not None, "checked before"
        planner = gpu_command.GpuPlanner(shown, spec, step, hardware or "dgx-h100", pipelines)
        if parsed is not None:
            text = gpu_command.swept(shown, planner, parsed, number, global_batch, html, out)
        else:
            assert number is not None, "checked before"
            assert global_batch is not None, "checked before"
            text = gpu_command.search(shown, planner, number, global_batch, out)
    typer.echo(text)


@with_shared_options
def sizes(
    step: SharedOptions,
    batches: Annotated[str | None, typer.Option(help="Sequences of a rank, as 1,2,4.")] = None,
    seqs: Annotated[str | None, typer.Option(help="Tokens in each, as 2048,4096,8192.")] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=8",
    hardware: HardwareName = "dgx-h100",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step of --hf at several sizes of its batch, as a table with a line for each.

    Needs no weights, no process group and no GPU.
    """
    from wholestep.mesh import STAGES

    from . import size_sweep

    if step.hf is None:
        refuse("no --hf: the function that returns the step decides on its batch")
    if step.batch is not None or step.seq is not None:
        refuse(f"--{'batch' if step.batch else 'seq'}: give --{'batches' if step.batch else 'seqs'}, as 2,4")
    check_outputs(json=out)
    with working() as shown:
        step.check(chooses=False)
        if STAGES in check_mesh(mesh).names:
            refuse("an axis pp: `wholestep simulate` takes a pipeline, for one size")
        numbers = size_sweep.numbers("batches", batches, 1), size_sweep.numbers("seqs", seqs, 2)
        text = size_sweep.simulated(shown, step, mesh, hardware_of(hardware), *numbers, out)
    typer.echo(text)


app = typer.Typer()
app.command()(loaded(gpus))
app.command()(loaded(sizes))
app.command()(loaded(calibrate))
