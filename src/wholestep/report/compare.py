"""Compares templates on one graph by their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..cost.software import OWN, Software
from ..graph.graph import TrainGraph
from ..graph.text import human, seconds, table
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..passes.fit_memory import FitMemory
from ..planner.bounds import Costs, costs
from ..planner.candidates import Template, templates
from ..planner.evaluate import Evaluator
from ..planner.folded_step import fold_step
from ..planner.recompute_kinds import passes_of
from ..planner.search_result import Candidate

__all__ = ["Candidate", "Costs", "Template", "as_json", "compare", "costs", "show", "templates"]


def compare(
    graph: TrainGraph, mesh: Mesh, chosen: Sequence[Template], hardware: Hardware | None = None,
    watch: Callable[[str], None] | None = None, passes: Sequence[Pass] | None = None, software: Software = OWN,
) -> list[Candidate]:  # fmt: skip
    """A row for each template, the fastest for each batch first, errors last.

    Costs of a deep step are extrapolated from steps with few of its equal layers, except those of the fastest template.
    `watch` is called with the name of each template before it is planned. Programs go through `passes`, the standard
    pipeline of `software` if None, which runs them.
    """
    hardware = hardware or Hardware.default()
    passes = tuple(passes_of("none", hardware, software=software) if passes is None else passes)
    all_layers = any(isinstance(p, FitMemory) for p in passes)  # a budget is for all layers
    folded = None if all_layers else fold_step(graph, hardware, software=software)
    evaluator = Evaluator(graph, hardware, None, passes, folded=folded, software=software)
    rows = list[Candidate]()
    for template in chosen:
        if watch is not None:
            watch(template.name)
        rows.append(evaluator.evaluated(evaluator.candidate(mesh, template)))
    rows.sort(key=lambda row: row.batch_s)
    while rows and rows[0].blocks is not None:
        rows[0] = evaluator.evaluated(replace(rows[0], blocks=None))
        rows.sort(key=lambda row: row.batch_s)
    return rows


def show(rows: Sequence[Candidate], what: str = "template", batch_tokens: float | None = None, ranks: int = 1) -> str:
    """The rows as a text table; `what` is the title of the first column. With the tokens in a captured batch also
    throughput on each of `ranks`, and utilization.
    """
    head = (what, "stored", "peak", "sent/step", "collectives", "step", "exposed", "batches", "per batch")
    rates = () if batch_tokens is None else ("tokens/s/GPU", "MFU")
    waits = any(row.costs is not None and row.costs.idle_s for row in rows)
    cells = [(*head, *rates), *(_cells(row, batch_tokens, ranks) for row in rows if row.costs is not None)]
    if waits:
        bubbles = [f"{row.costs.idle_s / row.costs.step_s:.0%}" for row in rows if row.costs is not None]
        cells = [(*row, last) for row, last in zip(cells, ["bubble", *bubbles], strict=True)]
    failed = [f"{row.name}: no plan: {row.why}" for row in rows if row.costs is None]
    about = ["about: extrapolated from steps with few of the equal layers"] if any(row.blocks for row in rows) else []
    return "\n".join([*table(cells), *failed, *about])


def _cells(row: Candidate, batch_tokens: float | None, ranks: int) -> tuple[str, ...]:
    about, priced = "about " if row.blocks else "", row.costs
    assert priced is not None, "only rows with costs have cells"
    exposed = f"{priced.exposed_s / priced.step_s:.0%}" if priced.step_s else "-"
    rates = () if batch_tokens is None else (f"{batch_tokens / row.batch_s / ranks:,.0f}", f"{priced.mfu:.1%}")
    return (
        row.name, human(priced.rest_bytes), about + human(priced.peak_bytes), human(priced.sent_bytes),
        str(priced.collectives), about + seconds(priced.step_s), exposed, str(row.batches),
        about + seconds(row.batch_s), *rates,
    )  # fmt: skip


def as_json(rows: Sequence[Candidate], mesh: Mesh, model: str, hardware: Hardware | None = None) -> dict[str, Any]:
    """The rows with model, mesh and machine, in bytes and seconds."""
    costs = [asdict(r.costs) | {"extrapolated_from_layers": r.blocks} if r.costs else {} for r in rows]
    return {
        "format": "wholestep comparison", "version": 2, "model": model, "mesh": str(mesh),
        "hardware": (hardware or Hardware.default()).name,
        "rows": [{"template": r.name, "batches": r.batches, "error": r.why or None, **priced}
                 for r, priced in zip(rows, costs, strict=True)],
    }  # fmt: skip
