"""Simulates a local graph: one stream that computes, and one stream of collectives for each mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import is_collective, is_wait, node_at
from ..graph.op_kinds import Collective, collective_kind
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from ..typed_values import check_arguments
from .compute import node_us, peak_us, work
from .fused import fused_us, is_fused
from .fusion import compiled_us


@dataclass
class Clock:
    """The streams at one moment of a step. Times are in microseconds since the start of the step.

    Completion times assume that the rank computes until then; `_stop_overlap` corrects them where it waits. While
    collectives of two axes use the same links, each gets half of their rate.

    Args:
        now: of the computing stream.
        waited: time that it has waited for collectives.
        link_free: for each axis, when the last of its collectives completes.
        begun, done: when a collective starts and completes.
        in_flight: the axis of each collective that nobody has waited for.
        stolen_us: compute time that a collective in flight costs, spread evenly from its start to its completion.
        compiled: of a compiled program, the microseconds of each op (`cost.fusion.compiled_us`).
    """

    hardware: Hardware
    mesh: Mesh
    now: float = 0.0
    waited: float = 0.0
    link_free: dict[str, float] = field(default_factory=dict[str, float])
    done: dict[Node, float] = field(default_factory=dict[Node, float])
    begun: dict[Node, float] = field(default_factory=dict[Node, float])
    in_flight: dict[Node, str] = field(default_factory=dict[Node, str])
    stolen_us: dict[Node, float] = field(default_factory=dict[Node, float])
    compiled: Mapping[Node, float] | None = None

    @property
    def links_free(self) -> float:
        """When the last collective completes."""
        return max(self.link_free.values(), default=0.0)

    def run(self, node: Node) -> None:
        """Run `node` as the next call of the computing stream."""
        if is_wait(node):
            sent = node_at(node, 0)
            self._stop_overlap(sent)
            arrived = self.done.get(sent, 0.0)
            self.in_flight.pop(sent, None)
            self.waited += max(arrived - self.now, 0.0)
            self.now = max(self.now, arrived)
            if is_collective(sent):
                self.now += host_us(sent, self.hardware, self.mesh)[1]
        elif is_collective(node):
            self.now += host_us(node, self.hardware, self.mesh)[0]
            self._send(node, str(node.args[-1]))
        elif is_fused(node):
            self._compute(fused_us(node, self.hardware))
        else:
            self._compute(node_us(node, self.hardware) if self.compiled is None else self.compiled[node])

    def _send(self, node: Node, axis: str) -> None:
        kind, whole = kind_of(node), whole_bytes(node)
        slowdown = self.hardware.overlap_slowdown(kind, self.mesh, axis)
        us = self.hardware.collective_us(kind, whole, self.mesh, axis) * slowdown
        begin = max(self.link_free.get(axis, 0.0), self.now)
        shared = 0.0
        for other, until in self.link_free.items():
            both = min(until - begin, us)
            if other != axis and both > 0 and self.hardware.shares_links(self.mesh, axis, other):
                self._delay(other, begin, both)
                shared += both
        self.begun[node], self.in_flight[node] = begin, axis
        self.done[node] = self.link_free[axis] = begin + us + shared
        if stolen := self.hardware.compute_steal_us(kind, whole, self.mesh, axis):
            self.stolen_us[node] = stolen

    def _stop_overlap(self, sent: Node) -> None:
        """The rank waits for `sent` now, so that everything in flight runs at the speed that it has without compute."""
        axis = self.in_flight.get(sent)
        slowdown = self.hardware.overlap_slowdown(kind_of(sent), self.mesh, axis) if axis else 1.0
        if slowdown == 1 or self.done[sent] <= self.now:
            return
        gained = (self.done[sent] - self.now) * (1 - 1 / slowdown)
        for node in self.in_flight:
            if self.done[node] > self.now:
                self.begun[node] -= min(gained, max(self.begun[node] - self.now, 0.0))
                self.done[node] = max(self.done[node] - gained, self.now)
        for axis, until in self.link_free.items():
            self.link_free[axis] = max(until - gained, min(until, self.now))

    def _delay(self, axis: str, after: float, us: float) -> None:
        self.link_free[axis] += us
        for node, its in self.in_flight.items():
            if its == axis and self.done[node] > after:
                self.done[node] += us

    def _compute(self, us: float) -> None:
        """Compute for `us`, and longer by what collectives in flight steal; of several, the first one counts."""
        for node in list(self.stolen_us):
            begin, done = self.begun[node], self.done[node]
            if done <= self.now:
                del self.stolen_us[node]
                continue
            before = min(us, max(begin - self.now, 0.0))
            self.now, us = self.now + before, us - before
            slower = 1 / (1 - min(self.stolen_us[node] / (done - begin), TUNING.most_slowed_share))
            overlapped = min(us, (done - self.now) / slower)
            self.now, us = self.now + overlapped * slower, us - overlapped
            if us <= 0:
                return
        self.now += us


@dataclass(frozen=True)
class SimulationResult:
    """The predicted times of a step in microseconds: `step_us` in total, `exposed_us` waiting for collectives.

    `step_us` is the device's. `host_us` is what the host of a GPU needs to start the step op by op: a step that is not
    recorded as a CUDA graph takes at least that. It is 0 where the host computes.

    `mfu` is the model FLOPs utilization: the operations of a rank's products, convolutions and attention (two for each
    multiplication and addition; recomputed ones left out), over the step's time and the hardware's peak for their
    dtypes.

    Example:
        >>> found = ws.simulate(local, ws.Hardware.preset("dgx-h100"))
        >>> print(found.step_us, found.exposed_us, found.mfu)
    """

    step_us: float
    exposed_us: float
    mfu: float = 0.0
    host_us: float = 0.0


def simulate(local: LocalGraph, hardware: Hardware, compiled: bool = False) -> SimulationResult:
    """Predict the time of a step from the order of its program. If a step ends in the next call, the result is that of
    the second of two steps. `compiled`: ops run as the kernels that `backend="inductor"` makes of them.

    Example:
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100")).step_us)
    """
    check_arguments("simulate", local=(local, LocalGraph), hardware=(hardware, Hardware), compiled=(compiled, bool))
    clock = steady_start(local, hardware, compiled_us(local.graph, hardware) if compiled else None)
    run_all(clock, local.graph.nodes)
    return result_of(local, clock)


def result_of(local: LocalGraph, clock: Clock) -> SimulationResult:
    """The result of a clock that has run `local`."""
    mfu = peak_us(local.graph, clock.hardware) / clock.now if clock.now else 0.0
    return SimulationResult(clock.now, clock.waited, mfu, clock.hardware.start_us * _started_by_host(local, clock))


def _started_by_host(local: LocalGraph, clock: Clock) -> int:
    """The number of kernels and collectives."""
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    if clock.compiled is not None:
        return sum(is_collective(node) or clock.compiled[node] > 0 for node in calls)
    return sum(is_collective(node) or (not is_wait(node) and work(node) is not None) for node in calls)


def start(
    local: LocalGraph, hardware: Hardware, arrivals: Mapping[str, float], compiled: Mapping[Node, float] | None = None
) -> Clock:
    """The clock at the start of a step. `arrivals`: when the collectives that it carries complete, in microseconds."""
    clock = Clock(hardware, local.mesh, compiled=compiled)
    for given, node in local.placeholders():
        if given.role is Role.CARRY:
            clock.done[node] = arrivals.get(given.name, 0.0)
            if given.owner:
                clock.link_free[given.owner] = max(clock.link_free.get(given.owner, 0.0), clock.done[node])
    return clock


def steady_start(local: LocalGraph, hardware: Hardware, compiled: Mapping[Node, float] | None = None) -> Clock:
    """The clock at the start of a step; of one that ends in the next call, at the start of the second of two steps."""
    clock = start(local, hardware, {}, compiled)
    if any(i.role is Role.CARRY for i in local.inputs):
        run_all(clock, local.graph.nodes)
        clock = start(local, hardware, arrivals_after(local, clock), compiled)
    return clock


def arrivals_after(local: LocalGraph, clock: Clock) -> dict[str, float]:
    """The `arrivals` of the step after the one that `clock` has run."""
    carried = {out.target: node for out, node in local.results() if out.kind == "carry"}
    return {name: max(clock.done.get(node, 0.0) - clock.now, 0.0) for name, node in carried.items()}


def run_all(clock: Clock, nodes: Iterable[Node]) -> None:
    """Run call nodes in order."""
    for node in nodes:
        if node.op == "call_function":
            clock.run(node)


def sent_us(node: Node, hardware: Hardware, mesh: Mesh) -> float:
    """Microseconds that a collective occupies its links."""
    return hardware.collective_us(kind_of(node), whole_bytes(node), mesh, str(node.args[-1]))


def host_us(node: Node, hardware: Hardware, mesh: Mesh) -> tuple[float, float]:
    """Microseconds in which a rank computes nothing: to start a collective, and once it is complete."""
    return hardware.host_us(kind_of(node), whole_bytes(node), mesh, str(node.args[-1]))


def whole_bytes(node: Node) -> int:
    """Bytes of the largest buffer that a rank holds for a collective."""
    return max(meta.size_bytes(node_at(node, 0)), meta.size_bytes(node))


def kind_of(node: Node) -> Collective:
    """The kind of a collective node."""
    kind = collective_kind(node.target)
    assert kind is not None, f"%{node.name} is a collective"
    return kind
