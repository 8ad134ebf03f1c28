"""`wholestep diff`: storage layouts that differ between two plans, and their costs."""

from pathlib import Path
from typing import Annotated

import typer

from .hf import load, spec_of
from .target import Batch, HardwareName, Hf, Layers, Seq, check_given, hardware_of, refuse, working


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
    hardware: HardwareName = None,
) -> None:
    """Show storage layouts and bytes of a rank that differ between two plans; with their model, the costs of each.

    Costs are simulated: step time, its part that waits for communication, peak memory and bytes sent.
    """
    check_given(target, hf, needed=False)
    if hardware is not None and target is None and hf is None:
        refuse("--hardware without a model: needed MODEL or --hf, to simulate a step")
    from wholestep.plan.plan import Plan

    from . import planning

    with working() as shown:
        plans = Plan.load(before), Plan.load(after)
        text = str(plans[0].diff(plans[1]))
        if target is not None or hf is not None:
            used = plans[0].precision
            dtype = used.weights if used else None
            step = load(shown, target, spec_of(hf, batch=batch, seq=seq, layers=layers, dtype=dtype))
            both = dict(zip((before, after), plans, strict=True))
            text += "\n\n" + planning.costs_of(shown, step, both, hardware_of(hardware))
    typer.echo(text)
