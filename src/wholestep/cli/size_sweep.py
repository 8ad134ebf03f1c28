"""`wholestep simulate --seq 2048,4096,8192`: one step at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import wholestep as ws
from wholestep.graph.text import human, seconds, table
from wholestep.report.figures import Figures

from .hf import with_sizes
from .planning import PlanRequest
from .screen import Screen


@dataclass(frozen=True)
class SizeRow:
    """The step for a batch of `batch` sequences of `seq` tokens."""

    batch: int
    seq: int
    timeline: ws.Timeline
    figures: Figures


def simulated(
    shown: Screen, request: PlanRequest, batches: Sequence[int], lengths: Sequence[int] | None,
    simulate: Callable[[Screen, PlanRequest], tuple[ws.Timeline, Figures]],
) -> list[SizeRow]:  # fmt: skip
    """The step at each size."""
    (longest,) = {tokens.shape[1] for tokens in request.target.args[2]["tokens"]}
    rows = list[SizeRow]()
    for batch, seq in product(batches, lengths or (longest,)):
        shown.note(f"batch {batch}, seq {seq}")
        at = replace(request, target=with_sizes(request.target, batch, seq))
        rows.append(SizeRow(batch, seq, *simulate(shown, at)))
    return rows


def show(rows: Sequence[SizeRow]) -> str:
    """A table with a line for each size."""
    lines = [("batch", "seq", "step", "tokens/s", "MFU", "peak a GPU", "exposed")]
    for row in rows:
        costs = row.figures.costs
        rate = f"{row.figures.tokens_per_s:,.0f}" if row.figures.tokens_per_s else "-"
        room = row.figures.memory_bytes
        over = ", too much" if room is not None and costs.peak_bytes > room else ""
        cells = str(row.batch), str(row.seq), seconds(costs.step_s), rate, f"{costs.mfu:.1%}"
        lines.append((*cells, human(costs.peak_bytes) + over, seconds(costs.exposed_s)))
    return "\n".join(table(lines, left=()))
