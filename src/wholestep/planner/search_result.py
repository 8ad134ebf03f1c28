"""Candidates of a search with their status, and the result: why each won or lost, as notes and as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from ..errors import WholestepError
from ..graph.text import human, table
from ..graph.text import seconds as shown_seconds
from ..mesh import Mesh
from ..plan.decision import NO_SAVING, Objective, Saving
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from .bounds import Costs
from .candidates import TemplateKey
from .folded_step import FoldedStep
from .ilp.solve import IlpResult

INFINITE = float("inf")
Watch = Callable[[str], None]


class Status(StrEnum):
    """The outcome of a candidate."""

    CHOSEN = "chosen"
    SLOWER = "slower"  # simulated, and slower than the winner
    BOUNDED = "bounded"  # its lower bound is above the winner's time
    SAME = "same"  # the same program as another candidate
    OVER_AT_REST = "rest"  # the bytes that it stores between steps are over the budget
    OVER_AT_PEAK = "peak"  # its peak is over the budget
    NO_PLAN = "no plan"


RACED = (Status.CHOSEN, Status.SLOWER, Status.BOUNDED)


@dataclass(frozen=True)
class Candidate:
    """One candidate and what is known of it.

    Args:
        name: unique on `mesh`.
        strategies: what is planned; None where there is no plan.
        key: the template; None for a solution of an integer program.
        batches: captured batches that one step trains on.
        batch_s: seconds for each captured batch, infinite where not simulated.
        bound_s: a lower bound of `batch_s`.
        needs_bytes: a lower bound of the peak, the peak once it is simulated.
        rematerialized: tensors that are recomputed or re-gathered to fit the budget.
        why: the error of a candidate without a plan; the name of the candidate with the same program.
        blocks: costs are extrapolated from steps with so many equal layers; None where all layers were simulated.
        symmetric: the strategies of those steps, equal in equal layers.
        saving: in a candidate that is tried because the one without is over the budget.
        pieces: of a batch, in a candidate that is tried because the one named `uncut` is over the budget.
    """

    name: str
    mesh: Mesh
    strategies: Strategies | None
    key: TemplateKey | None = None
    batches: int = 1
    status: Status = Status.SLOWER
    batch_s: float = INFINITE
    bound_s: float = 0.0
    needs_bytes: int = 0
    costs: Costs | None = None
    rematerialized: tuple[str, ...] = ()
    why: str = ""
    blocks: tuple[int, int] | None = None
    symmetric: Strategies | None = None
    pieces: int = 1
    uncut: str = ""
    saving: Saving = NO_SAVING

    def priced(self, priced: Costs) -> Candidate:
        """With its costs."""
        return replace(self, costs=priced, batch_s=priced.step_s / self.batches, needs_bytes=priced.peak_bytes)

    @property
    def order(self) -> str | None:
        """Of the blocks of a pipeline, by name; None without stages."""
        pipe = self.strategies.pipeline if self.strategies else None
        return None if pipe is None else pipe.schedule

    @property
    def may_regather(self) -> bool:
        """True if gathered parameters are kept, and may be re-gathered to save memory."""
        data = self.strategies.data if self.strategies else None
        return data is not None and data.reshard_after_forward is False

    @property
    def rank(self) -> tuple[bool, float, float, int]:
        """Sorts candidates: by time for a batch, then by bytes."""
        timed = self.status in (Status.CHOSEN, Status.SLOWER)
        return not timed, self.batch_s if timed else INFINITE, self.bound_s if not timed else 0.0, self.needs_bytes


@dataclass(frozen=True)
class SearchResult:
    """The winner's plan, and all candidates, the best first. `folded` is the step that costs were extrapolated from,
    `solved` the first integer program, `by` what was asked to choose.
    """

    plan: Plan
    best: Candidate
    rows: tuple[Candidate, ...]
    budget_bytes: int | None
    folded: FoldedStep | None = None
    solved: IlpResult | None = None
    by: str = "Auto"

    @property
    def bound_s(self) -> float:
        """Seconds for a batch that no schedule of any candidate in the race is faster than."""
        return min(row.bound_s for row in self.rows if row.status in RACED)


def first_line(error: WholestepError) -> str:
    """The finding of an error, and what was needed."""
    finding = error.found.splitlines()[0]
    return f"{finding}; needed: {error.needed}" if error.needed else finding


def unwatched(name: str) -> None:
    """For a search that nobody watches."""


# -- report ------------------------------------------------------------------------------------------
_SHOWN = {Status.OVER_AT_PEAK: "does not fit", Status.SLOWER: ""}


def explained(search: SearchResult) -> Plan:
    """The winner's plan with its objective and, as notes, why each other candidate lost."""
    best = search.best
    solution = search.solved.solution if search.solved else None
    model = (solution.step_us / 1e6, solution.bound_us / 1e6) if solution else (0.0, 0.0)
    memory = best.needs_bytes, search.budget_bytes, best.rematerialized, best.saving
    objective = Objective(best.batch_s, search.bound_s, *memory, *model)
    return replace(search.plan, objective=objective).with_notes(*notes(search))


