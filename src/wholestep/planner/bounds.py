"""Costs of one rank's program, and bounds and estimates of them that need less work than a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch.fx import Node

from ..backend.pipeline import pipeline
from ..cost.compute import flops, node_us
from ..cost.memory import PeakMemory, peak_memory
from ..cost.simulation import SimulationResult, kind_of, simulate, whole_bytes
from ..graph import meta
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.loop import loop_of, with_bodies
from ..graph.nodes import communicates, is_collective
from ..graph.op_kinds import is_list_op
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.base import Pass, run_passes
from ..plan.data_parallel import DataParallel
from ..plan.plan import Plan
from ..plan.strategies import Strategies


@dataclass(frozen=True)
class Costs:
    """Bytes held between steps, peak bytes, bytes sent, collectives and seconds of one step of a rank.

    Args:
        model_s: seconds of the model's arithmetic at the peak rate of the hardware; MFU is its share of `step_s`.
        again_s: the same of what is recomputed.
        host_s: that the host of a GPU needs to start the step op by op.
        held: bytes at the peak by kind (`PeakMemory.by_kind`).
    """

    rest_bytes: int
    peak_bytes: int
    sent_bytes: int
    collectives: int
    step_s: float
    exposed_s: float
    model_s: float = 0.0
    again_s: float = 0.0
    host_s: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_s / self.step_s if self.step_s else 0.0

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputed arithmetic counts too."""
        return (self.model_s + self.again_s) / self.step_s if self.step_s else 0.0

    def towards(self, more: Costs, times: float) -> Costs:
        """This plus `times` the difference to `more`: costs that grow evenly from one step to a larger one."""

        def line(name: str) -> float:
            return getattr(self, name) + (getattr(more, name) - getattr(self, name)) * times

        kinds = {**self.held, **more.held}
        held = {k: self.held.get(k, 0) * (1 - times) + more.held.get(k, 0) * times for k in kinds}
        return Costs(
            round(line("rest_bytes")), round(line("peak_bytes")), round(line("sent_bytes")), round(line("collectives")),
            line("step_s"), max(line("exposed_s"), 0.0), line("model_s"), line("again_s"), line("host_s"),
            {kind: round(size) for kind, size in held.items() if size > 0},
        )  # fmt: skip

    def grown(self, few: Costs, more: Costs) -> Costs:
        """This plus the difference of `more` to `few`: what a larger step costs besides, known from smaller ones."""
        names = ("peak_bytes", "sent_bytes", "collectives", "step_s", "exposed_s", "model_s", "again_s", "host_s")
        added = {name: getattr(self, name) + getattr(more, name) - getattr(few, name) for name in names}
        kinds = {**self.held, **more.held}
        held = {kind: self.held.get(kind, 0) + more.held.get(kind, 0) - few.held.get(kind, 0) for kind in kinds}
        return replace(self, **added, held={kind: size for kind, size in held.items() if size > 0})


def costs(local: LocalGraph, planned: Plan, hardware: Hardware, passes: Sequence[Pass] | None = None) -> Costs:
    """The costs of a rank's program after `passes`, the standard pipeline if None."""
    return costs_of(run_passes(local, pipeline(hardware) if passes is None else passes), planned, hardware)


def costs_of(program: LocalGraph, planned: Plan, hardware: Hardware) -> Costs:
    """The costs of a program that has been through all passes."""
    return costs_from(program, planned, simulate(program, hardware), peak_memory(program))


def costs_from(program: LocalGraph, planned: Plan, took: SimulationResult, peak: PeakMemory) -> Costs:
    """The same from its simulation."""
    totals, step_s = program.collectives().values(), took.step_us / 1e6
    return Costs(
        planned.stored_bytes("param") + planned.stored_bytes("state"),
        peak.size_bytes,
        sum(total.bytes for total in totals),
        sum(total.count for total in totals),
        step_s,
        took.exposed_us / 1e6,
        took.mfu * step_s,
        (took.hfu - took.mfu) * step_s,
        took.host_us / 1e6,
        peak.by_kind(),
    )


@dataclass(frozen=True)
class LowerBound:
    """Work that no schedule removes: microseconds of products and optimizer, bytes `sent` by axis and kind."""

    computed_us: float
    sent: Mapping[tuple[str, str], float]

    def us(self, hardware: Hardware, mesh: Mesh) -> float:
        """The longer of compute and of each axis with all of a kind in one collective.

        Cost curves are concave, so one large collective is never slower than its parts.
        """
        wires: dict[str, float] = {}
        for (axis, kind), size in self.sent.items():
            wires[axis] = wires.get(axis, 0.0) + hardware.collective_us(kind, size, mesh, axis)
        return max([self.computed_us, *wires.values()])


def lower_bound(local: LocalGraph, hardware: Hardware) -> LowerBound:
    """The lower bound of `local` before passes."""
    sent: Counter[tuple[str, str]] = Counter()
    computed = 0.0
    for node, times in with_bodies(local.graph):
        if is_collective(node):
            sent[str(node.args[-1]), kind_of(node)] += times * whole_bytes(node)
        elif node.op == "call_function" and (flops(node) or is_list_op(node.target)) and not loop_of(node):
            computed += times * node_us(node, hardware)
    return LowerBound(computed, sent)


def fingerprint(local: LocalGraph) -> int:
    """Equal for programs that are equal op for op."""
    nodes = list(with_bodies(local.graph))
    number = {node: i for i, (node, _) in enumerate(nodes)}
    return hash(
        tuple(
            (_named(n), times, tuple(number[g] for g in n.all_input_nodes),
             tuple(m and m.shape for m in meta.tensors(n)), str(n.args[-1]) if communicates(n) else "")
            for n, times in nodes
        )
    )  # fmt: skip


def _named(node: Node) -> str:
    """What a node does; a loop is told by its body."""
    return "loop" if loop_of(node) else str(node.target) if node.op == "call_function" else node.op


# -- rough estimate ------------------------------------------------------------------------------------
def rough_estimate_us(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, hardware: Hardware, computing_us: float
) -> float:
    """Microseconds of a step from its parameters alone: half of the shorter of compute (`computing_us` on one rank)
    and communication is exposed. It decides the order in which candidates are tried, never which one wins.
    """
    data = strategies.data.axes(mesh) if strategies.data else ()
    ranks = prod(mesh.axis_size(axis) for axis in strategies.axes(mesh) if axis not in data)
    computed = computing_us / ranks
    whole = sum(i.meta.size_bytes for i in graph.inputs if i.role is Role.PARAM) / ranks
    collectives = data_collectives(mesh, strategies.data, whole) if strategies.data else ()
    sent = sum(hardware.collective_us(kind, size, mesh, axis) for kind, size, axis in collectives)
    return max(computed, sent) + 0.5 * min(computed, sent)


def data_collectives(mesh: Mesh, data: DataParallel, size: float) -> Iterator[tuple[str, float, str]]:
    """The collectives of a data-parallel step, one of each kind along each axis."""
    axes = [a for a in data.axes(mesh) if mesh.axis_size(a) > 1]
    sharded = axes[-1:] if data.kind.grouped else axes if data.kind.shards_state else []
    for axis in reversed(sharded):
        for kind in ("reduce_scatter", "all_gather", *(["all_gather"] if data.reshard_after_forward else [])):
            yield kind, size, axis
        size /= mesh.axis_size(axis)
    summed = axes[: len(axes) - len(sharded)]
    for axis in reversed(summed[1:]):
        yield "reduce_scatter", size, axis
        yield "all_gather", size, axis
        size /= mesh.axis_size(axis)
    for axis in summed[:1]:
        yield "all_reduce", size, axis
