"""Predicts a step from a program: that of a rank as it is, that of all stages after the passes that stages run."""

from __future__ import annotations

from typing import Any

from ..cost import memory, simulation
from ..cost import timeline as timelines
from ..cost.kernel_times import KernelTimes
from ..cost.memory import PeakMemory
from ..cost.simulation import SimulationResult
from ..cost.software import OWN, Software
from ..cost.stage_costs import BlockPrices
from ..cost.timeline import Timeline
from ..errors import PlanError, shown
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from ..partition.stage_program import stage_program
from .staged_plan import staged


def simulate(
    local: LocalGraph, hardware: Hardware, compiled: bool = False, *, profile: KernelTimes | None = None,
    software: Software = OWN,
) -> SimulationResult:  # fmt: skip
    """Predict the time of a step from the order of its program. If a step ends in the next call, the result is that of
    the second of two steps. `compiled`: ops run as the kernels that `backend="inductor"` makes of them.
    `profile`: measured kernels count as measured. `software`: other software that runs the step.

    The program of all stages of a pipeline has been through no passes. Its time is that of the programs that `compile`
    makes of it for `hardware`, in the order that it has; `exposed_us` is what a rank waits for collectives and for
    other stages, on average.

    Raises:
        PlanError: the program of one stage, whose time depends on the others; of stages that share several loops.

    Example:
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100")).step_us)
    """
    software = _checked(software).measured(compiled, profile)
    if _is_of_all_stages(local):
        return staged(local, BlockPrices(hardware, local.mesh, software)).timeline.simulated
    return simulation.simulate(local, hardware, software)


def timeline(
    local: LocalGraph, hardware: Hardware, compiled: bool = False, *, profile: KernelTimes | None = None,
    software: Software = OWN,
) -> Timeline:  # fmt: skip
    """Predict the timeline of a step on `hardware`. If a step ends in the next call, it is that of the second of two.
    `compiled`: ops run as the kernels that `backend="inductor"` makes of them; a kernel is named after its last op.
    `profile`: measured ones count; `software`: other software that runs the step. Memory is that of the program op
    by op. The program of all stages of a pipeline is predicted as by `simulate`: a stream for each stage, with its
    blocks for each micro-batch, and the peak of the fullest.

    Raises:
        PlanError: as `simulate`.

    Example:
        >>> print(wholestep.timeline(step.local_graph, wholestep.Hardware.preset("dgx-h100")))
    """
    software = _checked(software).measured(compiled, profile)
    if _is_of_all_stages(local):
        return staged(local, BlockPrices(hardware, local.mesh, software)).timeline
    return timelines.timeline(local, hardware, software)


def peak_memory(local: LocalGraph) -> PeakMemory:
    """The peak of live bytes on a rank, and the tensors that are live there; of the program of all stages of a
    pipeline, those of the stage that holds most.

    Example:
        >>> print(wholestep.peak_memory(step.local_graph))
    """
    stages = range(local.mesh.axis_size(local.stage_axis)) if _is_of_all_stages(local) else [0]
    peaks = (memory.peak_memory(stage_program(local, stage)) for stage in stages)
    return max(peaks, key=lambda peak: peak.size_bytes)


def _checked(software: Any) -> Software:
    if not isinstance(software, Software):
        raise PlanError(f"software={shown(software)}", "software of type Software", "correct software=")
    return software


def _is_of_all_stages(local: LocalGraph) -> bool:
    return bool(local.stage_axis) and local.stage is None
