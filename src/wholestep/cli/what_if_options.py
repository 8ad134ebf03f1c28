"""`wholestep plan --what-if`: parses the cases, and captures the steps that they need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .screen import Screen, staged
from .target import Target, check_mesh, hardware_of, refuse

if TYPE_CHECKING:
    from wholestep.graph.graph import TrainGraph
    from wholestep.hardware.hardware import Hardware
    from wholestep.plan.plan import Plan
    from wholestep.report.what_if import WhatIf, WhatIfCase

    from .hf import ModelSpec

FORMS = "mesh=AXES, hardware=NAME, or with --hf batch=N or seq=N"


def check(asked: list[str], hf: bool) -> None:
    """Refuse malformed cases before the long work."""
    for text in asked:
        kind, equals, value = text.partition("=")
        if not equals or kind not in ("mesh", "hardware", "batch", "seq"):
            refuse(f"--what-if {text}: needed {FORMS}")
        if kind in ("batch", "seq"):
            if not hf:
                refuse(f"--what-if {text} without --hf: the function that returns the step decides that")
            if not value.isdigit() or int(value) < 1:
                refuse(f"--what-if {text}: needed a number of at least 1")
        elif kind == "mesh":
            check_mesh(value)
        else:
            hardware_of(value)


def rows(
    shown: Screen,
    asked: list[str],
    plan: Plan,
    graph: TrainGraph,
    hardware: Hardware,
    found: Target,
    wanted: ModelSpec | None,
) -> list[WhatIf]:
    """Costs of the plan and of each case; by default twice and half the ranks."""
    from wholestep.report.what_if import other_sizes, what_if

    cases = [_case(shown, text, found, wanted) for text in asked] or other_sizes(plan.mesh)
    with staged(shown, "what if"):
        return what_if(plan, graph, hardware, cases)


def _case(shown: Screen, text: str, found: Target, wanted: ModelSpec | None) -> WhatIfCase:
    import wholestep as ws
    from wholestep.report.what_if import WhatIfCase

    from .hf import build

    kind, _, value = text.partition("=")
    if kind == "mesh":
        return WhatIfCase(text, mesh=ws.Mesh(value))
    if kind == "hardware":
        return WhatIfCase(text, hardware=hardware_of(value))
    assert wanted is not None, "checked before"
    with staged(shown, f"capture {text}"):
        changed = replace(wanted, batch=int(value)) if kind == "batch" else replace(wanted, seq=int(value))
        other = build(changed)
        graph = ws.capture(other.step, *other.args, **other.kwargs)
    return WhatIfCase(text, graph=graph, batch_parts=_tokens(other) / _tokens(found))


def _tokens(found: Target) -> int:
    return found.args[2]["tokens"].numel()
