"""`wholestep simulate`: predicts time, waits, memory, throughput and price of a step on any hardware."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .hf import load
from .plan_options import batch_sizes
from .shared_options import SharedOptions, with_shared_options
from .target import HardwareName, check_given, check_mesh, check_outputs, hardware_of, refuse, working, write_output


@with_shared_options
def simulate(
    step: SharedOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="file.py:function, as for `wholestep plan`.")
    ] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=8",
    hardware: HardwareName = "dgx-h100",
    backend: Annotated[
        str, typer.Option(help="eager or inductor: ops one by one, or as the kernels of a compiler.")
    ] = "eager",
    stack: Annotated[
        str | None, typer.Option(help="Kernels and host of other software, as torchtitan-compile; names them if wrong.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured kernels: a table, or a trace of torch.profiler with shapes.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step: capture, plan and schedule it for a machine, and show its time, memory and throughput.

    Needs no weights, no process group and no GPU.
    """
    import wholestep as ws
    from wholestep.backend.build import BACKENDS

    from . import planning

    check_given(target, step.hf)
    check_outputs(trace=trace, json=out)
    if backend not in BACKENDS:
        refuse(f"--backend {backend} is unknown: give one of {', '.join(BACKENDS)}")
    sizes = batch_sizes(step.batch, auto=False)
    with working() as shown:
        step.check(chooses=False)
        check_mesh(mesh)
        described = hardware_of(hardware)
        found = load(shown, target, step.spec(None if sizes is None else sizes[0]))
        asked = planning.request(found, mesh, described, described, step)
        software = None if stack is None else ws.Stack.named(stack)
        measured = None if profile is None else ws.KernelTimes.load(profile)
        made, figures = planning.simulated(shown, asked, backend, software, measured)
    on = described if stack is None else f"{described}, {stack}"
    typer.echo(f"{found.name} on mesh {mesh}, {planning.style_of(step)}, {on}\n{made}\n{figures}")
    took, busy = made.simulated, {name: made.busy_us(name) for name in made.streams}
    body = {
        "model": found.name, "mesh": mesh, "hardware": str(described), "step_us": took.step_us,
        "exposed_us": took.exposed_us, "host_us": took.host_us, "backend": backend,
        "stack": stack,
        "mfu": took.mfu, "peak_bytes": made.peak.size_bytes,
        "rest_bytes": made.peak.rest_bytes, "busy_us": busy, "figures": figures.as_json(),
    }  # fmt: skip
    with working() as shown:
        write_output(shown, trace, made.save)
        write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
