"""A quick estimate of time and memory of a step: the order in which `GpuSearch` simulates, never what wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from wholestep.cost.compute import flops
from wholestep.cost.memory import peak_memory
from wholestep.cost.simulation import sent_us
from wholestep.cost.software import pricing_of
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.nodes import is_collective
from wholestep.graph.storage import storages
from wholestep.hardware.hardware import Hardware
from wholestep.mesh import Mesh
from wholestep.passes.forward_backward import forward_backward
from wholestep.plan.strategies import Strategies
from wholestep.planner.bounds import data_collectives
from wholestep.planner.recompute_kinds import RecomputeKind

from .short_steps import ShortStep, ShortSteps


@dataclass(frozen=True)
class BatchTimes:
    """Microseconds of one micro-batch on one rank, in sequence: forward, its part without products, backward, update,
    and collectives along the axis of tensor parallelism.
    """

    forward_us: float
    elementwise_us: float
    backward_us: float
    update_us: float
    tensor_us: float

    def batch_us(self, kind: RecomputeKind) -> float:
        """Forward, backward and what is recomputed."""
        again = {"none": 0.0, "selective": self.elementwise_us}.get(kind, self.forward_us)
        return self.forward_us + self.backward_us + self.tensor_us + again


@dataclass(frozen=True)
class BatchBytes:
    """Transient bytes of a rank during one micro-batch: a lower bound for all schedules, and the peak of the program
    before it is scheduled.
    """

    least: int
    likely: int


@dataclass
class SetupEstimate:
    """Estimates for one model; profiles and bytes are those of parameters sharded over all data-parallel axes."""

    steps: ShortSteps
    hardware: Hardware
    tensor_axis: str
    probes: dict[tuple[int, int], ShortStep] = field(default_factory=dict[tuple[int, int], ShortStep])
    profiles: dict[tuple[int, int], BatchTimes] = field(default_factory=dict[tuple[int, int], BatchTimes])
    bytes_by_kind: dict[tuple[int, int, RecomputeKind], BatchBytes] = field(
        default_factory=dict[tuple[int, int, RecomputeKind], BatchBytes]
    )

    def probe(self, mesh: Mesh, strategies: Strategies, batch: int) -> None:
        """Plan what is profiled for the ranks that share a layer on `mesh`."""
        key = self.split(mesh), batch
        if key not in self.probes:
            self.probes[key] = step = self.steps.fewest(mesh, strategies, batch)
            self.profiles[key] = self._profiled(step)

    def split(self, mesh: Mesh) -> int:
        """The ranks that share a layer."""
        return mesh.axis_size(self.tensor_axis) if self.tensor_axis in mesh.names else 1

    def _profiled(self, step: ShortStep) -> BatchTimes:
        def summed(part: str) -> float:
            return step.whole(lambda local: self._summed(local, part))

        return BatchTimes(*(summed(part) for part in ("forward", "elementwise", "backward", "update", "tensor")))

    def _summed(self, local: LocalGraph, part: str) -> float:
        total, op_us = 0.0, pricing_of(local.graph, self.hardware, self.steps.software)
        for node in local.graph.nodes:
            if node.op != "call_function":
                continue
            if is_collective(node):
                on_axis = part == "tensor" and str(node.args[-1]) == self.tensor_axis
                total += sent_us(node, self.hardware, local.mesh) if on_axis else 0.0
                continue
            phase = "update" if meta.is_batch_invariant(node) else "backward" if meta.is_backward(node) else "forward"
            if phase == part or (part == "elementwise" and phase == "forward" and not flops(node)):
                total += op_us(node)
        return total

    def batch_us(self, mesh: Mesh, batch: int) -> float:
        """Microseconds that the ops of one micro-batch take at least, nothing recomputed."""
        return self.profiles[self.split(mesh), batch].batch_us("none")

    def batch_bytes(self, mesh: Mesh, batch: int, kind: RecomputeKind) -> BatchBytes:
        """Bytes of one micro-batch with a kind of recomputation."""
        key = self.split(mesh), batch, kind
        if key not in self.bytes_by_kind:
            step = self.probes[key[:2]]
            sizes = (step.whole(least_bytes, kind), step.whole(_unscheduled, kind))
            self.bytes_by_kind[key] = BatchBytes(*(round(size - step.whole(_inputs)) for size in sizes))
        return self.bytes_by_kind[key]

    def least_bytes_of(self, mesh: Mesh, batch: int, kind: RecomputeKind) -> int:
        """`BatchBytes.least` of a batch that is perhaps not captured, from the two next smaller ones: as a maximum of
        bytes that are each even in the batch it grows at least as fast from there on.
        """
        split = self.split(mesh)
        smaller = sorted(size for size in self._captured(split) if size <= batch)[-2:]
        if not smaller:
            return 0
        last, *_ = sizes = [self.batch_bytes(mesh, size, kind).least for size in reversed(smaller)]
        per_sequence = (last - sizes[-1]) // max(smaller[-1] - smaller[0], 1)
        return last + per_sequence * (batch - smaller[-1])

    def _captured(self, split: int) -> list[int]:
        return [batch for ranks, batch in self.probes if ranks == split]

    def step_us(
        self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int, kind: RecomputeKind, param_bytes: int
    ) -> float:
        """Microseconds of a step. Communication hides behind the batch that it accompanies, as far as that lasts."""
        profile, data = self.profiles[self.split(mesh), batch], strategies.data
        one_us = profile.batch_us(kind)
        if data is None:
            return micro_batches * one_us + profile.update_us
        axes = data.axes(mesh)
        replicated_axes = axes[:-1] if data.kind.grouped else () if data.kind.shards_state else axes
        each_us = all_us = 0.0
        for sent, size, axis in data_collectives(mesh, data, param_bytes / self.split(mesh)):
            us = self.hardware.collective_us(sent, size, mesh, axis)
            gathers = sent == "all_gather" and data.kind.gathers_parameters
            each_us += us if gathers or data.kind.shards_gradients else 0.0
            all_us += us
        waits = [max(us - one_us, 0.02 * us) for us in (each_us, all_us)]
        update_us = profile.update_us * prod(map(mesh.axis_size, replicated_axes))
        return micro_batches * one_us + update_us + (micro_batches - 1) * waits[0] + waits[1]


def least_bytes(local: LocalGraph) -> int:
    """Bytes that a rank holds at least, whatever passes do to `local`: its inputs, and between two ops of the forward
    and backward, whose order no pass changes, what ops before made and ops behind read. Gathered parameters and
    gradients come and go as they are scheduled, and do not count.
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    varying, main = forward_backward(local, later_stages=False)
    ordered = {node for node in calls if node in varying and node in main}
    changes, rest = [0] * (len(calls) + 1), 0
    for storage in storages(local.graph):
        if storage.first < 0:
            rest += storage.size_bytes
            continue
        reads = [place[user] for member in storage.members for user in member.users if user in ordered]
        last = max(reads, default=0)
        if storage.node in ordered and last > storage.first + 1:
            changes[storage.first + 1] += storage.size_bytes
            changes[last] -= storage.size_bytes
    return rest + max(accumulate(changes), default=0)


def _unscheduled(local: LocalGraph) -> int:
    return peak_memory(local).size_bytes


def _inputs(local: LocalGraph) -> int:
    return peak_memory(local).rest_bytes
