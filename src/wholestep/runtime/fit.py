"""Fits a step into a budget of memory, the same on all ranks: what is gathered or computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..backend.bind import bind
from ..cost.memory import peak_memory
from ..cost.schedule import simulate
from ..cost.speeds import Speeds
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..passes.again import made_again
from ..passes.base import Pass, run_passes
from ..passes.choose import Choice, choices
from ..passes.recompute import Peak, choose, held_by, too_small
from ..passes.saved import Saved
from ..passes.schedule import Schedule, schedules
from ..plan.strategy import Strategies
from .launch import World

Agreed = Callable[[Callable[[], list[str]]], list[str]]
_FAILED = "failed"
_HIDDEN = 0.1
"""What a gather costs of the time for which it keeps the wire, where most of that is hidden."""


def budgeted(strategies: Strategies, schedule: Schedule | str | None, offload: str | None) -> Strategies:
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


@dataclass(frozen=True)
class Fit:
    """How a step is fitted: into `budget_bytes` on each rank, gathering again where `gathers` allows it.

    `schedule` merges and orders collectives, in smaller buckets and with less in flight where that is what it takes,
    as far as it does not give their sizes; passes `after` follow. What counts is what then runs on this rank of
    `world`.
    """

    budget_bytes: int
    gathers: bool
    world: World
    machine: Speeds
    schedule: Schedule | None
    after: Sequence[Pass]

    def __call__(self, local: LocalGraph, agreed: Agreed) -> tuple[LocalGraph, Schedule | None]:
        """`local` as it is if it fits, else with values made again in the backward: those that the first rank chose,
        whatever its batch, and more that are computed where this rank's batch asks for it; and how to schedule it.
        `agreed` gives what the first rank's call of the function it is given returned.

        Raises:
            PlanError: it cannot be made to fit.
        """
        said = agreed(lambda: self._chosen(local))
        if said[0] == _FAILED:
            raise PlanError(*said[1:])
        schedule = schedules(self.schedule)[int(said[0])]
        local = made_again(Saved(local, gathers=self.gathers), said[1:]) if said[1:] else local
        saved, peak = Saved(local, gathers=False), self._peak_after(schedule)
        if peak(local).size_bytes <= self.budget_bytes:
            return local, schedule
        path = choices(saved, held_by(local), self.machine)
        names = choose(saved, path, self.budget_bytes, peak)
        if names is None:
            raise too_small(saved, path, self.budget_bytes, peak)
        return made_again(saved, names), schedule

    def check(self, final: LocalGraph) -> None:
        """Raise PlanError when what runs in the end holds more than the budget."""
        found = peak_memory(bound(final, self.world))
        if found.size_bytes > self.budget_bytes:
            raise PlanError(
                f"the step holds {found.size_bytes} bytes on rank {self.world.rank}",
                f"at most {self.budget_bytes} bytes",
                f"give memory_bytes={found.size_bytes} or more: collectives run in the first rank's order, "
                f"which takes {human(found.size_bytes - self.budget_bytes)} more here",
            )

    def _peak_after(self, schedule: Schedule | None) -> Peak:
        passes = self._passes(schedule)
        return lambda local: peak_memory(bound(run_passes(local, passes), self.world))

    def _passes(self, schedule: Schedule | None) -> list[Pass]:
        return [*([schedule] if schedule else []), *self.after]

    def _chosen(self, local: LocalGraph) -> list[str]:
        """Which schedule, and names of what is made again, by the simulated time of the step; or why nothing fits."""
        saved, several = Saved(local, gathers=self.gathers), schedules(self.schedule)
        held = held_by(local)
        path = choices(saved, held, self.machine)
        found: list[tuple[float, int, tuple[str, ...]]] = []

        def attempt(number: int, path: Sequence[Choice]) -> None:
            names = choose(saved, path, self.budget_bytes, self._peak_after(several[number]))
            if names is not None:
                found.append((self._time_us(saved, several[number], names), number, names))

        for number in range(len(several)):
            attempt(number, path)
            if found and not found[-1][2]:
                break
        if not found:
            error = too_small(saved, path, self.budget_bytes, self._peak_after(several[-1]))
            return [_FAILED, error.found, error.needed, error.next_step]
        if self.gathers and self.world.mesh.size > 1 and min(found)[2]:
            attempt(min(found)[1], choices(saved, held, self.machine, _HIDDEN))
        _, number, names = min(found)
        return [str(number), *names]

    def _time_us(self, saved: Saved, schedule: Schedule | None, names: Sequence[str]) -> float:
        return simulate(run_passes(made_again(saved, names), self._passes(schedule)), self.machine).step_us


def bound(local: LocalGraph, world: World) -> LocalGraph:
    """What runs on this rank."""
    graph = bind(local, world.coordinate, world.groups, exchange=world.device.startswith("cpu"))
    return replace(local, graph=graph)
