"""The profile of a step with stages: ranks tell each other what their stages did, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..cost.timeline import Span, Timeline
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..hardware.hardware import Hardware
from ..planner.prediction import timeline
from ..profiling.profile import SpanClock, measured_stages, stage_spans
from .program import Program

_Run = tuple[float, Sequence[Span]]  # seconds, and what was computed
_TIMEOUT_S = 600.0


@dataclass
class StageProfile:
    """Calls of a program of a stage that were timed on this rank. Ranks start each together, so that times since the
    start of a call can be compared, also where ranks have clocks of their own.
    """

    program: Program
    world: World
    runs: list[_Run] = field(default_factory=list[_Run])

    def meet(self) -> None:
        """Wait for all ranks: a call begins."""
        dist.barrier()

    def note(self, clock: SpanClock, begin: float, seconds: float) -> None:
        """A call that began at `begin` has ended."""
        self.runs.append((seconds, stage_spans(self.program.local, clock, begin)))

    def measured(self) -> Timeline:
        """The call of median length, but for the first one: of each stage what its first rank did. A call lasts until
        the last rank ends it.
        """
        mesh, axis = self.world.mesh, self.program.local.stage_axis
        ranks = Rendezvous.of_job(_TIMEOUT_S)
        label = ranks.next_label("profile")
        of_ranks = ranks.gather(label, self.runs[1:], "the exchange of a profile", tuple[_Run, ...])
        lengths = [max(seconds for seconds, _ in call) for call in zip(*of_ranks, strict=True)]
        middle = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
        first = {mesh.coordinate(rank)[axis]: rank for rank in reversed(range(mesh.size))}
        stages = [of_ranks[first[stage]][middle][1] for stage in range(mesh.axis_size(axis))]
        return measured_stages(stages, lengths[middle], self.program.local)

    def predicted(self, hardware: Hardware) -> Timeline:
        """All stages as they are simulated."""
        assert self.program.before is not None, "the program of all stages"
        return timeline(self.program.before, hardware)
