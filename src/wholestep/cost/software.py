"""What runs a program besides the hardware, as far as its time and memory depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Literal, Protocol, runtime_checkable

from torch.fx import Graph, Node

from ..errors import PlanError, shown
from ..hardware.hardware import Hardware
from .compute import alone_us, node_us
from .fusion import compiled_us
from .kernel_times import KernelTimes

Fills = Literal["none", "own", "all"]


@runtime_checkable
class Software(Protocol):
    """The kernels that exist, the host that starts them, the overlap that a step has, and the allocator. Functions that
    predict take `software=`; without it they predict wholestep, op by op.

    Example:
        >>> from wholestep_foresight import Stack
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100"), software=Stack.named("torchtitan")))
    """

    @property
    def overlaps(self) -> bool:
        """Gradients are reduced, and parameters gathered, while others are computed."""
        ...

    @property
    def fills(self) -> Fills:
        """Gradients of weights that are computed while gradients of activations travel: of "none", of the "own" linear,
        or "all".
        """
        ...

    @property
    def splits_update(self) -> bool:
        """Some parameters are updated while gradients of others travel; else all in one update."""
        ...

    @property
    def copies(self) -> bool:
        """Parameters and gradients are copied out of and into the buckets of collectives, on a stream of their own."""
        ...

    @property
    def expandable_segments(self) -> bool:
        """The allocator's segments grow (`cost.reserved`)."""
        ...

    def op_times(self, graph: Graph, hardware: Hardware) -> dict[Node, float] | None:
        """Microseconds of each op, 0 for collectives and waits; None where each is a kernel that `node_us` prices."""
        ...

    def host_times(self, graph: Graph, times: Mapping[Node, float], hardware: Hardware) -> dict[Node, float] | None:
        """Microseconds of the host for each op that it starts, whose kernels take `times`; None where it starts all at
        once.
        """
        ...

    def measured(self, compiled: bool, profile: KernelTimes | None) -> Software:
        """The same with ops that run as the kernels of a compiler, and with measured kernels, where these are given."""
        ...


@dataclass(frozen=True)
class OwnSoftware:
    """What `ws.compile` makes.

    Args:
        compiled: ops run as the kernels that `backend="inductor"` makes of them.
        profile: measured kernels, which count as measured.
    """

    compiled: bool = False
    profile: KernelTimes | None = None
    overlaps: bool = field(default=True, init=False)
    fills: Fills = field(default="all", init=False)
    splits_update: bool = field(default=True, init=False)
    copies: bool = field(default=False, init=False)
    expandable_segments: bool = field(default=False, init=False)

    def op_times(self, graph: Graph, hardware: Hardware) -> dict[Node, float] | None:
        """Of `Software`."""
        if not self.compiled and self.profile is None:
            return None
        times = compiled_us(graph, hardware) if self.compiled else alone_us(graph, hardware)
        return times if self.profile is None else self.profile.applied(times)

    def host_times(self, graph: Graph, times: Mapping[Node, float], hardware: Hardware) -> None:
        """It starts all at once."""

    def measured(self, compiled: bool, profile: KernelTimes | None) -> OwnSoftware:
        """Of `Software`."""
        return replace(self, compiled=self.compiled or compiled, profile=profile or self.profile)


OWN = OwnSoftware()


def software_named(name: str) -> Software:
    """Other software, by the names of an installed package: of its entry point `wholestep.software`.

    Raises:
        PlanError: no package has names, or this one has not this name.
    """
    named = next(iter(entry_points(group="wholestep.software")), None)
    if named is None:
        found = f"software {shown(name)}: no installed package has names of other software"
        raise PlanError(found, "wholestep-foresight", "pip install 'wholestep[foresight]'")
    return named.load()(name)


def pricing_of(graph: Graph, hardware: Hardware, software: Software) -> Callable[[Node], float]:
    """Microseconds of each op of a program; collectives have none."""
    times = software.op_times(graph, hardware)
    return times.__getitem__ if times is not None else lambda node: node_us(node, hardware)
