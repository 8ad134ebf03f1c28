"""Predicts a step from a program: that of a rank as it is, that of all stages after the passes that stages run."""

from __future__ import annotations

from ..cost.kernel_times import KernelTimes
from ..cost.simulation import SimulationResult
from ..cost.software import Software
from ..cost.stack import Stack
from ..cost.stage_costs import BlockPrices
from ..cost.timeline import Timeline
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from .staged_plan import staged


def simulate(
    local: LocalGraph,
    hardware: Hardware,
    compiled: bool = False,
    *,
    stack: Stack | None = None,
    profile: KernelTimes | None = None,
) -> SimulationResult:
    """Predict the time of a step from the order of its program. If a step ends in the next call, the result is that of
    the second of two steps. `compiled`: ops run as the kernels that `backend="inductor"` makes of them. `stack`: the
    kernels are those of other software, started by its host. `profile`: measured kernels count as measured.

    The program of all stages of a pipeline has been through no passes. Its time is that of the programs that `compile`
    makes of it for `hardware`, in the order that it has; `exposed_us` is what a rank waits for collectives and for
    other stages, on average.

    Raises:
        PlanError: the program of one stage, whose time depends on the others; of stages that share several loops.

    Example:
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100")).step_us)
    """
    software = Software(compiled, stack, profile)
    if _is_of_all_stages(local):
        return staged(local, BlockPrices(hardware, local.mesh, software)).timeline.simulated
    return software.simulate(local, hardware)


def timeline(
    local: LocalGraph,
    hardware: Hardware,
    compiled: bool = False,
    *,
    stack: Stack | None = None,
    profile: KernelTimes | None = None,
) -> Timeline:
    """Predict the timeline of a step on `hardware`. If a step ends in the next call, it is that of the second of two.
    `compiled`: ops run as the kernels that `backend="inductor"` makes of them; a kernel is named after its last op.
    `stack`: the kernels are those of other software; `profile`: measured ones count. Memory is that of the program op
    by op. The program of all stages of a pipeline is predicted as by `simulate`: a stream for each stage, with its
    blocks for each micro-batch, and the peak of the fullest.

    Raises:
        PlanError: as `simulate`.

    Example:
        >>> print(wholestep.timeline(step.local_graph, wholestep.Hardware.preset("dgx-h100")))
    """
    software = Software(compiled, stack, profile)
    if _is_of_all_stages(local):
        return staged(local, BlockPrices(hardware, local.mesh, software)).timeline
    return software.timeline(local, hardware)


def _is_of_all_stages(local: LocalGraph) -> bool:
    return bool(local.stage_axis) and local.stage is None
