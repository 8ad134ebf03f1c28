"""Cost model of the layout problem: an op on the shard of one rank, a reshard from one state to another, and the
collectives, copies and bytes of storing one parameter by a storage option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...cost.compute import node_us
from ...graph import meta
from ...graph.meta import TensorMeta
from ...graph.nodes import operands
from ...hardware.device import Work
from ...hardware.hardware import Hardware
from ...layout import REPLICATED, AxisState
from ...mesh import Mesh
from ...plan.data_parallel import StorageOption
from .problem import StepLoad

States = Mapping[int, AxisState]
_FORWARD, _BACKWARD, _UPDATE = range(3)


@dataclass(frozen=True)
class Move:
    """Microseconds of one reshard: communication along the axis, and copies on the rank."""

    sent_us: float = 0.0
    copied_us: float = 0.0


@dataclass
class Prices:
    """Prices on one axis. `share`: the part of a batch-dependent value on a rank where other axes shard the batch."""

    hardware: Hardware
    mesh: Mesh
    axis: str
    share: float = 1.0
    graph: Graph = field(default_factory=Graph)

    @property
    def parts(self) -> int:
        """Ranks along the axis; 1 without one."""
        return self.mesh.axis_size(self.axis) if self.axis else 1

    def local(self, tensor: TensorMeta, state: AxisState) -> TensorMeta:
        """The shard of the first rank."""
        if state.kind != "S":
            return tensor
        shape = (*tensor.shape[: state.dim], -(-tensor.shape[state.dim] // self.parts), *tensor.shape[state.dim + 1 :])
        return meta.with_shape(tensor, shape)

    def op_us(self, node: Node, takes: States, gives: States) -> float:
        """One op on shards; operands and outputs without a state are replicated."""
        whole_us = node_us(node, self.hardware)
        if not (takes or gives) or not whole_us:
            return whole_us * self.share
        places = iter([self._stand_in(n, takes.get(i, REPLICATED)) for i, n in enumerate(operands(node))])
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(places))
        new = self.graph.create_node("call_function", node.target, args, kwargs)
        meta.copy(node, new)
        meta.set_tensors(new, [m and self.local(m, gives.get(i, REPLICATED)) for i, m in enumerate(meta.tensors(node))])
        return node_us(new, self.hardware) * self.share

    def _stand_in(self, node: Node, state: AxisState) -> Node:
        new = self.graph.placeholder(node.name)
        meta.copy(node, new)
        meta.set_tensors(new, [m and self.local(m, state) for m in meta.tensors(node)])
        return new

    # -- reshards ----------------------------------------------------------------------------
    def move(self, tensor: TensorMeta, have: AxisState, want: AxisState, bulk: bool = False) -> Move | None:
        """The reshard from `have` to `want` as `partition` does it; None where it is infeasible.

        Collectives need contiguous tensors: partial results and shards of any dim but the first are copied. Bucketed
        collectives copy into the bucket or out of it.
        """
        size, hardware = tensor.size_bytes * self.share, self.hardware
        local = size / self.parts

        def send(kind: str, size: float) -> float:
            return (bulk_us if bulk else _sent_us)(hardware, kind, size, self.mesh, self.axis)

        if have == want:
            return Move()
        if have.kind == "R":
            return Move(copied_us=copy_us(hardware, size)) if want.kind == "P" else Move()
        if want.kind == "P":
            return None
        if have.kind == "P":
            reduces = want.kind == "R" or have.op not in ("sum", "avg")
            return Move(send("all_reduce" if reduces else "reduce_scatter", size), copy_us(hardware, size))
        if want.kind == "R":
            copied = copy_us(hardware, size) if bulk else copy_us(hardware, local) if have.dim else 0.0
            return Move(send("all_gather", size), copied)
        return Move(send("all_to_all", local), copy_us(hardware, local) * (2 if want.dim else 1))


def copy_us(hardware: Hardware, size: float) -> float:
    """Microseconds of a copy of `size` bytes, with its launch."""
    return hardware.work_us(Work(round(2 * size)))


def bulk_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axis: str) -> float:
    """Microseconds of `size` bytes of a bucketed collective, with the launch of a copy."""
    if mesh.axis_size(axis) == 1 or size <= 0:
        return 0.0
    bucket = max(size, float(hardware.bucket_bytes))
    return hardware.launch_us + _sent_us(hardware, kind, bucket, mesh, axis) * size / bucket


def _sent_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axis: str) -> float:
    """Microseconds of a collective that nothing overlaps."""
    return hardware.collective_us(kind, size, mesh, axis) + sum(hardware.host_us(kind, size, mesh, axis))


# -- storage ---------------------------------------------------------------------------------------
def storage_load(
    option: StorageOption, param: float, state: float, grad: float, alone_us: float, prices: Prices, axes: Sequence[str]
) -> StepLoad:
    """What a parameter stored over `axes` adds to the step of a rank; its tensor-parallel axis is not counted. `param`,
    `state` and `grad` are bytes of it, its optimizer state and its gradient; one rank alone updates it in `alone_us`.
    """
    hardware, mesh = prices.hardware, prices.mesh
    inside, across = (axes[-1:], axes[:-1]) if option.kind.grouped else (axes, ())
    ranks = prod(mesh.axis_size(a) for a in inside)
    sent = [0.0, 0.0, 0.0]
    if not option.kind.shards_state:
        sent[_BACKWARD] += _summed_us(hardware, grad, mesh, inside)
    elif grad:
        sent[_BACKWARD] += _staged_us(hardware, "reduce_scatter", grad, mesh, inside)
        sent[_BACKWARD] += _summed_us(hardware, grad / ranks, mesh, across)
    if option.kind.shards_state and not option.kind.gathers_parameters and grad:
        sent[_UPDATE] += _staged_us(hardware, "all_gather", param, mesh, inside)
    if option.kind.gathers_parameters:
        gathered = _staged_us(hardware, "all_gather", param, mesh, inside)
        sent[_FORWARD] += gathered
        sent[_BACKWARD] += gathered if option.regathers else 0.0
    state_share = ranks if option.kind.shards_state else 1
    rest = param / (ranks if option.kind.gathers_parameters else 1) + state / state_share
    saved = param if option.kind.gathers_parameters and not option.regathers and ranks > 1 else 0.0
    copied = copy_us(hardware, param) if any(sent) else 0.0
    spent = (copied if sent[0] else 0.0, copied, (copied if sent[2] else 0.0) + alone_us / state_share)
    return StepLoad(spent, stored=tuple(sent), rest=rest, saved=saved, grad=grad / state_share)


def _summed_us(hardware: Hardware, size: float, mesh: Mesh, axes: Sequence[str]) -> float:
    """A sum over `axes`: an all-reduce along each, or the sum of pieces along the others between a reduce-scatter and a
    gather along the last, as `reshard` does it.
    """
    all_reduced = sum(bulk_us(hardware, "all_reduce", size, mesh, axis) for axis in axes)
    if len(axes) < 2:
        return all_reduced
    shared = sum(bulk_us(hardware, kind, size, mesh, axes[-1]) for kind in ("reduce_scatter", "all_gather"))
    return min(all_reduced, shared + _summed_us(hardware, size / mesh.axis_size(axes[-1]), mesh, axes[:-1]))


def _staged_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axes: Sequence[str]) -> float:
    """A hierarchical collective, one stage an axis, the last axis first: each stage leaves a part for the next."""
    total = 0.0
    for axis in reversed(axes):
        total += bulk_us(hardware, kind, size, mesh, axis)
        size /= mesh.axis_size(axis)
    return total
