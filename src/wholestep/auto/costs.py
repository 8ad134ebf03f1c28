"""What one rank's program costs on a machine, and what it cannot cost less than."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..backend.pipeline import pipeline
from ..cost.compute import flops, node_us
from ..cost.memory import peak_memory
from ..cost.simulation import kind_of, simulate, whole_bytes
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.op_kinds import is_list_op
from ..graph.verify import is_collective
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..plan.plan import Plan
from .fit import Finish


@dataclass(frozen=True)
class Costs:
    """What one rank's program costs, a step each: bytes between steps and at most, bytes sent, seconds."""

    rest_bytes: int
    peak_bytes: int
    sent_bytes: int
    collectives: int
    step_s: float
    exposed_s: float


def costs(local: LocalGraph, planned: Plan, hardware: Hardware) -> Costs:
    """What the program of a rank costs on `machine`, as a compiled step would run it."""
    return costs_of(Finish(pipeline(hardware))(local), planned, hardware)


def costs_of(program: LocalGraph, planned: Plan, hardware: Hardware) -> Costs:
    """The same of a program that has been through all passes."""
    took, totals = simulate(program, hardware), program.collectives().values()
    return Costs(
        planned.bytes_at_rest("param") + planned.bytes_at_rest("state"),
        peak_memory(program).size_bytes,
        sum(total.bytes for total in totals),
        sum(total.count for total in totals),
        took.step_us / 1e6,
        took.exposed_us / 1e6,
    )


@dataclass(frozen=True)
class Least:
    """What a program cannot be without: microseconds of its products and of its optimizer, bytes `sent` along each
    axis with each kind of collective.
    """

    computed_us: float
    sent: Mapping[tuple[str, str], float]

    def us(self, hardware: Hardware, mesh: Mesh) -> float:
        """The longest of computing, and of what an axis has to carry, each kind at once.

        A larger collective is never dearer than its parts, as a curve of the cost model bends down or is straight.
        """
        wires: dict[str, float] = {}
        for (axis, kind), size in self.sent.items():
            wires[axis] = wires.get(axis, 0.0) + hardware.collective_us(kind, size, mesh, axis)
        return max([self.computed_us, *wires.values()])


def least_us(local: LocalGraph, hardware: Hardware) -> float:
    """What `local` takes at least, however it is scheduled."""
    return least(local, hardware).us(hardware, local.mesh)


def least(local: LocalGraph, hardware: Hardware) -> Least:
    """What no schedule removes from `local`: products, optimizer, and all that it sends."""
    sent: Counter[tuple[str, str]] = Counter()
    computed = 0.0
    for node in local.graph.nodes:
        if is_collective(node):
            sent[str(node.args[-1]), kind_of(node)] += whole_bytes(node)
        elif node.op == "call_function" and (flops(node) or is_list_op(node.target)):
            computed += node_us(node, hardware)
    return Least(computed, sent)


def fingerprint(local: LocalGraph) -> int:
    """Equal for programs that are the same op for op."""
    number = {node: i for i, node in enumerate(local.graph.nodes)}
    return hash(
        tuple(
            (str(n.target) if n.op == "call_function" else n.op, tuple(number[g] for g in n.all_input_nodes),
             tuple(m and m.shape for m in meta.tensors(n)), str(n.args[-1]) if is_collective(n) else "")
            for n in local.graph.nodes
        )
    )  # fmt: skip
