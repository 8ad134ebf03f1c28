"""What `Auto` or `MicroBatches("auto")` chooses: the first rank searches, on the measured hardware, and broadcasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from ..backend.default_passes import default_passes
from ..capture.capture import Capture
from ..distributed.launch import World
from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..passes.context import Choice
from ..plan.data_parallel import DataParallel
from ..plan.decision import Objective
from ..plan.plan_file import decode_parts, encode_parts
from ..plan.strategies import Strategies
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from ..planner.auto import Auto
from ..planner.piece_search import PieceSearch
from ..planner.search_result import explained
from ..tuning import TUNING
from ..typed_json import MalformedError, parse
from .finalize import Finalizer
from .placement import placed

_DELETE = "delete the entry of the compile cache"
_STORES = {"style", "axis", "reshard_after_forward", "keep_gathered_bytes"}


@dataclass(frozen=True)
class AutoChoice:
    """What `Auto` chose on the first rank: strategies as text (`text_of`), what they were chosen for, and why."""

    objective: Objective
    strategies: str
    notes: tuple[str, ...] = ()


AUTO: Choice[AutoChoice] = Choice("auto", "which plan it chose", AutoChoice, kept=True)


def with_hardware(strategies: Strategies, hardware: Hardware) -> Strategies:
    """`strategies`, with layouts solved for on `hardware` where it is not given."""
    return strategies.with_open(lambda part: replace(part, hardware=part.hardware or hardware))


def choose_strategy(
    auto: Auto | PieceSearch, captured: Capture, finalizer: Finalizer
) -> tuple[AutoChoice, Strategies, Hardware]:
    """The first rank's choice, its strategies, and the hardware that plans were compared on. Placed state stays."""
    graph, world, choices, decisions = captured.graph, finalizer.world, finalizer.choices, finalizer.decisions
    choices.look_up()
    measured, schedule = finalizer.hardware_and_schedule()
    chosen = choices.of(AUTO)
    if chosen is None:
        candidates = auto.candidates(world.mesh, same_batches=True)
        search_s = TUNING.search_seconds * len(graph.graph.nodes) * len(candidates)
        passes = default_passes(schedule=schedule, backend=finalizer.options.backend)
        search = partial(_chosen, auto, captured, world, measured, passes)
        chosen = decisions.decide(AUTO, decisions.label(), search, extra_s=search_s)
    choices.note(AUTO, chosen)
    return chosen, strategies_of(chosen, auto, world.mesh), auto.hardware or measured


def strategies_of(chosen: AutoChoice, auto: Auto | PieceSearch, mesh: Mesh) -> Strategies:
    """The strategies that were chosen. Raises PlanError: a file names others than `auto` would."""
    return same_numbers(strategies_in(chosen.strategies, _known(auto, mesh)), auto.base(mesh))


def _known(auto: Auto | PieceSearch, mesh: Mesh) -> Strategies:
    """The strategies of all candidates: `text_of` names those by number that it cannot write as text."""
    parts = [template.strategies for _, template in auto.candidates(mesh, same_batches=True)]
    return Strategies(tuple(part for known in parts if isinstance(known, tuple) for part in known))


def text_of(strategies: Strategies, base: Strategies) -> str:
    """Strategies for other ranks and later starts; "" where one has no form as text, and is not of `base`."""
    parts = encode_parts(strategies, base)
    return "" if None in parts else json.dumps(parts)


def strategies_in(text: str, base: Strategies) -> Strategies:
    """Inverse of `text_of`. Raises PlanError."""
    try:
        return decode_parts(parse(text), base)
    except MalformedError as error:
        raise PlanError(f"what was chosen cannot be read: {error.found}", error.needed, _DELETE) from error


def same_numbers(cached: Strategies, requested: Strategies) -> Strategies:
    """`cached`, which may store tensors otherwise than `requested`. Raises PlanError: they compute other numbers."""
    pairs = [(n.name, cached.options, requested.options) for n in fields(DataParallel) if n.name not in _STORES]
    pairs += [("input_dim", s, t) for s in cached.of(SolvedLayouts) for t in requested.of(TensorParallel)]
    for name, cached_part, requested_part in pairs:
        stored, needed = getattr(cached_part, name), getattr(requested_part, name)
        if stored != needed:
            raise PlanError(f"the compile cache has {name}={stored!r}", f"{name}={needed!r}, as given", _DELETE)
    return cached


def _chosen(
    auto: Auto | PieceSearch, captured: Capture, world: World, measured: Hardware, passes: Sequence[Pass]
) -> AutoChoice:  # fmt: skip
    """What `auto` chooses on this rank. Raises PlanError: nothing fits."""
    layouts, hardware = placed(captured.state, world), auto.hardware or measured
    search = auto.search(captured.graph, world.mesh, layouts, same_batches=True, hardware=hardware, passes=passes)
    best = search.best.strategies
    assert best is not None, "it has a plan"
    plan = explained(search)
    assert plan.objective is not None, "it was chosen for one"
    notes = tuple(plan.notes[len(search.plan.notes) :])
    if not (text := text_of(best, _known(auto, world.mesh))):
        problem = f"a strategy that was chosen has no form as text: {best.describe(world.mesh)}"
        raise PlanError(problem, "strategies of wholestep, by which ranks tell it each other", "give parallel=")
    return AutoChoice(plan.objective, text, notes)
