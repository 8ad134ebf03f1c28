"""`wholestep sizes`: one step at several sizes of its batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import wholestep as ws
from wholestep.cli import planning
from wholestep.cli.hf import load, with_sizes
from wholestep.cli.screen import Screen
from wholestep.cli.shared_options import SharedOptions
from wholestep.cli.simulate_command import numbers_of
from wholestep.cli.target import refuse, write_output
from wholestep.graph.text import human, seconds, table
from wholestep.report.figures import Figures


@dataclass(frozen=True)
class SizeRow:
    """The step for a batch of `batch` sequences of `seq` tokens."""

    batch: int
    seq: int
    timeline: ws.Timeline
    figures: Figures


def numbers(option: str, text: str | None, least: int) -> tuple[int, ...]:
    """The numbers of an option; none without it."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        refuse(f"--{option} {text}: needed numbers of at least {least}, as 2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def simulated(
    shown: Screen, step: SharedOptions, mesh: str, hardware: ws.Hardware, batches: Sequence[int], seqs: Sequence[int],
    out: Path | None,
) -> str:  # fmt: skip
    """A table with a line for each size; written to `out` as JSON."""
    spec = replace(step, seq=str(max(seqs)) if seqs else None).spec(max(batches, default=None))
    loaded = load(shown, None, spec)
    request = planning.plan_request(loaded, mesh, hardware, hardware, step)
    (longest,) = {tokens.shape[1] for tokens in loaded.args[2]["tokens"]}
    rows = list[SizeRow]()
    for batch, seq in product(batches or (1,), seqs or (longest,)):
        shown.note(f"batch {batch}, seq {seq}")
        of_size = replace(request, target=with_sizes(loaded, batch, seq))
        rows.append(SizeRow(batch, seq, *planning.simulated(shown, of_size)))
    body: dict[str, Any] = {
        "model": loaded.name, "mesh": mesh, "hardware": str(hardware), "backend": step.backend, "stack": step.stack,
        "sizes": [{"batch": row.batch, "seq": row.seq, **numbers_of(row.timeline, row.figures)} for row in rows],
    }  # fmt: skip
    write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    return f"{loaded.name} on mesh {mesh}, {planning.style_of(step, mesh)}, {request.on}\n{show(rows)}"


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