def notes(search: SearchResult) -> tuple[str, ...]:
    """One line for the winner and one for each other candidate."""
    best = search.best
    several = len({row.mesh for row in search.rows}) > 1
    simulated, few = [row for row in search.rows if row.costs is not None], _few_layers(search)
    pruned = sum(row.status in (Status.BOUNDED, Status.SAME, Status.OVER_AT_REST) for row in search.rows)
    budget = "" if search.budget_bytes is None else f" of {human(search.budget_bytes)}"
    head = (
        f"{search.by} chose {_name(best, several)} of {len(search.rows)} candidates ({len(simulated)} simulated"
        f"{f', {few} of them with few layers' if few else ''}, {pruned} left out by a bound): {_batch(best)} by "
        f"simulation, {human(best.needs_bytes)} at most on a rank{budget}; no schedule of any takes less than "
        f"{shown_seconds(search.bound_s)}"
    )
    lines = [head, *([f"solved: {search.solved}"] if search.solved else [])]
    lines += [f"{_name(row, several)}: {_lost(row, search)}" for row in search.rows if row.status is not Status.CHOSEN]
    if few:
        lines.append(_extrapolated(search))
    if best.rematerialized:
        lines.append(
            f"{len(best.rematerialized)} tensors are rematerialized in the backward to fit: compile with "
            f"memory_bytes={search.budget_bytes}, or run Recompute"
        )
    return tuple(lines)


def show(search: SearchResult) -> str:
    """The simulated candidates as a table, the winner first; below it the others, with the reason."""
    head = ("candidate", "mesh", "stored", "peak", "exposed", "per batch", "at least", "")
    cells = [head, *(_cells(row) for row in search.rows if row.costs is not None)]
    unsimulated = [f"{row.name} on {row.mesh}: {_lost(row, search)}" for row in search.rows if row.costs is None]
    return "\n".join([*table(cells), *unsimulated, *([_extrapolated(search)] if _few_layers(search) else [])])


def _few_layers(search: SearchResult) -> int:
    """How many candidates were simulated with few layers only."""
    return sum(row.costs is not None and row.blocks is not None for row in search.rows)


def _extrapolated(search: SearchResult) -> str:
    return f"about: extrapolated from steps with few of {search.folded}; the others, simulated, are of all layers"


def _cells(row: Candidate) -> tuple[str, ...]:
    costs = row.costs
    assert costs is not None, "only rows with costs have cells"
    again, about = (
        f", {len(row.rematerialized)} tensors rematerialized" if row.rematerialized else "",
        "about " if row.blocks else "",
    )
    return (
        row.name, str(row.mesh), human(costs.rest_bytes), about + human(costs.peak_bytes),
        f"{costs.exposed_s / costs.step_s:.0%}" if costs.step_s else "-", about + shown_seconds(row.batch_s),
        shown_seconds(row.bound_s), _SHOWN.get(row.status, row.status.value) + again,
    )  # fmt: skip


def _lost(row: Candidate, search: SearchResult) -> str:
    best, budget = search.best, search.budget_bytes or 0
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
