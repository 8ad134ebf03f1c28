"""`wholestep diff`: storage layouts that differ between two plans, and their costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .hf import built
from .screen import Screen, staged
from .target import Batch, Hf, Layers, Seq, from_function, hardware_of, refuse, working

if TYPE_CHECKING:
    from wholestep.graph.graph import TrainGraph
    from wholestep.hardware.hardware import Hardware
    from wholestep.plan.plan import Plan


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, of `wholestep plan --json`.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another.")],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The step of both plans, file.py:function: costs are shown too."),
    ] = None,
    hf: Hf = None,
    batch: Batch = 1,
    seq: Seq = None,
    layers: Layers = None,
    hardware: Annotated[
        str | None, typer.Option(help="With a model: a preset (dgx-h100, ...) or a file of `wholestep calibrate`.")
    ] = None,
) -> None:
    """Show storage layouts and bytes of a rank that differ between two plans; with their model, the costs of each.

    Costs are simulated: step time, its part that waits for communication, peak memory and bytes sent.
    """
    if target is not None and hf is not None:
        refuse(f"both {target} and --hf {hf}: needed one of them")
    if hardware is not None and target is None and hf is None:
        refuse("--hardware without a model: needed MODEL or --hf, to simulate a step")
    from wholestep.plan.plan import Plan

    with working() as shown:
        plans = Plan.load(before), Plan.load(after)
        text = str(plans[0].diff(plans[1]))
        if target is not None or hf is not None:
            with staged(shown, "model"):
                found = from_function(target) if target is not None else built(hf or "", batch, seq, layers)
            with staged(shown, "capture"):
                import wholestep as ws

                graph = ws.capture(found.step, *found.args, **found.kwargs)
            text += "\n\n" + _costs(shown, graph, dict(zip((before, after), plans, strict=True)), hardware_of(hardware))
    typer.echo(text)


def _costs(shown: Screen, graph: "TrainGraph", plans: "dict[Path, Plan]", hardware: "Hardware") -> str:
    """A table of simulated costs with a row for each plan."""
    import wholestep as ws
    from wholestep.planner.candidates import batches
    from wholestep.report.compare import PlanRow, costs, show

    rows: list[PlanRow] = []
    for path, plan in plans.items():
        with staged(shown, f"simulate {path}"):
            count = batches(plan.strategies, plan.mesh) if plan.strategies else 1
            rows.append(PlanRow(str(path), count, costs(ws.partition(graph, plan), plan, hardware)))
    return show(rows, "plan")
