"""`wholestep simulate`: predicts time, waits and memory of a step on any hardware."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import output_files
from .hf import built
from .screen import Screen, staged
from .target import (
    FULLY_SHARD,
    Batch,
    Hf,
    Layers,
    Seq,
    Style,
    Target,
    check_given,
    check_mesh,
    from_function,
    hardware_of,
    working,
)

if TYPE_CHECKING:
    from wholestep.cost.timeline import Timeline
    from wholestep.hardware.hardware import Hardware


def simulate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="file.py:function, as for `wholestep plan`."),
    ] = None,
    hf: Hf = None,
    batch: Batch = 1,
    seq: Seq = None,
    layers: Layers = None,
    mesh: Annotated[
        str, typer.Option(help="Axes and sizes, as dp=4,tp=2; with an axis tp, the model's own plan.")
    ] = "dp=8",
    style: Annotated[Style, typer.Option(help="Where the data-parallel axes keep parameters.")] = FULLY_SHARD,
    hardware: Annotated[
        str, typer.Option(help="A preset (dgx-h100, ...) or a file of `wholestep calibrate`.")
    ] = "dgx-h100",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step: capture, plan and schedule it for a machine, and show its time and memory.

    Needs no weights, no process group and no GPU.
    """
    check_given(target, hf)
    output_files.check(trace=trace, json=out)
    with working() as shown:
        check_mesh(mesh)
        machine = hardware_of(hardware)
        with staged(shown, "model"):
            found = from_function(target) if target is not None else built(hf or "", batch, seq, layers)
        made = _simulated(shown, found, mesh, style, machine)
    typer.echo(f"{found.name} on mesh {mesh}, {style.value}, {machine}\n{made}")
    figures = json.dumps(_figures(found, mesh, machine, made), indent=1) + "\n"
    with working() as shown:
        output_files.written(trace, made.save, shown.note)
        output_files.written(out, lambda path: path.write_text(figures), shown.note)


def _simulated(shown: Screen, found: Target, mesh: str, style: Style, hardware: "Hardware") -> "Timeline":
    import wholestep as ws
    from wholestep.report.page import program

    kind: Any = style.value
    others = tuple(name for name in ws.Mesh(mesh).names if name != "tp")
    strategies: list[Any] = [ws.DataParallel(kind, axis=others)] if others else []
    if "tp" in ws.Mesh(mesh).names:
        strategies.append(ws.TensorParallel.of(found.models()[0], axis="tp"))
    with staged(shown, "capture"):
        graph = ws.capture(found.step, *found.args, **found.kwargs)
    with staged(shown, "plan"):
        planned = ws.plan(graph, mesh, strategies, hardware=hardware)
    with staged(shown, "schedule"):
        local = program(planned, graph, hardware)
    with staged(shown, "simulate"):
        return ws.timeline(local, hardware)


def _figures(found: Target, mesh: str, hardware: "Hardware", made: "Timeline") -> dict[str, Any]:
    took = made.simulated
    return {
        "model": found.name, "mesh": mesh, "hardware": str(hardware), "step_us": took.step_us,
        "exposed_us": took.exposed_us, "mfu": took.mfu, "peak_bytes": made.peak.size_bytes,
        "rest_bytes": made.peak.rest_bytes, "busy_us": {name: made.busy_us(name) for name in made.streams},
    }  # fmt: skip
