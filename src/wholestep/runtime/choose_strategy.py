"""What `Auto` or `MicroBatches("auto")` chooses: the first rank searches, on the measured hardware, and broadcasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import zip_longest

from ..backend.default_passes import default_passes
from ..cache.choices import AutoChoice
from ..capture.capture import Capture
from ..distributed.launch import World
from ..distributed.typed_messages import reading
from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass
from ..passes.context import Choice
from ..plan.data_parallel import DataParallel, PerParameterStorage
from ..plan.decision import Objective
from ..plan.micro_batches import MicroBatches
from ..plan.plan_file import decode_parts, encode_parts
from ..plan.strategies import Strategies, compose
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from ..planner.auto import Auto
from ..planner.piece_search import PieceSearch
from ..planner.search_result import explained
from ..tuning import TUNING
from ..typed_json import parse
from .finalize import Finalizer
from .placement import placed

_DELETE = "delete the entry"
_STORES = {"style", "axis", "reshard_after_forward", "keep_gathered_bytes"}


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
    chosen = choices.earlier.auto
    if chosen is None:
        candidates = auto.candidates(world.mesh, same_batches=True)
        search_s = TUNING.search_seconds * len(graph.graph.nodes) * len(candidates)
        passes = default_passes(schedule=schedule, backend=finalizer.options.backend)
        search = partial(_chosen, auto, captured, world, measured, passes)
        base, label = auto.base(world.mesh), decisions.label()
        message = decisions.decide(_AUTO, label, lambda: _said(search(), base), extra_s=search_s)
        chosen = _as_said(message, base, label)
    choices.note(auto=chosen)
    return chosen, strategies_of(chosen, auto, world.mesh), auto.hardware or measured


def strategies_of(chosen: AutoChoice, auto: Auto | PieceSearch, mesh: Mesh) -> Strategies:
    """The solved strategies, or the strategies of the chosen candidate. Raises PlanError: a file names another."""
    if chosen.solved is not None:
        return same_numbers(chosen.solved, auto.base(mesh))
    candidates, number = auto.candidates(mesh, same_batches=True), chosen.template
    parts = candidates[number][1].strategies if number is not None and 0 <= number < len(candidates) else None
    if not isinstance(parts, tuple):
        problem = f"the compile cache names candidate {number} of Auto"
        raise PlanError(problem, f"one of {len(candidates)} that can be planned", _DELETE)
    return compose(parts)


_Said = tuple[Objective, int | None, tuple[str, ...], str]
_AUTO: Choice[_Said] = Choice("auto", "which plan it chose", _Said)


def _said(chosen: AutoChoice, base: Strategies) -> _Said:
    """A choice for other ranks, strategies as text. Raises PlanError: one has none and is not of `base`."""
    text = ""
    if chosen.solved is not None:
        parts = encode_parts(chosen.solved)
        for part, value, base_part in zip_longest(chosen.solved.parts, parts, base.parts[: len(parts)]):
            if value is None and part is not base_part:
                problem = f"strategy {type(part).__name__} of what was chosen has no form as text"
                raise PlanError(problem, "a strategy of wholestep, by which ranks tell it each other", "give parallel=")
        text = json.dumps(parts)
    return chosen.objective, chosen.template, chosen.notes, text


def _as_said(message: _Said, base: Strategies, label: str) -> AutoChoice:
    objective, template, notes, text = message
    with reading(label):
        return AutoChoice(objective, template, decode_parts(parse(text), base) if text else None, notes)


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
    if best.of(SolvedLayouts, PerParameterStorage, MicroBatches):
        return AutoChoice(plan.objective, solved=best, notes=notes)
    names = [template.name for _, template in auto.candidates(world.mesh, same_batches=True)]
    return AutoChoice(plan.objective, template=names.index(search.best.name), notes=notes)
