"""Simulates a local graph: a stream that computes, and one for each axis that carries its collectives in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role, node_at
from ..graph.verify import is_collective, is_wait
from ..hardware.curves import KINDS
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from .compute import node_us, peak_us

_MOST_TAKEN = 0.9  # of computing, by collectives: something is left


@dataclass
class Clock:
    """The streams at some point of a step, in microseconds since its start. `wires` says of each axis when all of its
    collectives are complete, `done` the same of each: if the rank computes until then, since while it waits they are
    faster. Those of two axes that share links get half the rate each. `taken` is what those that are not complete take
    from computing, evenly while they are on their way.
    """

    hardware: Hardware
    mesh: Mesh
    now: float = 0.0
    waited: float = 0.0
    wires: dict[str, float] = field(default_factory=dict[str, float])
    done: dict[Node, float] = field(default_factory=dict[Node, float])
    begun: dict[Node, float] = field(default_factory=dict[Node, float])
    flying: dict[Node, str] = field(default_factory=dict[Node, str])
    taken: dict[Node, float] = field(default_factory=dict[Node, float])

    @property
    def wire(self) -> float:
        """When all collectives are complete."""
        return max(self.wires.values(), default=0.0)

    def run(self, node: Node) -> None:
        """`node` is the next of the computing stream."""
        if is_wait(node):
            sent = node_at(node, 0)
            self._hurry(sent)
            arrived = self.done.get(sent, 0.0)
            self.flying.pop(sent, None)
            self.waited += max(arrived - self.now, 0.0)
            self.now = max(self.now, arrived)
            if is_collective(sent):
                self.now += host_us(sent, self.hardware, self.mesh)[1]
        elif is_collective(node):
            self.now += host_us(node, self.hardware, self.mesh)[0]
            self._send(node, str(node.args[-1]))
        else:
            self._compute(node_us(node, self.hardware))

    def _send(self, node: Node, axis: str) -> None:
        kind, whole = kind_of(node), whole_bytes(node)
        slowdown = self.hardware.overlap_slowdown(kind, self.mesh, axis)
        us = self.hardware.collective_us(kind, whole, self.mesh, axis) * slowdown
        begin = max(self.wires.get(axis, 0.0), self.now)
        beside = 0.0
        for other, until in self.wires.items():
            both = min(until - begin, us)
            if other != axis and both > 0 and self.hardware.shares_links(self.mesh, axis, other):
                self._delay(other, begin, both)
                beside += both
        self.begun[node], self.flying[node] = begin, axis
        self.done[node] = self.wires[axis] = begin + us + beside
        if taken := self.hardware.compute_steal_us(kind, whole, self.mesh, axis):
            self.taken[node] = taken

    def _hurry(self, sent: Node) -> None:
        """A rank that waits for `sent` computes nothing beside what is on its way."""
        axis = self.flying.get(sent)
        slowdown = self.hardware.overlap_slowdown(kind_of(sent), self.mesh, axis) if axis else 1.0
        if slowdown == 1 or self.done[sent] <= self.now:
            return
        gained = (self.done[sent] - self.now) * (1 - 1 / slowdown)
        for node in self.flying:
            if self.done[node] > self.now:
                self.begun[node] -= min(gained, max(self.begun[node] - self.now, 0.0))
                self.done[node] = max(self.done[node] - gained, self.now)
        for axis, until in self.wires.items():
            self.wires[axis] = max(until - gained, min(until, self.now))

    def _delay(self, axis: str, after: float, us: float) -> None:
        self.wires[axis] += us
        for node, its in self.flying.items():
            if its == axis and self.done[node] > after:
                self.done[node] += us

    def _compute(self, us: float) -> None:
        """What runs beside a collective takes longer by what that takes; beside several, by the first of them."""
        for node in list(self.taken):
            begin, done = self.begun[node], self.done[node]
            if done <= self.now:
                del self.taken[node]
                continue
            before = min(us, max(begin - self.now, 0.0))
            self.now, us = self.now + before, us - before
            slower = 1 / (1 - min(self.taken[node] / (done - begin), _MOST_TAKEN))
            beside = min(us, (done - self.now) / slower)
            self.now, us = self.now + beside * slower, us - beside
            if us <= 0:
                return
        self.now += us


@dataclass(frozen=True)
class SimulationResult:
    """What a step takes by the simulation, in microseconds: in all, and waiting for collectives.

    `mfu` is the model FLOPs utilization: operations of a rank's products, convolutions and attention (two for a
    multiplication and an addition; those that are made again in the backward left out) over the step's time and the
    machine's peak for each one's dtype.

    Example:
        >>> found = ws.simulate(local, ws.Hardware.preset("dgx-h100"))
        >>> print(found.step_us, found.exposed_us, found.mfu)
    """

    step_us: float
    exposed_us: float
    mfu: float = 0.0


def simulate(local: LocalGraph, hardware: Hardware) -> SimulationResult:
    """Run the nodes of `local` in their order; where a step ends in the next one, after a step of the same kind.

    Example:
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100")).step_us)
    """
    clock = start(local, hardware, {})
    run_all(clock, local.graph.nodes)
    if any(i.role is Role.CARRY for i in local.inputs):
        clock = start(local, hardware, left(local, clock))
        run_all(clock, local.graph.nodes)
    return simulated(local, clock)


def simulated(local: LocalGraph, clock: Clock) -> SimulationResult:
    """What `clock` shows after it has run `local`."""
    return SimulationResult(
        clock.now, clock.waited, peak_us(local.graph, clock.hardware) / clock.now if clock.now else 0.0
    )


def start(local: LocalGraph, hardware: Hardware, arrivals: Mapping[str, float]) -> Clock:
    """The start of a step. `arrivals`: when what is carried into it is complete, in microseconds from now."""
    clock = Clock(hardware, local.mesh)
    for given, node in local.placeholders():
        if given.role is Role.CARRY:
            clock.done[node] = arrivals.get(given.name, 0.0)
            if given.owner:
                clock.wires[given.owner] = max(clock.wires.get(given.owner, 0.0), clock.done[node])
    return clock


def left(local: LocalGraph, clock: Clock) -> dict[str, float]:
    """`arrivals` of the step that follows the one that `clock` has run."""
    carried = {out.target: node for out, node in local.results() if out.kind == "carry"}
    return {name: max(clock.done.get(node, 0.0) - clock.now, 0.0) for name, node in carried.items()}


def run_all(clock: Clock, nodes: Iterable[Node]) -> None:
    """Run call nodes one after the other."""
    for node in nodes:
        if node.op == "call_function":
            clock.run(node)


def sent_us(node: Node, hardware: Hardware, mesh: Mesh) -> float:
    """Microseconds a collective keeps the wire."""
    return hardware.collective_us(kind_of(node), whole_bytes(node), mesh, str(node.args[-1]))


def host_us(node: Node, hardware: Hardware, mesh: Mesh) -> tuple[float, float]:
    """Microseconds in which a rank computes nothing as it starts a collective, and once that is complete."""
    return hardware.host_us(kind_of(node), whole_bytes(node), mesh, str(node.args[-1]))


def whole_bytes(node: Node) -> int:
    """Of the largest buffer that a rank holds for a collective."""
    given, made = meta.tensor(node_at(node, 0)), meta.tensor(node)
    return max(given.size_bytes if given else 0, made.size_bytes if made else 0)


def kind_of(node: Node) -> str:
    """all_reduce, all_gather, reduce_scatter, all_to_all or broadcast."""
    name = str(node.target)
    return next((kind for kind in KINDS if kind in name), name)
