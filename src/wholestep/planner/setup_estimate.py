"""A quick estimate of time and memory of a step: the order in which `GpuSearch` simulates, never what wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ..cost.compute import flops, node_us
from ..cost.simulation import sent_us
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..plan.strategies import Strategies
from .bounds import data_collectives
from .recompute_kinds import RecomputeKind, passes_of
from .short_steps import MadeStep, ShortSteps


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


@dataclass
class SetupEstimate:
    """Estimates for one model; profiles and peaks are those of parameters sharded over all data-parallel axes."""

    steps: ShortSteps
    hardware: Hardware
    tensor_axis: str
    made: dict[tuple[int, int], MadeStep] = field(default_factory=dict[tuple[int, int], MadeStep])
    profiles: dict[tuple[int, int], BatchTimes] = field(default_factory=dict[tuple[int, int], BatchTimes])
    peaks: dict[tuple[int, int, RecomputeKind], int] = field(default_factory=dict[tuple[int, int, RecomputeKind], int])

    def probe(self, mesh: Mesh, strategies: Strategies, batch: int) -> None:
        """Plan what is profiled for the ranks that share a layer on `mesh`."""
        key = self.split(mesh), batch
        if key not in self.made:
            self.made[key] = made = self.steps.fewest(mesh, strategies, batch)
            self.profiles[key] = self._profiled(made)

    def split(self, mesh: Mesh) -> int:
        """The ranks that share a layer."""
        return mesh.axis_size(self.tensor_axis) if self.tensor_axis in mesh.names else 1

    def _profiled(self, made: MadeStep) -> BatchTimes:
        def summed(wanted: str) -> float:
            return made.whole(lambda local: self._summed(local, wanted))

        return BatchTimes(*(summed(one) for one in ("forward", "elementwise", "backward", "update", "tensor")))

    def _summed(self, local: LocalGraph, wanted: str) -> float:
        total = 0.0
        for node in local.graph.nodes:
            if node.op != "call_function":
                continue
            if is_collective(node):
                on_axis = wanted == "tensor" and str(node.args[-1]) == self.tensor_axis
                total += sent_us(node, self.hardware, local.mesh) if on_axis else 0.0
                continue
            phase = "update" if meta.is_batch_invariant(node) else "backward" if meta.is_backward(node) else "forward"
            if phase == wanted or (wanted == "elementwise" and phase == "forward" and not flops(node)):
                total += node_us(node, self.hardware)
        return total

    def batch_us(self, mesh: Mesh, batch: int) -> float:
        """Microseconds that the ops of one micro-batch take at least, nothing recomputed."""
        return self.profiles[self.split(mesh), batch].batch_us("none")

    def beside_rest_bytes(self, mesh: Mesh, batch: int, kind: RecomputeKind) -> int:
        """Bytes at the peak beside those that are kept between steps."""
        key = self.split(mesh), batch, kind
        if key not in self.peaks:
            found = self.made[key[:2]].costs(passes_of(kind, self.hardware), self.hardware)
            self.peaks[key] = found.peak_bytes - found.rest_bytes
        return self.peaks[key]

    def step_us(
        self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int, kind: RecomputeKind, param_bytes: int
    ) -> float:
        """Microseconds of a step. Communication hides behind the batch that it accompanies, as far as that lasts."""
        profile, data = self.profiles[self.split(mesh), batch], strategies.data
        one_us = profile.batch_us(kind)
        if data is None:
            return micro_batches * one_us + profile.update_us
        ranks = prod(mesh.axis_size(axis) for axis in data.axes(mesh))
        sent = data_collectives(mesh, data, param_bytes / self.split(mesh))
        each = sum(self.hardware.collective_us(kind_, size, mesh, axis) for kind_, size, axis in sent)
        times = micro_batches if data.kind.shards_gradients or data.kind.gathers_parameters else 1
        update_us = profile.update_us * (1 if data.kind.shards_state else ranks)
        return micro_batches * one_us + update_us + times * max(each - one_us, 0.02 * each)
