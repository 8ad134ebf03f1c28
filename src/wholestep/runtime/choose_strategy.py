"""What `Auto` chooses for a job: the first rank searches, on the machine as it was measured, and tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeGuard

from ..auto.auto import Auto, Candidates
from ..auto.fit import Finish
from ..auto.report import explained
from ..backend.pipeline import pipeline
from ..backend.protocol import Backend
from ..distributed.agree import from_first_rank
from ..distributed.launch import World
from ..errors import PlanError
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..passes.schedule import Schedule
from ..plan.optimal.cuts import Cuts
from ..plan.optimal.mixed import Mixed
from ..plan.plan import Objective, Plan
from ..plan.strategy import Strategies, Strategy, compose
from ..plan.strategy_file import decode, encode
from ..plan.tensor_parallel import TensorParallel
from .finalize import Finalizer

_SEARCH_SECONDS = 0.02  # for each node and candidate, at most: what the first rank takes to choose
_FAILED = "failed"


@dataclass(frozen=True)
class StrategyChoice:
    """The strategies that the first rank chose, and what it said of them. `gathers` is true where parameters that are
    kept gathered may be gathered again to fit. `hardware` is what plans were compared on.
    """

    strategies: Strategies
    gathers: bool
    hardware: Hardware
    objective: Objective
    notes: tuple[str, ...]

    def explained(self, plan: Plan) -> Plan:
        """`plan`, made with these strategies, and why they were chosen."""
        return replace(plan, objective=self.objective).with_notes(*self.notes)


def has_open_layouts(strategies: Strategies) -> bool:
    """True where layouts are to be solved for."""
    return any(isinstance(part, TensorParallel) and part.is_open for part in strategies.parts)


def lacks_hardware(strategies: Strategies) -> bool:
    """True where layouts are to be solved for, and nobody says on which machine."""
    return any(map(_lacks_machine, strategies.parts))


def with_hardware(strategies: Strategies, speeds: Hardware) -> Strategies:
    """`strategies` with `speeds` where a machine is lacking."""
    parts = (replace(part, hardware=speeds) if _lacks_machine(part) else part for part in strategies.parts)
    return Strategies(tuple(parts))


def _lacks_machine(part: Strategy) -> TypeGuard[TensorParallel]:
    return isinstance(part, TensorParallel) and part.is_open and part.hardware is None


def choose_strategy(
    auto: Auto, graph: TrainGraph, world: World, placed: Mapping[str, Layout], finisher: Finalizer, label: str,
    timeout_s: float,
) -> StrategyChoice:  # fmt: skip
    """The choice of the first rank, on every rank. What is placed already stays where it is.

    Raises:
        PlanError: nothing fits, by the first rank's search.
        RankMismatchError: the first rank did not choose in time.
    """
    finisher.choosing.look_up()
    candidates = auto.candidates(world.mesh, same_batches=True)
    measured, schedule = finisher.finish_of(world)
    said = list(finisher.choosing.earlier.auto)
    if not said:
        search = partial(_chosen, auto, graph, world, placed, measured, schedule, finisher.backend)
        said = _searched(search, world, label, timeout_s + _SEARCH_SECONDS * len(graph.graph.nodes) * len(candidates))
    finisher.choosing.note(auto=tuple(said))
    strategies, told = _strategies(said[0], candidates), json.loads(said[1])
    data = strategies.data
    keeps = data is not None and data.reshard_after_forward is False
    return StrategyChoice(strategies, keeps, auto.hardware or measured, Objective.of(told), tuple(said[2:]))


def _searched(search: Callable[[], list[str]], world: World, label: str, timeout_s: float) -> list[str]:
    """What the first rank's `search` says, on every rank."""
    own: list[str] = []
    if world.rank == 0:
        try:
            own = search()
        except Exception as error:
            from_first_rank(label, [_FAILED, f"rank 0 could not choose: {error}"], timeout_s)
            raise
    said = from_first_rank(label, own, timeout_s, "which plan it chose")
    if said[0] == _FAILED:
        raise PlanError(*said[1:])
    return said


def _strategies(said: str, candidates: Candidates) -> Strategies:
    """Those of the candidate with that number, or what the first rank solved for."""
    if not said.isdecimal():
        found = decode(json.loads(said))
        assert found is not None, "what is solved for can be written"
        return found
    template = candidates[int(said)][1]
    assert isinstance(template.strategies, tuple), "a plan was made with them"
    return compose(template.strategies)


def _chosen(
    auto: Auto, graph: TrainGraph, world: World, placed: Mapping[str, Layout], measured: Hardware,
    schedule: Schedule | None, backend: Backend,
) -> list[str]:  # fmt: skip
    """The number of the candidate, or what was solved for, what it was chosen for, and why; or why there is none."""
    speeds = auto.hardware or measured
    try:
        found = auto.search(
            graph,
            world.mesh,
            placed,
            same_batches=True,
            hardware=speeds,
            finish=Finish(pipeline(schedule=schedule, backend=backend)),
        )
    except PlanError as error:
        return [_FAILED, error.found, error.needed, error.next_step]
    best = found.best.strategies
    assert best is not None, "it has a plan"
    made, before = explained(found), len(found.plan.notes)
    assert made.objective is not None, "it was chosen for one"
    if any(isinstance(part, (Cuts, Mixed)) for part in best.parts):
        which = json.dumps(encode(best))
    else:
        names = [template.name for _, template in auto.candidates(world.mesh, same_batches=True)]
        which = str(names.index(found.best.name))
    return [which, json.dumps(asdict(made.objective)), *made.notes[before:]]
