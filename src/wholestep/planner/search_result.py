"""Candidates of a search with their status, and the result of the search."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..errors import WholestepError
from ..mesh import Mesh
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from .bounds import Costs
from .candidates import TemplateKey
from .folded_step import FoldedStep
from .ilp.solve import IlpResult

INFINITE = float("inf")


class Status(StrEnum):
    """The outcome of a candidate."""

    CHOSEN = "chosen"
    SLOWER = "slower"
    """Simulated, and slower than the winner."""
    BOUNDED = "bounded"
    """Its lower bound is above the winner's time."""
    SAME = "same"
    """The same program as another candidate."""
    OVER_AT_REST = "rest"
    """The bytes that it stores between steps are over the budget."""
    OVER_AT_PEAK = "peak"
    """Its peak is over the budget."""
    NO_PLAN = "no plan"


RACED = (Status.CHOSEN, Status.SLOWER, Status.BOUNDED)


@dataclass(frozen=True)
class Candidate:
    """One candidate and what is known of it.

    Args:
        name: unique on `mesh`.
        mesh: the mesh that it is planned on.
        strategies: what is planned; None where there is no plan.
        key: the template; None for a solution of an integer program.
        batches: captured batches that one step trains on.
        status: the outcome.
        batch_s: seconds for each captured batch, infinite where not simulated.
        bound_s: a lower bound of `batch_s`.
        needs_bytes: a lower bound of the peak, the peak once it is simulated.
        costs: of the simulated program.
        rematerialized: tensors that are recomputed or re-gathered to fit the budget.
        why: the error of a candidate without a plan; the name of the candidate with the same program.
        blocks: costs are extrapolated from steps with so many equal layers; None where all layers were simulated.
        symmetric: the strategies of those steps, equal in equal layers.
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

    @property
    def may_regather(self) -> bool:
        """True if gathered parameters are kept, and may be re-gathered to save memory."""
        data = self.strategies.data if self.strategies else None
        return data is not None and data.reshard_after_forward is False

    @property
    def rank(self) -> tuple[bool, float, float, int]:
        """Sorts candidates: by time for a batch, then by bytes."""
        known = self.status in (Status.CHOSEN, Status.SLOWER)
        return not known, self.batch_s if known else INFINITE, self.bound_s if not known else 0.0, self.needs_bytes


@dataclass(frozen=True)
class SearchResult:
    """The winner's plan, and all candidates, the best first. `folded` is the step that costs were extrapolated from,
    `solved` the first integer program.
    """

    plan: Plan
    best: Candidate
    rows: tuple[Candidate, ...]
    budget_bytes: int | None
    folded: FoldedStep | None = None
    solved: IlpResult | None = None

    @property
    def bound_s(self) -> float:
        """Seconds for a batch that no schedule of any candidate in the race is faster than."""
        return min(row.bound_s for row in self.rows if row.status in RACED)

    @property
    def simulated(self) -> int:
        """How many candidates were simulated."""
        return sum(row.costs is not None for row in self.rows)

    @property
    def extrapolated(self) -> int:
        """How many of these with few layers only."""
        return sum(row.costs is not None and row.blocks is not None for row in self.rows)

    @property
    def pruned(self) -> int:
        """How many lost without a simulation."""
        return sum(row.status in (Status.BOUNDED, Status.SAME, Status.OVER_AT_REST) for row in self.rows)


def first_line(error: WholestepError) -> str:
    """The finding of an error, and what was needed."""
    found = error.found.splitlines()[0]
    return f"{found}; needed: {error.needed}" if error.needed else found
