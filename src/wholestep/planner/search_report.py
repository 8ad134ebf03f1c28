"""The candidates of a search and why each lost: as notes of the plan, and as a table."""

from __future__ import annotations

from dataclasses import replace

from ..graph.text import human, table
from ..graph.text import seconds as shown_seconds
from ..plan.decision import Objective
from ..plan.plan import Plan
from .search_result import Candidate, SearchResult, Status

_SHOWN = {Status.OVER_AT_PEAK: "does not fit", Status.SLOWER: ""}


def explained(found: SearchResult) -> Plan:
    """The winner's plan with its objective and, as notes, why each other candidate lost."""
    best = found.best
    model = (found.solved.solution.step_us / 1e6, found.solved.solution.bound_us / 1e6) if found.solved else (0.0, 0.0)
    objective = Objective(
        best.batch_s, found.bound_s, best.needs_bytes, found.budget_bytes, best.rematerialized, *model
    )
    return replace(found.plan, objective=objective).with_notes(*notes(found))


def notes(found: SearchResult) -> tuple[str, ...]:
    """One line for the winner and one for each other candidate."""
    best = found.best
    several = len({row.mesh for row in found.rows}) > 1
    head = (
        f"Auto chose {_name(best, several)} of {len(found.rows)} candidates ({found.simulated} simulated{_few(found)}, "
        f"{found.pruned} left out by a bound): {_batch(best)} by simulation, {human(best.needs_bytes)} at most on a "
        f"rank{'' if found.budget_bytes is None else f' of {human(found.budget_bytes)}'}; no schedule of any takes "
        f"less than {shown_seconds(found.bound_s)}"
    )
    lines = [head, *([f"solved: {found.solved}"] if found.solved else [])]
    lines += [f"{_name(row, several)}: {_lost(row, found)}" for row in found.rows if row.status is not Status.CHOSEN]
    if found.extrapolated:
        lines.append(_extrapolated(found))
    if best.rematerialized:
        lines.append(
            f"{len(best.rematerialized)} tensors are rematerialized in the backward to fit: compile with "
            f"memory_bytes={found.budget_bytes}, or run Recompute"
        )
    return tuple(lines)


def show(found: SearchResult) -> str:
    """The simulated candidates as a table, the winner first; below it the others, with the reason."""
    head = ("candidate", "mesh", "stored", "peak", "exposed", "per batch", "at least", "")
    cells = [head, *(_cells(row) for row in found.rows if row.costs is not None)]
    left = [f"{row.name} on {row.mesh}: {_lost(row, found)}" for row in found.rows if row.costs is None]
    return "\n".join([*table(cells), *left, *([_extrapolated(found)] if found.extrapolated else [])])


def _few(found: SearchResult) -> str:
    return f", {found.extrapolated} of them with few layers" if found.extrapolated else ""


def _extrapolated(found: SearchResult) -> str:
    return f"about: extrapolated from steps with few of {found.folded}; the others, simulated, are of all layers"


def _cells(row: Candidate) -> tuple[str, ...]:
    found = row.costs
    assert found is not None, "only rows with costs have cells"
    again, about = (
        f", {len(row.rematerialized)} tensors rematerialized" if row.rematerialized else "",
        "about " if row.blocks else "",
    )
    return (
        row.name, str(row.mesh), human(found.rest_bytes), about + human(found.peak_bytes),
        f"{found.exposed_s / found.step_s:.0%}" if found.step_s else "-", about + shown_seconds(row.batch_s),
        shown_seconds(row.bound_s), _SHOWN.get(row.status, row.status.value) + again,
    )  # fmt: skip


def _lost(row: Candidate, found: SearchResult) -> str:
    best, budget = found.best, found.budget_bytes or 0
    if row.status is Status.NO_PLAN:
        return f"no plan: {row.why}"
    if row.status is Status.SAME:
        return f"the same program as {row.why}"
    if row.status is Status.OVER_AT_REST:
        return f"keeps {human(row.needs_bytes)} between steps, {human(row.needs_bytes - budget)} too much"
    if row.status is Status.OVER_AT_PEAK:
        return f"holds {_about(row)}{human(row.needs_bytes)} at most, {human(row.needs_bytes - budget)} too much"
    if row.status is Status.BOUNDED:
        return f"takes {shown_seconds(row.bound_s)} for a batch at least"
    if row.batch_s > best.batch_s:
        return f"{_batch(row)}, {row.batch_s / best.batch_s - 1:.1%} more"
    return f"{_batch(row)} too, and no fewer bytes"


def _batch(row: Candidate) -> str:
    return f"{_about(row)}{shown_seconds(row.batch_s)} for a batch"


def _about(row: Candidate) -> str:
    return "about " if row.blocks and row.batch_s < float("inf") else ""


def _name(row: Candidate, several: bool) -> str:
    return f"{row.name} on mesh {row.mesh}" if several else row.name
