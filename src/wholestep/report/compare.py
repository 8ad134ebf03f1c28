"""Compares templates on one graph by their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..cost.software import OWN, Software
from ..errors import WholestepError
from ..graph.graph import TrainGraph
from ..graph.text import human, seconds, table
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..passes.fit_memory import FitMemory
from ..plan.strategies import compose
from ..planner.bounds import Costs, costs
from ..planner.candidates import Template, batches, templates
from ..planner.folded_step import FoldedStep, fold_step
from ..planner.recompute_kinds import passes_of
from ..planner.resolve import planned_program
from ..planner.search_result import first_line

__all__ = ["Costs", "PlanRow", "Template", "as_json", "compare", "costs", "show", "templates"]


@dataclass(frozen=True)
class PlanRow:
    """One template: its costs, or the error. `batches`: captured batches in a step of the mesh. `layers`: the costs are
    extrapolated from steps with so many of the equal layers.
    """

    name: str
    batches: int
    costs: Costs | None
    error: str = ""
    layers: tuple[int, int] | None = None

    @property
    def batch_s(self) -> float:
        """Seconds for each captured batch, by which rows are ranked."""
        return self.costs.step_s / self.batches if self.costs else float("inf")


def compare(
    graph: TrainGraph,
    mesh: Mesh,
    chosen: Sequence[Template],
    hardware: Hardware | None = None,
    watch: Callable[[str], None] | None = None,
    passes: Sequence[Pass] | None = None,
    software: Software = OWN,
) -> list[PlanRow]:
    """A row for each template, the fastest for each batch first, errors last.

    Costs of a deep step are extrapolated from steps with few of its equal layers, except those of the fastest template.
    `watch` is called with the name of each template before it is planned. Programs go through `passes`, the standard
    pipeline of `software` if None, which runs them.
    """
    hardware, by_name = hardware or Hardware.default(), {template.name: template for template in chosen}
    passes = passes_of("none", hardware, software=software) if passes is None else passes
    all_layers = any(isinstance(p, FitMemory) for p in passes)  # a budget is for all layers
    short, rows = None if all_layers else fold_step(graph, hardware, software=software), list[PlanRow]()
    for template in chosen:
        if watch is not None:
            watch(template.name)
        rows.append(_row(graph, mesh, template, hardware, passes, software, short))
    rows = sorted(rows, key=lambda row: row.batch_s)
    while rows and rows[0].layers is not None:
        rows[0] = _row(graph, mesh, by_name[rows[0].name], hardware, passes, software)
        rows = sorted(rows, key=lambda row: row.batch_s)
    return rows


def _row(
    graph: TrainGraph, mesh: Mesh, template: Template, hardware: Hardware, passes: Sequence[Pass], software: Software,
    short: FoldedStep | None = None,
) -> PlanRow:  # fmt: skip
    """A row with all layers, or extrapolated if `short` can."""
    if isinstance(template.strategies, WholestepError):
        return PlanRow(template.name, 1, None, first_line(template.strategies))
    strategies, layers = compose(template.strategies), None
    try:
        layers = short.blocks(mesh, strategies) if short else None
        graphs = [short.with_blocks(n) for n in layers] if short and layers else [graph]
        programs = [planned_program(step, mesh, strategies, hardware=hardware) for step in graphs]
        if short and layers:
            priced = short.priced(layers, programs, passes)
        else:
            priced = costs(programs[0][1], programs[0][0], hardware, passes, software)
    except WholestepError as error:
        return (
            _row(graph, mesh, template, hardware, passes, software)
            if layers
            else PlanRow(template.name, 1, None, first_line(error))
        )
    return PlanRow(template.name, batches(strategies, mesh), priced, layers=layers)


def show(rows: Sequence[PlanRow], what: str = "template", batch_tokens: float | None = None, ranks: int = 1) -> str:
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
    failed = [f"{row.name}: no plan: {row.error}" for row in rows if row.costs is None]
    about = ["about: extrapolated from steps with few of the equal layers"] if any(row.layers for row in rows) else []
    return "\n".join([*table(cells), *failed, *about])


def _cells(row: PlanRow, batch_tokens: float | None, ranks: int) -> tuple[str, ...]:
    about, priced = "about " if row.layers else "", row.costs
    assert priced is not None, "only rows with costs have cells"
    exposed = f"{priced.exposed_s / priced.step_s:.0%}" if priced.step_s else "-"
    rates = () if batch_tokens is None else (f"{batch_tokens / row.batch_s / ranks:,.0f}", f"{priced.mfu:.1%}")
    return (
        row.name, human(priced.rest_bytes), about + human(priced.peak_bytes), human(priced.sent_bytes),
        str(priced.collectives), about + seconds(priced.step_s), exposed, str(row.batches),
        about + seconds(row.batch_s), *rates,
    )  # fmt: skip


def as_json(rows: Sequence[PlanRow], mesh: Mesh, model: str, hardware: Hardware | None = None) -> dict[str, Any]:
    """The rows with model, mesh and machine, in bytes and seconds."""
    return {
        "format": "wholestep comparison",
        "version": 2,
        "model": model,
        "mesh": str(mesh),
        "hardware": (hardware or Hardware.default()).name,
        "rows": [
            {
                "template": r.name,
                "batches": r.batches,
                "error": r.error or None,
                **(asdict(r.costs) | {"extrapolated_from_layers": r.layers} if r.costs else {}),
            }
            for r in rows
        ],
    }
