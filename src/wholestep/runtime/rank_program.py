"""A program before it is installed."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.capture import Capture
from ..graph.graph import LocalGraph
from ..plan.plan import Plan


@dataclass(frozen=True)
class RankProgram:
    """What a step was captured as, its plan, and what the rank runs. Ranks compare `lines`."""

    capture: Capture
    plan: Plan
    local: LocalGraph
    lines: tuple[str, ...]
