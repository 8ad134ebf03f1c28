"""What runs a program besides the hardware, as far as its price depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from .compute import node_us
from .kernel_times import KernelTimes
from .kernels import op_times
from .simulation import SimulationResult, simulate
from .stack import Stack
from .timeline import Timeline, timeline


@dataclass(frozen=True)
class Software:
    """The kernels that exist and the host that starts them; by default those of wholestep, op by op.

    Args:
        compiled: ops run as the kernels that `backend="inductor"` makes of them.
        stack: kernels, host and allocator of other software.
        profile: measured kernels, which count as measured.

    Example:
        >>> Software(stack=Stack.named("torchtitan")).simulate(local, hardware)
    """

    compiled: bool = False
    stack: Stack | None = None
    profile: KernelTimes | None = None

    def simulate(self, local: LocalGraph, hardware: Hardware) -> SimulationResult:
        """The predicted times of a step."""
        return simulate(local, hardware, self.compiled, stack=self.stack, profile=self.profile)

    def timeline(self, local: LocalGraph, hardware: Hardware) -> Timeline:
        """The predicted timeline of a step."""
        return timeline(local, hardware, self.compiled, stack=self.stack, profile=self.profile)

    def op_us(self, graph: Graph, hardware: Hardware) -> Callable[[Node], float]:
        """Microseconds of each op of a program; collectives have none."""
        times = op_times(graph, hardware, self.compiled, self.stack, self.profile)
        return times.__getitem__ if times is not None else lambda node: node_us(node, hardware)


OWN = Software()
