"""What `Auto` chooses for a job: the first rank searches, on the hardware as it was measured, and broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from ..backend.pipeline import pipeline
from ..backend.protocol import Backend
from ..cache.choices import AutoChoice
from ..cache.step_cache import CachedChoices
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import PlanError
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..passes.schedule import Schedule
from ..plan.data_parallel import PerParameterStorage
from ..plan.decision import Objective
from ..plan.plan import Plan
from ..plan.strategies import Strategies, compose
from ..plan.strategy import Strategy
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from ..planner.auto import Auto, Candidates
from ..planner.search_result import explained
from ..tuning import TUNING

_SEARCH_SECONDS = TUNING.search_seconds


@dataclass(frozen=True)
class StrategyChoice:
    """The strategies that the first rank chose, and the reasons.

    `may_regather`: a budget may re-gather parameters that the plan keeps gathered. `hardware`: the plans were compared
    on it.
    """

    strategies: Strategies
    may_regather: bool
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
    """True if layouts are to be solved for on hardware that is not given."""
    return any(map(_lacks_hardware, strategies.parts))


def with_hardware(strategies: Strategies, hardware: Hardware) -> Strategies:
    """`strategies` with `hardware` where it is not given."""
    parts = (replace(part, hardware=hardware) if _lacks_hardware(part) else part for part in strategies.parts)
    return Strategies(tuple(parts))


def _lacks_hardware(part: Strategy) -> TypeGuard[TensorParallel]:
    return isinstance(part, TensorParallel) and part.is_open and part.hardware is None


def choose_strategy(
    auto: Auto, graph: TrainGraph, world: World, placed: Mapping[str, Layout], choices: CachedChoices,
    measured: Hardware, schedule: Schedule | None, backend: Backend, label: str, rendezvous: Rendezvous,
) -> StrategyChoice:  # fmt: skip
    """The choice of the first rank, on every rank. State that is placed already keeps its layout.

    Raises:
        PlanError: nothing fits, by the first rank's search.
        RankMismatchError: the first rank did not choose in time.
    """
    candidates = auto.candidates(world.mesh, same_batches=True)
    chosen = choices.earlier.auto
    if chosen is None:
        search = partial(_chosen, auto, graph, world, placed, measured, schedule, backend)
        timeout_s = rendezvous.timeout_s + _SEARCH_SECONDS * len(graph.graph.nodes) * len(candidates)
        chosen = _searched(search, label, rendezvous.waiting_for(timeout_s))
    choices.note(auto=chosen)
    strategies = _strategies(chosen, candidates)
    data = strategies.data
    keeps = data is not None and data.reshard_after_forward is False
    return StrategyChoice(strategies, keeps, auto.hardware or measured, chosen.objective, chosen.notes)


@dataclass(frozen=True)
class _Search:
    """What the first rank broadcasts: its choice as JSON, or the parts of its error."""

    chosen: dict[str, Any] | None = None
    failure: tuple[str, ...] = ()


def _searched(search: Callable[[], AutoChoice], label: str, rendezvous: Rendezvous) -> AutoChoice:
    """What the first rank's `search` returns, on every rank."""
    own, what = _Search(), "which plan it chose"
    if rendezvous.rank == 0:
        try:
            own = _Search(search().to_json())
        except PlanError as error:
            own = _Search(failure=(error.found, error.needed, error.next_step))
        except Exception as error:
            rendezvous.broadcast(label, _Search(failure=(f"rank 0 could not choose: {error}",)), what)
            raise
    found: _Search = rendezvous.broadcast(label, own, what)
    if found.chosen is None:
        raise PlanError(*found.failure)
    return AutoChoice.from_json(found.chosen)


def _strategies(chosen: AutoChoice, candidates: Candidates) -> Strategies:
    """The solved strategies, or the strategies of the chosen candidate."""
    if chosen.solved is not None:
        return chosen.solved
    assert chosen.template is not None, "a template where nothing was solved for"
    template = candidates[chosen.template][1]
    assert isinstance(template.strategies, tuple), "a plan was made with them"
    return compose(template.strategies)


def _chosen(
    auto: Auto, graph: TrainGraph, world: World, placed: Mapping[str, Layout], measured: Hardware,
    schedule: Schedule | None, backend: Backend,
) -> AutoChoice:  # fmt: skip
    """What `Auto` chooses on this rank.

    Raises:
        PlanError: nothing fits.
    """
    found = auto.search(
        graph,
        world.mesh,
        placed,
        same_batches=True,
        hardware=auto.hardware or measured,
        passes=pipeline(schedule=schedule, backend=backend),
    )
    best = found.best.strategies
    assert best is not None, "it has a plan"
    made = explained(found)
    assert made.objective is not None, "it was chosen for one"
    notes = tuple(made.notes[len(found.plan.notes) :])
    if any(isinstance(part, (SolvedLayouts, PerParameterStorage)) for part in best.parts):
        return AutoChoice(made.objective, solved=best, notes=notes)
    names = [template.name for _, template in auto.candidates(world.mesh, same_batches=True)]
    return AutoChoice(made.objective, template=names.index(found.best.name), notes=notes)
