"""Times the nodes of a compiled step while it trains."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..backend.build import compiled
from ..backend.gloo.exchange import exchanges
from ..backend.rank_binding import bind
from ..capture.call_structure import take_apart
from ..cost.timeline import Timeline, timeline
from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..profiling.profile import Profile, SpanClock, measured_timeline
from .cross_step_runner import CrossStepRunner

if TYPE_CHECKING:
    from .step import CompiledStep


def profile_step(
    step: CompiledStep, hardware: Hardware | None, repeat: int, args: tuple[Any, ...], kwargs: Any
) -> Profile:
    """Train `repeat` steps on the given arguments with every node timed; returns the step of median time.

    Without `hardware` the prediction is for that of the schedule.

    Raises:
        PlanError: the schedule is across steps, or there is no hardware to predict for.
    """
    step(*args, **kwargs)
    program = step.programs[-1]
    if isinstance(program.run, CrossStepRunner):
        raise PlanError(
            "a step that ends in the next one (schedule='across_steps') has no timeline of its own",
            "a schedule within the step",
            'compile it with schedule="auto" to profile it',
        )
    hardware = hardware or (step.schedule.hardware if step.schedule else None)
    if hardware is None:
        needed = "hardware to predict for"
        raise PlanError("this step was scheduled for none (one rank, or schedule=None)", needed, "give hardware=")
    world, usual = program.world, program.run
    clock = SpanClock(world.device.startswith("cuda"))
    bound = bind(program.local, world.coordinate, world.groups, exchange=exchanges(world.device))
    inputs = program.gather_inputs(take_apart((args, kwargs)).leaves)
    program.run = compiled(step.options.backend, bound, program.local.inputs, inputs, clock)
    found: list[Timeline] = []
    try:
        for _ in range(repeat + 1):  # the first one checks strides, and does not count
            clock.spans = []
            begin = time.perf_counter()
            step(*args, **kwargs)
            found.append(measured_timeline(program.local, clock.spans, begin, time.perf_counter() - begin))
    finally:
        program.run = usual
    counted = found[1:]
    middle = sorted(counted, key=lambda one: one.simulated.step_us)[(len(counted) - 1) // 2]
    return Profile(replace(middle, title="measured"), timeline(program.local, hardware))
