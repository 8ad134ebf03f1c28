"""How a step is compiled, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..auto.auto import Auto
from ..backend.eager import Eager
from ..backend.pipeline import Edit
from ..backend.protocol import Backend
from ..capture.capture_options import CaptureOptions
from ..errors import BackendError, PlanError
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.schedule import Schedule
from ..plan.plan import Plan
from ..plan.strategy import Strategies, compose
from .progress import Progress


@dataclass(frozen=True)
class StepOptions:
    """How a step is compiled; see `wholestep.compile` for each field."""

    parallel: Strategies = field(default_factory=lambda: compose(None))
    mesh: Mesh | None = None
    backend: Backend = field(default_factory=Eager)
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    passes: Edit | None = None
    measure: bool = False
    progress: Progress | Literal["auto"] | None = "auto"
    agree_timeout_s: float = 120.0
    schedule: Schedule | Literal["auto", "across_steps"] | None = "auto"
    memory_bytes: int | None = None
    gathers_again: bool = True
    auto: Auto | None = None
    cache: Path | None = None
    plan: Plan | None = None
    check_every: int = 1000
    hardware: Hardware | None = None

    @property
    def planned_on(self) -> Hardware | None:
        """The hardware that layouts are priced on: that of a plan that is applied, or as given."""
        return self.plan.hardware if self.plan is not None else self.hardware

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in ("auto", "across_steps"):
            found, one_of = f"schedule={self.schedule!r} is unknown", "'auto', 'across_steps', a Schedule or None"
            raise PlanError(found, one_of, "correct it")
        across = self.schedule == "across_steps" or (isinstance(self.schedule, Schedule) and self.schedule.across_steps)
        if across and not self.backend.splits_steps:
            raise BackendError(
                f"backend {self.backend.name!r} cannot leave collectives to the next call",
                "one with splits_steps, as 'eager', for a schedule across steps",
                'use schedule="auto", or backend="eager"',
            )
        if self.check_every < 0:
            raise PlanError(f"check_every={self.check_every}", "a number of calls, 0 for never", "correct it")
        if self.measure and not self.backend.times_nodes:
            raise BackendError(
                f"measure=True with backend {self.backend.name!r}, which does not time nodes",
                "one with times_nodes",
                'leave out measure=True, or use backend="eager"',
            )
