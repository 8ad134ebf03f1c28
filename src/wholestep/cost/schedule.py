"""Simulates a local graph: one stream that computes, and one wire that carries collectives in the order they start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role, node_at
from ..graph.verify import is_collective, is_wait
from ..mesh import Mesh
from .compute import node_us
from .curves import KINDS
from .speeds import Speeds


@dataclass
class Clock:
    """The two streams at some point of a step, in microseconds since its start."""

    machine: Speeds
    mesh: Mesh
    now: float = 0.0
    wire: float = 0.0
    waited: float = 0.0
    done: dict[Node, float] = field(default_factory=dict[Node, float])

    def run(self, node: Node) -> None:
        """`node` is the next of the computing stream."""
        if is_wait(node):
            arrived = self.done.get(node_at(node, 0), 0.0)
            self.waited += max(arrived - self.now, 0.0)
            self.now = max(self.now, arrived)
        elif is_collective(node):
            self.now += self.machine.launch_us
            self.wire = max(self.wire, self.now) + sent_us(node, self.machine, self.mesh)
            self.done[node] = self.wire
        else:
            self._compute(node_us(node, self.machine))

    def _compute(self, us: float) -> None:
        """What runs while the wire is busy takes longer by the machine's contention."""
        slower = self.machine.contention
        beside = min(us, max(self.wire - self.now, 0.0) / slower) if slower != 1 else 0.0
        self.now += us + beside * (slower - 1)


@dataclass(frozen=True)
class Simulated:
    """What a step takes by the simulation: in all, and waiting for collectives. Microseconds."""

    step_us: float
    exposed_us: float


def simulate(local: LocalGraph, machine: Speeds) -> Simulated:
    """Run the nodes of `local` in their order; where a step ends in the next one, after a step of the same kind."""
    clock = start(local, machine, {})
    run_all(clock, local.graph.nodes)
    if any(i.role is Role.CARRY for i in local.inputs):
        clock = start(local, machine, left(local, clock))
        run_all(clock, local.graph.nodes)
    return Simulated(clock.now, clock.waited)


def start(local: LocalGraph, machine: Speeds, arrivals: Mapping[str, float]) -> Clock:
    """The start of a step. `arrivals`: when what is carried into it is complete, in microseconds from now."""
    clock = Clock(machine, local.mesh, wire=max([0.0, *arrivals.values()]))
    for given, node in local.placeholders():
        if given.role is Role.CARRY:
            clock.done[node] = arrivals.get(given.name, 0.0)
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


def sent_us(node: Node, machine: Speeds, mesh: Mesh) -> float:
    """Microseconds a collective keeps the wire."""
    given, made = meta.tensor(node_at(node, 0)), meta.tensor(node)
    whole = max(given.size_bytes if given else 0, made.size_bytes if made else 0)
    return machine.collective_us(kind_of(node), whole, mesh, str(node.args[-1]))


def kind_of(node: Node) -> str:
    """all_reduce, all_gather, reduce_scatter, all_to_all or broadcast."""
    name = str(node.target)
    return next((kind for kind in KINDS if kind in name), name)
