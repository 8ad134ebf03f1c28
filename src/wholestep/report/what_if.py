"""Costs of the same strategies on another mesh, another machine or with another batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..cost.software import OWN, Software
from ..errors import PlanError
from ..graph.graph import TrainGraph
from ..graph.text import seconds, table
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..plan.plan import Plan
from ..planner.candidates import Template
from .compare import PlanRow, compare, cost_cells

_HEAD = ("what if", "mesh", "stored", "peak", "sent/step", "step", "exposed", "batches", "per batch", "of this plan's")


@dataclass(frozen=True)
class WhatIfCase:
    """One change to a plan. `batch_parts`: the batch of `graph` in batches of the plan, 2 if it is twice as large."""

    name: str
    mesh: Mesh | None = None
    hardware: Hardware | None = None
    graph: TrainGraph | None = None
    batch_parts: float = 1.0


@dataclass(frozen=True)
class WhatIf:
    """The costs of a case, its seconds for a batch of the plan, and that time relative to the plan itself."""

    case: WhatIfCase
    mesh: Mesh
    row: PlanRow
    batch_s: float
    times: float


def what_if(
    plan: Plan, graph: TrainGraph, hardware: Hardware, cases: Sequence[WhatIfCase],
    passes_on: Callable[[Hardware], Sequence[Pass]] | None = None, software: Software = OWN,
) -> list[WhatIf]:  # fmt: skip
    """The plan itself, then each case; the row of a case that cannot be planned has the error. `passes_on` gives the
    passes that programs go through, by default those of `software`, which runs them.
    """
    if plan.strategies is None:
        text = f"the plan does not hold what made it ({plan.strategy})"
        raise PlanError(text, "a plan of strategies that a file can store", "plan again")
    rows: list[WhatIf] = []
    for case in (WhatIfCase("this plan"), *cases):
        mesh, template = case.mesh or plan.mesh, Template(case.name, plan.strategies.parts)
        on = case.hardware or hardware
        row = compare(case.graph or graph, mesh, [template], on, None, passes_on and passes_on(on), software)[0]
        batch_s = row.batch_s / case.batch_parts
        times = batch_s / (rows[0].batch_s if rows else batch_s) if row.costs else float("inf")
        rows.append(WhatIf(case, mesh, row, batch_s, times))
    return rows


def other_sizes(mesh: Mesh) -> list[WhatIfCase]:
    """Twice and half as many ranks on the first axis larger than one."""
    axis = next((axis for axis in mesh.axes if axis.size > 1), mesh.axes[0])
    cases: list[WhatIfCase] = []
    for name, size in (("twice the ranks", 2 * axis.size), ("half the ranks", axis.size // 2)):
        if size:
            other = tuple(replace(mesh_axis, size=size) if mesh_axis == axis else mesh_axis for mesh_axis in mesh.axes)
            cases.append(WhatIfCase(f"{name} on {axis.name}", Mesh(other)))
    return cases


def show(rows: Sequence[WhatIf]) -> str:
    """The rows as a text table."""
    cells = [_HEAD, *(_cells(row) for row in rows if row.row.costs is not None)]
    failed = [f"{row.case.name} on {row.mesh}: no plan: {row.row.error}" for row in rows if row.row.costs is None]
    return "\n".join([*table(cells), *failed])


def _cells(row: WhatIf) -> tuple[str, ...]:
    stored, peak, sent, _, step, exposed = cost_cells(row.row)
    batches, batch = f"{row.row.batches * row.case.batch_parts:,.9g}", seconds(row.batch_s)
    return row.case.name, str(row.mesh), stored, peak, sent, step, exposed, batches, batch, f"{row.times:.2f}"
