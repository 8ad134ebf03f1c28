"""Costs of one rank's program, and bounds and estimates of them that need less work than a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch.fx import Node

from ..cost.compute import flops
from ..cost.memory import PeakMemory, peak_memory
from ..cost.reserved import reserved_bytes
from ..cost.simulation import SimulationResult, kind_of, simulate, whole_bytes
from ..cost.software import OWN, Software, pricing_of
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
from ..precision import StepPrecision
from .recompute_kinds import passes_of


@dataclass(frozen=True)
class Costs:
    """Bytes held between steps, peak bytes, bytes sent, collectives and seconds of one step of a rank.

    Args:
        model_s: seconds of the model's arithmetic at the peak rate of the hardware; MFU is its share of `step_s`.
        again_s: the same of what is recomputed.
        host_s: that the host of a GPU needs to start the step op by op.
        by_kind: bytes at the peak by kind (`PeakMemory.by_kind`).
        reserved_bytes: of torch's allocator; None where the device has none, or the program not all layers.
        idle_s: that a rank of a pipeline waits for other stages, on average.
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
    by_kind: Mapping[str, int] = field(default_factory=dict[str, int])
    reserved_bytes: int | None = None
    idle_s: float = 0.0
    precision: StepPrecision | None = None

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_s / self.step_s if self.step_s else 0.0

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: recomputed arithmetic counts too."""
        return (self.model_s + self.again_s) / self.step_s if self.step_s else 0.0


def costs(
    local: LocalGraph, planned: Plan, hardware: Hardware, passes: Sequence[Pass] | None = None, software: Software = OWN
) -> Costs:
    """The costs of a rank's program after `passes`, the standard pipeline of `software` if None."""
    program = run_passes(local, passes_of("none", hardware, software=software) if passes is None else passes)
    return costs_of(program, planned, hardware, software)


def costs_of(program: LocalGraph, planned: Plan, hardware: Hardware, software: Software = OWN) -> Costs:
    """The costs of a program with all layers that has been through all passes."""
    part_costs = costs_of_part(program, planned, hardware, software)
    return replace(part_costs, reserved_bytes=reserved_bytes(program, hardware, software))


def costs_of_part(program: LocalGraph, planned: Plan, hardware: Hardware, software: Software = OWN) -> Costs:
    """The same of one with few layers, from which costs are extrapolated. What an allocator reserves is not even in
    layers, so that it is not asked for.
    """
    return costs_from(program, planned, simulate(program, hardware, software), peak_memory(program))


def costs_from(program: LocalGraph, planned: Plan, took: SimulationResult, peak: PeakMemory) -> Costs:
    """The same from its simulation."""
    totals, step_s = program.collectives().values(), took.step_us / 1e6
    return Costs(
        planned.stored_bytes("param") + planned.stored_bytes("state"), peak.size_bytes,
        sum(total.bytes for total in totals), sum(total.count for total in totals), step_s, took.exposed_us / 1e6,
        took.mfu * step_s, (took.hfu - took.mfu) * step_s, took.host_us / 1e6, peak.by_kind(),
        precision=planned.precision,
    )  # fmt: skip


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


def lower_bound(local: LocalGraph, hardware: Hardware, software: Software = OWN) -> LowerBound:
    """The lower bound of `local` before passes; of the program of all stages, that of a stage with an equal share."""
    sent: Counter[tuple[str, str]] = Counter()
    stages = local.mesh.axis_size(local.stage_axis) if local.stage_axis and local.stage is None else 1
    computed, op_us = 0.0, pricing_of(local.graph, hardware, software)
    for node, times in with_bodies(local.graph):
        if is_collective(node):
            sent[str(node.args[-1]), kind_of(node)] += times * whole_bytes(node)
        elif node.op == "call_function" and (flops(node) or is_list_op(node.target)) and not loop_of(node):
            computed += times * op_us(node)
    return LowerBound(computed / stages, {key: size / stages for key, size in sent.items()})


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
    param_bytes = sum(i.meta.size_bytes for i in graph.inputs if i.role is Role.PARAM) / ranks
    collectives = data_collectives(mesh, strategies.data, param_bytes) if strategies.data else ()
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
