"""A plan as one self-contained HTML page: layouts, collectives, memory, time, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cost.kernel_times import KernelTimes
from ..cost.software import OWN, Software
from ..cost.stage_costs import BlockPrices
from ..cost.staged import StageOfStep
from ..cost.timeline import Timeline, timeline
from ..errors import PlanError
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.text import human, seconds
from ..hardware.hardware import Hardware
from ..passes.base import Pass, run_passes
from ..passes.order_stages import partition
from ..plan.plan import Plan
from ..planner.recompute_kinds import passes_of, saving_passes
from ..planner.search_result import Candidate
from ..planner.staged_plan import staged
from ..typed_json import write_text
from .page_data import COLUMNS, by_op, columns, lanes, outline, peak_at, sent, tree, verdicts

_TEMPLATES = Path(__file__).parent / "templates"
_ROWS = 12  # of the longest ops and the largest tensors


def report(
    path: str | Path, plan: Plan, graph: TrainGraph | LocalGraph, hardware: Hardware | None = None, *,
    model: str = "", alternatives: Sequence[Candidate] = (), chosen: str = "", compiled: bool = False,
    profile: KernelTimes | None = None, software: Software = OWN,
) -> None:  # fmt: skip
    """Write `plan` as one HTML page that needs no network: layouts, collectives, memory and the streams of a step.

    Args:
        path: file to write; missing folders are created.
        plan: the plan to show.
        graph: the planned graph, or a program of a rank for this plan, which is shown unchanged.
        hardware: predicts times; by default a slow CPU on a slow link.
        model: name of the model.
        alternatives: rows of `wholestep.report.compare.compare`.
        chosen: the name of the alternative that is this plan.
        compiled: ops run as the kernels that `backend="inductor"` makes of them.
        profile: measured kernels.
        software: other software that runs the step.

    Raises:
        PlanError: the plan is not for this graph, or no alternative has the name `chosen`.

    Example:
        >>> wholestep.report("plan.html", plan, graph, wholestep.Hardware.preset("dgx-h100"))
    """
    if chosen and chosen not in [row.name for row in alternatives]:
        needed = f"one of {', '.join(repr(row.name) for row in alternatives) or 'alternatives='}"
        next_step = "pass the name of the row of this plan, or omit chosen"
        raise PlanError(f"no alternative is called {chosen!r}", needed, next_step)
    hardware = hardware or Hardware.default()
    local = program(plan, graph, hardware, passes_of("none", hardware, software=software))
    predicted, stages = step_of(plan, local, hardware, software.measured(compiled, profile))
    capacity = hardware.memory_bytes
    shown = _memory(predicted, capacity) | {"plan": plan, "local": local, "made": predicted, "tree": tree(plan)}
    shown |= {"sent": sent(local, predicted), "lanes": lanes(predicted), "ops": by_op(predicted)}
    shown["alternatives"] = list(zip(alternatives, verdicts(alternatives, capacity), strict=True))
    shown |= {"rows": _ROWS, "stages": stages, "model": model or "training step", "hardware": hardware.name}
    write_text(path, rendered(_TEMPLATES / "page.html", {**shown, "chosen": chosen}))


def rendered(template: Path, shown: Mapping[str, Any]) -> str:
    """A template filled in, with the style and the script of all pages."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(template.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"human": human, "time": _shown_us}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": True}
    raw = {kind: Markup((_TEMPLATES / f"page.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js")}
    return environment.get_template(template.name).render(**shown, **raw)


def step_of(
    plan: Plan, local: LocalGraph, hardware: Hardware, software: Software = OWN
) -> tuple[Timeline, tuple[StageOfStep, ...]]:
    """The timeline of a program for `plan`; of a pipeline that of all stages, and what each spends and holds."""
    if local.stage_axis and local.stage is None:
        step = staged(local, BlockPrices(hardware, local.mesh, software))
        return step.timeline, step.stages
    return timeline(local, hardware, software), ()


def program(
    plan: Plan, graph: TrainGraph | LocalGraph, hardware: Hardware, passes: Sequence[Pass] | None = None
) -> LocalGraph:
    """The program of a rank for `plan`, after `passes` (default: those of a compiled step) and those that `Auto` chose.
    A pipeline gives the program of all stages, before passes. A program of the plan is returned unchanged.
    """
    if isinstance(graph, TrainGraph) and plan.owners:
        return partition(graph, plan)
    if isinstance(graph, TrainGraph):
        passes = passes_of("none", hardware) if passes is None else passes
        chosen = saving_passes(passes, plan.objective.saving) if plan.objective else passes
        return run_passes(partition(graph, plan), chosen)
    stored = [{i.name for i in inputs if i.role in (Role.PARAM, Role.STATE)} for inputs in (graph.inputs, plan.inputs)]
    differing = sorted(stored[0] ^ stored[1])
    if differing or graph.mesh != plan.mesh.of_ranks:
        problem = f"the plan is for mesh {plan.mesh}, the program for {graph.mesh}"
        problem = f"only one of plan and program has {differing[0]!r}" if differing else problem
        next_step = "pass the planned graph, or wholestep.partition(graph, plan)"
        raise PlanError(problem, "a program made from this plan", next_step)
    return graph


def _memory(predicted: Timeline, capacity: int | None) -> dict[str, Any]:
    """The drawing of live bytes; the capacity is in it where the peak is at least half of it."""
    step, peak = predicted.simulated.step_us, predicted.peak
    near = capacity if capacity is not None and capacity <= 2 * peak.size_bytes else None
    top = max(int(1.08 * peak.size_bytes), int(1.04 * near) if near else 0, 1)
    most = columns(predicted.memory, step)
    return {
        "area": outline(most, top), "columns": COLUMNS, "rest_y": 100 - 100 * peak.rest_bytes / top,
        "peak_x": 100 * peak_at(predicted) / step if step else 0.0, "peak_us": peak_at(predicted),
        "peak_y": 100 - 100 * peak.size_bytes / top, "capacity": capacity,
        "capacity_y": 100 - 100 * near / top if near else None, "held": {"bytes": most, "step": round(step, 3)},
    }  # fmt: skip


def _shown_us(us: float) -> str:
    return seconds(us / 1e6)
