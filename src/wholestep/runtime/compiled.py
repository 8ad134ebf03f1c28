"""A program before it is installed."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.capture import Capture
from ..graph.graph import LocalGraph
from ..passes.next_step import AcrossSteps
from ..plan.plan import Plan


@dataclass(frozen=True)
class Compiled:
    """What a step was captured as, its plan, and what the rank runs: the steady program of `across`, where the end of a
    step is left to the next call. Ranks compare `lines`.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    lines: tuple[str, ...]
    across: AcrossSteps | None = None
