"""A program before it is installed."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.capture import Capture
from ..graph.graph import LocalGraph
from ..plan.plan import Plan


@dataclass(frozen=True)
class RankProgram:
    """The captured step, its plan and the program of the rank. Ranks compare `lines`."""

    capture: Capture
    plan: Plan
    local: LocalGraph
    lines: tuple[str, ...]
