"""`wholestep simulate`: predicts time, waits, memory, throughput and price of a step on any hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .hf import load
from .shared_options import SharedOptions, with_shared_options
from .target import HardwareName, check_given, check_mesh, check_outputs, hardware_of, working, write_output

if TYPE_CHECKING:
    import wholestep as ws
    from wholestep.report.figures import Figures


@with_shared_options
def simulate(
    step: SharedOptions,
    target: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for `wholestep plan`.")] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=8",
    hardware: HardwareName = "dgx-h100",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step: capture, plan and schedule it for a machine, and show its time, memory and throughput.

    Needs no weights, no process group and no GPU.
    """
    from wholestep.mesh import STAGES

    from . import planning, staged_setups

    check_given(target, step.hf)
    check_outputs(trace=trace, json=out)
    with working() as shown:
        has_stages = STAGES in check_mesh(mesh).names
        step.check(chooses=False, pipeline=has_stages)
        described, spec = hardware_of(hardware), step.spec(step.batch)
        loaded = load(shown, target, spec)
        request, staged = planning.plan_request(loaded, mesh, described, described, step), None
        if has_stages:
            staged, figures = staged_setups.StagedSetups(shown, request, spec).simulated()
            timeline = staged.timeline
        else:
            timeline, figures = planning.simulated(shown, request)
    typer.echo(f"{loaded.name} on mesh {mesh}, {planning.style_of(step, mesh)}, {request.on}")
    typer.echo(f"{timeline if staged is None else staged_setups.summary(staged, request)}\n{figures}")
    shared = {
        "model": loaded.name, "mesh": mesh, "hardware": str(described), "backend": step.backend, "stack": step.stack,
    }  # fmt: skip
    body: dict[str, Any] = shared | numbers_of(timeline, figures)
    if staged is not None:
        body["pipeline"] = staged_setups.as_json(staged)
    with working() as shown:
        write_output(shown, trace, timeline.save)
        write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))


def numbers_of(timeline: ws.Timeline, figures: Figures) -> dict[str, Any]:
    """The numbers of one step."""
    took, busy = timeline.simulated, {name: timeline.busy_us(name) for name in timeline.streams}
    return {
        "step_us": took.step_us, "exposed_us": took.exposed_us, "host_us": took.host_us, "mfu": took.mfu,
        "peak_bytes": timeline.peak.size_bytes, "rest_bytes": timeline.peak.rest_bytes, "busy_us": busy,
        "figures": figures.as_json(),
    }  # fmt: skip
