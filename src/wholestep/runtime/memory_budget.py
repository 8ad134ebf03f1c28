"""The budget of memory of a step: the first rank chooses what to rematerialize, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..backend.gloo.exchange import exchanges
from ..backend.rank_binding import bind
from ..cost.memory import peak_memory
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..passes.fit_memory import Fitting
from ..passes.schedule import Schedule
from ..plan.strategies import Strategies


def with_kept_gathers(strategies: Strategies, schedule: Schedule | str | None, offload: str | None) -> Strategies:
    """The same with gathered parameters kept, unless `reshard_after_forward` is given: the budget decides.

    Raises:
        PlanError: offload, or a schedule across steps: their memory is not counted.
    """
    data = strategies.data
    if schedule == "across_steps" or (isinstance(schedule, Schedule) and schedule.across_steps):
        raise PlanError("memory_bytes with a schedule across steps", "one of them", 'give schedule="auto"')
    if offload is not None:
        raise PlanError(f"memory_bytes with offload={offload!r}", "one of them", "drop memory_bytes")
    if data is None or data.reshard_after_forward is not None:
        return strategies
    keeping = replace(data, reshard_after_forward=False)
    return Strategies(tuple(keeping if part is data else part for part in strategies.parts))


@dataclass(frozen=True)
class _Fitted:
    """What the first rank broadcasts: its fitting, or the parts of its error."""

    fitting: Fitting | None = None
    failure: tuple[str, ...] = ()


def _attempt(choose: Callable[[], Fitting]) -> _Fitted:
    try:
        return _Fitted(choose())
    except PlanError as error:
        return _Fitted(failure=(error.found, error.needed, error.next_step))


@dataclass
class FirstRankFitting:
    """The first rank's fitting, for all ranks."""

    rendezvous: Rendezvous
    label: str
    known: Fitting | None = None

    def __call__(self, choose: Callable[[], Fitting]) -> Fitting:
        """The first rank's `choose()`.

        Raises:
            PlanError: that failed.
        """
        if self.known is None:
            own = _attempt(choose) if self.rendezvous.rank == 0 else _Fitted()
            found: _Fitted = self.rendezvous.broadcast(self.label, own, "what it rematerializes")
            if found.fitting is None:
                raise PlanError(*found.failure)
            self.known = found.fitting
        return self.known


def refuse_larger(final: LocalGraph, budget_bytes: int, world: World) -> None:
    """Raise PlanError when the final program holds more than the budget."""
    found = peak_memory(bound_to_rank(final, world))
    if found.size_bytes > budget_bytes:
        raise PlanError(
            f"the step holds {found.size_bytes} bytes on rank {world.rank}",
            f"at most {budget_bytes} bytes",
            f"give memory_bytes={found.size_bytes} or more: collectives run in the first rank's order, "
            f"which takes {human(found.size_bytes - budget_bytes)} more here",
        )


def bound_to_rank(local: LocalGraph, world: World) -> LocalGraph:
    """The program with the sizes of this rank."""
    graph = bind(local, world.coordinate, world.groups, exchange=exchanges(world.device))
    return replace(local, graph=graph)
