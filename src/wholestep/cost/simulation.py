"""Simulates a local graph: one stream that computes, one of collectives for each mesh axis, and one of copies from and
to the host for each direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.loop import Loop, loop_of, with_bodies
from ..graph.nodes import is_collective, is_wait, node_at, ranks_in_ring
from ..graph.op_kinds import ARRIVALS, HOST_COPIES, Collective, collective_kind
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from .compute import is_free, node_us, peak_us
from .fused import fused_us, is_fused
from .software import OWN, Software


@dataclass
class Clock:
    """The streams at one moment of a step. Times are in microseconds since the start of the step.

    Completion times assume that the rank computes until then; `_stop_overlap` corrects them where it waits. While
    collectives of two axes use the same links, each gets half of their rate.

    Args:
        now: of the computing stream.
        waited: time that it has waited for collectives and copies.
        link_free: for each axis, when the last of its collectives completes.
        copies_free: for each direction, when the last copy between host and device completes.
        begun, ends: when a collective or such a copy starts and completes.
        in_flight: the axis of each collective that nobody has waited for.
        stolen_us: compute time that a collective in flight costs, spread evenly from its start to its completion.
        times: microseconds of each op, where ops are not kernels of their own (`Software.op_times`).
        starts: microseconds of the host for each op that it starts, where it does not start all at once.
        host: when the host has started the last op.
    """

    hardware: Hardware
    mesh: Mesh
    now: float = 0.0
    waited: float = 0.0
    link_free: dict[str, float] = field(default_factory=dict[str, float])
    copies_free: dict[str, float] = field(default_factory=dict[str, float])
    ends: dict[Node, float] = field(default_factory=dict[Node, float])
    begun: dict[Node, float] = field(default_factory=dict[Node, float])
    in_flight: dict[Node, str] = field(default_factory=dict[Node, str])
    stolen_us: dict[Node, float] = field(default_factory=dict[Node, float])
    times: Mapping[Node, float] | None = None
    starts: Mapping[Node, float] | None = None
    host: float = 0.0

    @property
    def links_free(self) -> float:
        """When the last collective completes."""
        return max(self.link_free.values(), default=0.0)

    def run(self, node: Node) -> None:
        """Run `node` as the next call of the computing stream, once the host has started it. Of owners, the first."""
        if not meta.runs_on_first(node):
            return
        if self.starts is not None and not loop_of(node):
            self.host += self.starts.get(node, 0.0)
            self.now = max(self.now, self.host)
        if loop := loop_of(node):
            self._run_pieces(loop)
        elif is_wait(node):
            sent = node_at(node, 0)
            self._stop_overlap(sent)
            self.in_flight.pop(sent, None)
            self._wait_until(self.ends.get(sent, 0.0))
            if is_collective(sent):
                self.now += host_us(sent, self.hardware, self.mesh)[1]
        elif is_collective(node):
            self.now += host_us(node, self.hardware, self.mesh)[0]
            self._send(node, str(node.args[-1]))
        elif node.target in HOST_COPIES and (copy_us := self.hardware.host_copy_us(meta.size_bytes(node))) is not None:
            stream = f"to {HOST_COPIES[node.target]}"
            self.begun[node] = max(self.copies_free.get(stream, 0.0), self.now)
            self.ends[node] = self.copies_free[stream] = self.begun[node] + copy_us
        elif node.target in ARRIVALS:
            self._wait_until(self.ends.get(node_at(node, 0), 0.0))
        elif is_fused(node):
            self.compute(fused_us(node, self.hardware))
        else:
            self.compute(node_us(node, self.hardware) if self.times is None else self.times[node])

    def _wait_until(self, us: float) -> None:
        self.waited += max(us - self.now, 0.0)
        self.now = max(self.now, us)

    def _run_pieces(self, loop: Loop) -> None:
        """Run the first two pieces; all that follow take as long as the second."""
        before, waited, host = self.now, self.waited, self.host
        for _ in range(2):
            before, waited, host = self.now, self.waited, self.host
            for node in loop.body.nodes:
                if node.op == "call_function":
                    self.run(node)
        further = loop.pieces - 2
        added_us = further * (self.now - before)
        self.now, self.host = self.now + added_us, self.host + further * (self.host - host)
        self.waited += further * (self.waited - waited)
        self.link_free = {axis: until + added_us for axis, until in self.link_free.items()}
        self.copies_free = {stream: until + added_us for stream, until in self.copies_free.items()}

    def _send(self, node: Node, axis: str) -> None:
        kind, size_bytes = kind_of(node), whole_bytes(node)
        slowdown = self.hardware.overlap_slowdown(kind, self.mesh, axis)
        us = self.hardware.collective_us(kind, size_bytes, self.mesh, axis) * slowdown
        begin = max(self.link_free.get(axis, 0.0), self.now)
        shared = 0.0
        for other, until in self.link_free.items():
            both = min(until - begin, us)
            if other != axis and both > 0 and self.hardware.shares_links(self.mesh, axis, other):
                self._delay(other, begin, both)
                shared += both
        self.begun[node], self.in_flight[node] = begin, axis
        self.ends[node] = self.link_free[axis] = begin + us + shared
        if stolen := self.hardware.compute_steal_us(kind, size_bytes, self.mesh, axis):
            self.stolen_us[node] = stolen

    def _stop_overlap(self, sent: Node) -> None:
        """The rank waits for `sent` now, so that everything in flight runs at the speed that it has without compute."""
        axis = self.in_flight.get(sent)
        slowdown = self.hardware.overlap_slowdown(kind_of(sent), self.mesh, axis) if axis else 1.0
        if slowdown == 1 or self.ends[sent] <= self.now:
            return
        gained = (self.ends[sent] - self.now) * (1 - 1 / slowdown)
        for node in self.in_flight:
            if self.ends[node] > self.now:
                self.begun[node] -= min(gained, max(self.begun[node] - self.now, 0.0))
                self.ends[node] = max(self.ends[node] - gained, self.now)
        for axis, until in self.link_free.items():
            self.link_free[axis] = max(until - gained, min(until, self.now))

    def _delay(self, axis: str, after: float, us: float) -> None:
        self.link_free[axis] += us
        for node, its in self.in_flight.items():
            if its == axis and self.ends[node] > after:
                self.ends[node] += us

    def compute(self, us: float) -> None:
        """Compute for `us`, and longer by what collectives in flight steal; of several, the first one counts."""
        for node in list(self.stolen_us):
            begin, end = self.begun[node], self.ends[node]
            if end <= self.now:
                del self.stolen_us[node]
                continue
            before = min(us, max(begin - self.now, 0.0))
            self.now, us = self.now + before, us - before
            slower = 1 / (1 - min(self.stolen_us[node] / (end - begin), TUNING.most_slowed_share))
            overlapped = min(us, (end - self.now) / slower)
            self.now, us = self.now + overlapped * slower, us - overlapped
            if us <= 0:
                return
        self.now += us


@dataclass(frozen=True)
class SimulationResult:
    """The predicted times of a step in microseconds: `step_us` in total, `exposed_us` waiting for collectives and for
    copies from and to the host.

    Of a pipeline, `step_us` is until the last stage ends, and `exposed_us` how long a stage does nothing, on average.
    Else `step_us` is that of the device, or where a `Software` starts ops one by one, that of both. `host_us` is what
    the host of a GPU needs to start the step op by op: a step that is not recorded as a CUDA graph takes at least that.
    It is 0 where the host computes.

    `mfu` is the model FLOPs utilization: the operations of a rank's products, convolutions and attention (two for each
    multiplication and addition; recomputed ones left out), over the step's time and the hardware's peak for their
    dtypes. `hfu` is the hardware FLOPs utilization: the same with the recomputed ones.

    Example:
        >>> predicted = ws.simulate(local, ws.Hardware.preset("dgx-h100"))
        >>> print(predicted.step_us, predicted.exposed_us, predicted.mfu)
    """

    step_us: float
    exposed_us: float
    mfu: float = 0.0
    host_us: float = 0.0
    hfu: float = 0.0


def simulate(local: LocalGraph, hardware: Hardware, software: Software = OWN) -> SimulationResult:
    """The time of a step of one rank, from the order of its program (`planner.prediction.simulate`)."""
    clock = steady_start(local, priced(local, hardware, software))
    run_all(clock, local.graph.nodes)
    return result_of(local, clock)


def priced(local: LocalGraph, hardware: Hardware, software: Software = OWN) -> Clock:
    """A clock that knows what each op of `local` takes. Raises PlanError for a stage of a pipeline."""
    if local.stage is not None:
        needed = "the program of all stages, as partition returns it"
        raise PlanError(f"stage {local.stage} alone has no time: it waits for the others", needed, "simulate that")
    assert not local.stage_axis, "all stages together are predicted by planner.prediction"
    return clock_of(local.graph, local.mesh, hardware, software)


def clock_of(graph: Graph, mesh: Mesh, hardware: Hardware, software: Software = OWN) -> Clock:
    """A clock that knows what each op of `graph` takes, with the links of `mesh`."""
    times = software.op_times(graph, hardware)
    begun = None if times is None else software.host_times(graph, times, hardware)
    return Clock(hardware, mesh, times=times, starts=begun)


def result_of(local: LocalGraph, clock: Clock) -> SimulationResult:
    """The result of a clock that has run `local`."""
    once, again = peak_us(local.graph, clock.hardware)
    mfu, hfu = (once / clock.now, (once + again) / clock.now) if clock.now else (0.0, 0.0)
    hosted = clock.hardware.start_us * _started_by_host(local, clock) if clock.starts is None else clock.host
    return SimulationResult(clock.now, clock.waited, mfu, hosted, hfu)


def _started_by_host(local: LocalGraph, clock: Clock) -> int:
    """The number of kernels and collectives."""
    calls = [
        (node, times)
        for node, times in with_bodies(local.graph)
        if node.op == "call_function" and not loop_of(node) and meta.runs_on_first(node)
    ]
    if clock.times is not None:
        return sum(times for node, times in calls if is_collective(node) or clock.times[node] > 0)
    return sum(times for node, times in calls if is_collective(node) or (not is_wait(node) and not is_free(node)))


def start(local: LocalGraph, clock: Clock, arrivals: Mapping[str, float]) -> Clock:
    """A clock like `clock` at the start of a step. `arrivals`: when the collectives that it carries complete, in
    microseconds.
    """
    clock = Clock(clock.hardware, local.mesh, times=clock.times, starts=clock.starts)
    for graph_input, node in local.placeholders():
        if graph_input.role is Role.CARRY:
            clock.ends[node] = arrivals.get(graph_input.name, 0.0)
            if graph_input.owner:
                clock.link_free[graph_input.owner] = max(clock.link_free.get(graph_input.owner, 0.0), clock.ends[node])
    return clock


def steady_start(local: LocalGraph, clock: Clock) -> Clock:
    """The clock at the start of a step; of one that ends in the next call, at the start of the second of two steps."""
    clock = start(local, clock, {})
    if any(i.role is Role.CARRY for i in local.inputs):
        run_all(clock, local.graph.nodes)
        clock = start(local, clock, arrivals_after(local, clock))
    return clock


def arrivals_after(local: LocalGraph, clock: Clock) -> dict[str, float]:
    """The `arrivals` of the step after the one that `clock` has run."""
    carried = {out.target: node for out, node in local.results() if out.kind == "carry"}
    return {name: max(clock.ends.get(node, 0.0) - clock.now, 0.0) for name, node in carried.items()}


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
    """Bytes of the largest buffer that a rank holds for a collective; with a part for itself, where it sends all."""
    size_bytes = max(meta.size_bytes(node_at(node, 0)), meta.size_bytes(node))
    return -(-size_bytes * ranks // (ranks - 1)) if (ranks := ranks_in_ring(node)) else size_bytes


def kind_of(node: Node) -> Collective:
    """The kind of a collective node."""
    kind = collective_kind(node.target)
    assert kind is not None, f"%{node.name} is a collective"
    return kind
