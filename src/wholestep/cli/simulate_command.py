"""`wholestep simulate`: predicts time, waits, memory, throughput and price of a step on any hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .hf import load
from .plan_options import batch_sizes
from .shared_options import SharedOptions, with_shared_options
from .target import HardwareName, check_given, check_mesh, check_outputs, hardware_of, refuse, working, write_output

if TYPE_CHECKING:
    import wholestep as ws
    from wholestep.report.figures import Figures


@with_shared_options
def simulate(
    step: SharedOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="file.py:function, as for `wholestep plan`.")
    ] = None,
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=8",
    hardware: HardwareName = "dgx-h100",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> None:
    """Simulate a training step: capture, plan and schedule it for a machine, and show its time, memory and throughput.

    Needs no weights, no process group and no GPU.
    """
    from wholestep.mesh import STAGES

    from . import planning, size_sweep, staged_setups

    check_given(target, step.hf)
    check_outputs(trace=trace, json=out)
    sizes = batch_sizes(step.batch, auto=False, sweeps=True) or (1,)
    several = len(sizes) * len(step.lengths or (0,)) > 1
    if several and trace is not None:
        refuse("--trace with several sizes: a trace is of one step")
    with working() as shown:
        has_stages = STAGES in check_mesh(mesh).names
        step.check(chooses=False, sweeps=True, pipeline=has_stages)
        if several and has_stages:
            refuse("several sizes with an axis pp: a pipeline is simulated for one")
        described = hardware_of(hardware)
        spec = step.spec(None if step.batch is None else max(sizes))
        loaded = load(shown, target, spec)
        request = planning.plan_request(loaded, mesh, described, described, step)
        staged, rows = None, list[size_sweep.SizeRow]()
        steps: list[tuple[ws.Timeline, Figures]] = []
        if has_stages:
            staged, figures = staged_setups.StagedSetups(shown, request, spec).simulated()
            steps = [(staged.timeline, figures)]
        elif several:
            rows = size_sweep.simulated(shown, request, sizes, step.lengths, planning.simulated)
        else:
            steps = [planning.simulated(shown, request)]
    typer.echo(f"{loaded.name} on mesh {mesh}, {planning.style_of(step, mesh)}, {request.on}")
    of_step = size_sweep.show(rows) if staged is None else staged_setups.summary(staged, request)
    typer.echo(f"{of_step if staged or rows else steps[0][0]}")
    if steps:
        typer.echo(str(steps[0][1]))
    shared = {
        "model": loaded.name, "mesh": mesh, "hardware": str(described), "backend": step.backend, "stack": step.stack,
    }  # fmt: skip
    body: dict[str, Any] = shared | (_body(*steps[0]) if steps else {})
    if staged is not None:
        body["pipeline"] = staged_setups.as_json(staged)
    if rows:
        body["sizes"] = [{"batch": row.batch, "seq": row.seq, **_body(row.timeline, row.figures)} for row in rows]
    with working() as shown:
        write_output(shown, trace, lambda path: steps[0][0].save(path))
        write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))


def _body(timeline: ws.Timeline, figures: Figures) -> dict[str, Any]:
    """The numbers of one step."""
    took, busy = timeline.simulated, {name: timeline.busy_us(name) for name in timeline.streams}
    return {
        "step_us": took.step_us, "exposed_us": took.exposed_us, "host_us": took.host_us, "mfu": took.mfu,
        "peak_bytes": timeline.peak.size_bytes, "rest_bytes": timeline.peak.rest_bytes, "busy_us": busy,
        "figures": figures.as_json(),
    }  # fmt: skip
