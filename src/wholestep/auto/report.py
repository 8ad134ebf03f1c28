"""What a search considered and why each candidate lost: as notes of the plan, and as a table."""

from __future__ import annotations

from dataclasses import replace

from ..graph.text import human, table
from ..graph.text import seconds as shown_seconds
from ..plan.plan import Objective, Plan
from .search import Considered, Found


def explained(found: Found) -> Plan:
    """The winner's plan, with what it was chosen for and, as notes, why each of the others was not."""
    best = found.best
    model = (found.solved.solution.step_us / 1e6, found.solved.solution.bound_us / 1e6) if found.solved else (0.0, 0.0)
    objective = Objective(best.batch_s, found.bound_s, best.needs_bytes, found.budget_bytes, best.again, *model)
    return replace(found.plan, objective=objective).with_notes(*notes(found))


def notes(found: Found) -> tuple[str, ...]:
    """One line for the winner and one for each other candidate, in words."""
    best = found.best
    several = len({row.mesh for row in found.rows}) > 1
    head = (
        f"Auto chose {_name(best, several)} of {len(found.rows)} candidates ({found.simulated} simulated{_few(found)}, "
        f"{found.pruned} left out by a bound): {_batch(best)} by simulation, {human(best.needs_bytes)} at most on a "
        f"rank{'' if found.budget_bytes is None else f' of {human(found.budget_bytes)}'}; no schedule of any takes "
        f"less than {shown_seconds(found.bound_s)}"
    )
    lines = [head, *([f"solved: {found.solved}"] if found.solved else [])]
    lines += [f"{_name(row, several)}: {_lost(row, found)}" for row in found.rows if row.fate != "chosen"]
    if found.extrapolated:
        lines.append(_extrapolated(found))
    if best.again:
        lines.append(
            f"{len(best.again)} values are made again in the backward to fit: compile with "
            f"memory_bytes={found.budget_bytes}, or run Recompute"
        )
    return tuple(lines)


def show(found: Found) -> str:
    """The candidates as a table, the winner first, and what was left out below."""
    head = ("candidate", "mesh", "at rest", "peak", "exposed", "per batch", "at least", "")
    cells = [head, *(_cells(row) for row in found.rows if row.costs is not None)]
    left = [f"{row.name} on {row.mesh}: {_lost(row, found)}" for row in found.rows if row.costs is None]
    return "\n".join([*table(cells), *left, *([_extrapolated(found)] if found.extrapolated else [])])


def _few(found: Found) -> str:
    return f", {found.extrapolated} of them with few layers" if found.extrapolated else ""


def _extrapolated(found: Found) -> str:
    return f"about: extrapolated from steps with few of {found.short}; the others, simulated, are of all layers"


def _cells(row: Considered) -> tuple[str, ...]:
    found = row.costs
    assert found is not None, "only rows with costs have cells"
    again, about = f", {len(row.again)} values made again" if row.again else "", "about " if row.blocks else ""
    return (
        row.name, str(row.mesh), human(found.rest_bytes), about + human(found.peak_bytes),
        f"{found.exposed_s / found.step_s:.0%}" if found.step_s else "-", about + shown_seconds(row.batch_s),
        shown_seconds(row.bound_s), {"peak": "does not fit", "slower": ""}.get(row.fate, row.fate) + again,
    )  # fmt: skip


def _lost(row: Considered, found: Found) -> str:
    best, budget = found.best, found.budget_bytes or 0
    if row.fate == "no plan":
        return f"no plan: {row.why}"
    if row.fate == "same":
        return f"the same program as {row.why}"
    if row.fate == "rest":
        return f"keeps {human(row.needs_bytes)} between steps, {human(row.needs_bytes - budget)} too much"
    if row.fate == "peak":
        return f"holds {_about(row)}{human(row.needs_bytes)} at most, {human(row.needs_bytes - budget)} too much"
    if row.fate == "bounded":
        return f"takes {shown_seconds(row.bound_s)} for a batch at least"
    if row.batch_s > best.batch_s:
        return f"{_batch(row)}, {row.batch_s / best.batch_s - 1:.1%} more"
    return f"{_batch(row)} too, and no fewer bytes"


def _batch(row: Considered) -> str:
    return f"{_about(row)}{shown_seconds(row.batch_s)} for a batch"


def _about(row: Considered) -> str:
    return "about " if row.blocks and row.batch_s < float("inf") else ""


def _name(row: Considered, several: bool) -> str:
    return f"{row.name} on mesh {row.mesh}" if several else row.name
