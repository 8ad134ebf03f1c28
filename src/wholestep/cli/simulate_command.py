"""`wholestep simulate`: predicts time, waits and memory of a step on any hardware."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .hf import load, spec_of
from .target import (
    FULLY_SHARD,
    AsyncTp,
    Batch,
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
)  # fmt: skip

Recipe = StrEnum("Recipe", ["tensorwise", "rowwise"])


def simulate(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="file.py:function, as for `wholestep plan`.")
    ] = None,
    hf: Hf = None,
    batch: Batch = 1,
    seq: Seq = None,
    layers: Layers = None,
    mesh: Annotated[
        str, typer.Option(help="Axes and sizes, as dp=4,tp=2; with an axis tp, the model's own plan.")
    ] = "dp=8",
    style: Annotated[Style, typer.Option(help="Where the data-parallel axes keep parameters.")] = FULLY_SHARD,
    tp: Tp = None,
    async_tp: AsyncTp = None,
    float8: Annotated[Recipe | None, typer.Option(help="Multiply large linear layers in float8.")] = None,
    hardware: HardwareName = "dgx-h100",
    backend: Annotated[
        str, typer.Option(help="eager or inductor: ops one by one, or as the kernels of a compiler.")
    ] = "eager",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step: capture, plan and schedule it for a machine, and show its time and memory.

    Needs no weights, no process group and no GPU.
    """
    import wholestep as ws
    from wholestep.backend.build import BACKENDS

    from .planning import simulated

    check_given(target, hf)
    check_outputs(trace=trace, json=out)
    if backend not in BACKENDS:
        refuse(f"--backend {backend} is unknown: give one of {', '.join(BACKENDS)}")
    with working() as shown:
        check_mesh(mesh)
        if tp and "tp" not in ws.Mesh(mesh).names:
            refuse(f"--tp on mesh {mesh}: needed an axis tp")
        machine = hardware_of(hardware)
        found = load(shown, target, spec_of(hf, batch=batch, seq=seq, layers=layers))
        eight = ws.Float8(cast(Any, str(float8))) if float8 else None
        made = simulated(shown, found, mesh, style, machine, backend, eight, tp or (), async_tp)
    typer.echo(f"{found.name} on mesh {mesh}, {style.value}, {machine}\n{made}")
    took, busy = made.simulated, {name: made.busy_us(name) for name in made.streams}
    figures = {
        "model": found.name, "mesh": mesh, "hardware": str(machine), "step_us": took.step_us,
        "exposed_us": took.exposed_us, "host_us": took.host_us, "backend": backend,
        "mfu": took.mfu, "peak_bytes": made.peak.size_bytes,
        "rest_bytes": made.peak.rest_bytes, "busy_us": busy,
    }  # fmt: skip
    with working() as shown:
        write_output(shown, trace, made.save)
        write_output(shown, out, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n"))
