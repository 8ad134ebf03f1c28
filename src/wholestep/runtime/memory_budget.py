"""Fits a step into a budget of memory, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..backend.rank_binding import bind
from ..cost.memory import peak_memory
from ..distributed.launch import World
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..passes.fit_memory import Fitting
from ..passes.schedule import Schedule
from ..plan.strategy import Strategies


def with_kept_gathers(strategies: Strategies, schedule: Schedule | str | None, offload: str | None) -> Strategies:
    """The same with gathered parameters kept, where nothing is said about them: the budget decides.

    Raises:
        PlanError: tensors rest in host memory, or are carried to the next step, which is not counted.
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


@dataclass
class FirstRankFitting:
    """What the first rank's search found, for all ranks. `tell` gives every rank the first one's lines."""

    world: World
    tell: Callable[[list[str]], list[str]]
    known: Fitting | None = None

    def __call__(self, choose: Callable[[], Fitting]) -> Fitting:
        """The first rank's `choose()`.

        Raises:
            PlanError: that failed.
        """
        if self.known is None:
            said = self.tell([self._chosen(choose)] if self.world.rank == 0 else [])
            found: dict[str, Any] = json.loads(said[0])
            if "failed" in found:
                raise PlanError(*found["failed"])
            self.known = Fitting(found["way"], tuple(found["names"]))
        return self.known

    def _chosen(self, choose: Callable[[], Fitting]) -> str:
        try:
            found = choose()
        except PlanError as error:
            return json.dumps({"failed": [error.found, error.needed, error.next_step]})
        return json.dumps({"way": found.way, "names": found.names})


def refuse_larger(final: LocalGraph, budget_bytes: int, world: World) -> None:
    """Raise PlanError when what runs in the end holds more than the budget."""
    found = peak_memory(bound_to_rank(final, world))
    if found.size_bytes > budget_bytes:
        raise PlanError(
            f"the step holds {found.size_bytes} bytes on rank {world.rank}",
            f"at most {budget_bytes} bytes",
            f"give memory_bytes={found.size_bytes} or more: collectives run in the first rank's order, "
            f"which takes {human(found.size_bytes - budget_bytes)} more here",
        )


def bound_to_rank(local: LocalGraph, world: World) -> LocalGraph:
    """What runs on this rank."""
    graph = bind(local, world.coordinate, world.groups, exchange=world.device.startswith("cpu"))
    return replace(local, graph=graph)
