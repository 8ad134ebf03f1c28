"""Cost model of the layout problem: an op on the shard of one rank, and a reshard from one state to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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

States = Mapping[int, AxisState]


@dataclass(frozen=True)
class Move:
    """Microseconds of one reshard: communication along the axis, and copies on the rank."""

    sent_us: float = 0.0
    copied_us: float = 0.0


@dataclass
class Prices:
    """Prices along one axis of `mesh`. `share`: the part of a batch-dependent value that a rank holds where other axes
    shard the batch.
    """

    hardware: Hardware
    mesh: Mesh
    axis: str
    share: float = 1.0
    graph: Graph = field(default_factory=Graph)

    @property
    def parts(self) -> int:
        """Ranks along the axis; 1 without one."""
        return self.mesh.axis_size(self.axis) if self.axis else 1

    def local(self, made: TensorMeta, state: AxisState) -> TensorMeta:
        """The shard of the first rank."""
        if state.kind != "S":
            return made
        shape = (*made.shape[: state.dim], -(-made.shape[state.dim] // self.parts), *made.shape[state.dim + 1 :])
        return meta.with_shape(made, shape)

    def op_us(self, node: Node, takes: States, gives: States) -> float:
        """One op on shards; operands and outputs without a state are replicated."""
        if not (takes or gives) or not self._whole_us(node):
            return self._whole_us(node) * self.share
        given = operands(node)
        places = iter([self._stand_in(n, takes.get(i, REPLICATED)) for i, n in enumerate(given)])
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(places))
        new = self.graph.create_node("call_function", node.target, args, kwargs)
        meta.copy(node, new)
        made = meta.tensors(node)
        meta.set_tensors(new, [m and self.local(m, gives.get(i, REPLICATED)) for i, m in enumerate(made)])
        return node_us(new, self.hardware) * self.share

    def _whole_us(self, node: Node) -> float:
        return node_us(node, self.hardware)

    def _stand_in(self, node: Node, state: AxisState) -> Node:
        new = self.graph.placeholder(node.name)
        meta.copy(node, new)
        meta.set_tensors(new, [m and self.local(m, state) for m in meta.tensors(node)])
        return new

    # -- reshards ----------------------------------------------------------------------------
    def moves(
        self, made: TensorMeta, given: Sequence[AxisState], wanted: Sequence[AxisState], bulk: bool = False
    ) -> Iterator[tuple[tuple[AxisState, AxisState], Move]]:
        """The reshard of each feasible pair of states. `bulk`: collectives are bucketed."""
        for have in dict.fromkeys(given):
            for want in dict.fromkeys(wanted):
                found = self.move(made, have, want, bulk)
                if found is not None:
                    yield (have, want), found

    def move(self, made: TensorMeta, have: AxisState, want: AxisState, bulk: bool = False) -> Move | None:
        """The reshard from `have` to `want` as `partition` does it; None where it is infeasible.

        Collectives need contiguous tensors: partial results and shards of any dim but the first are copied. Bucketed
        collectives copy into the bucket or out of it.
        """
        size = made.size_bytes * self.share
        send, local = self.bulk_us if bulk else self.sent_us, size / self.parts
        if have == want:
            return Move()
        if have.kind == "R":
            return Move(copied_us=self._copy_us(size)) if want.kind == "P" else Move()
        if want.kind == "P":
            return None
        if have.kind == "P":
            reduces = want.kind == "R" or have.op not in ("sum", "avg")
            return Move(send("all_reduce" if reduces else "reduce_scatter", size), self._copy_us(size))
        if want.kind == "R":
            copied = self._copy_us(size) if bulk else self._copy_us(local) if have.dim else 0.0
            return Move(send("all_gather", size), copied)
        return Move(send("all_to_all", local), self._copy_us(local) * (2 if want.dim else 1))

    def sent_us(self, kind: str, size: float) -> float:
        """One collective of `size` bytes."""
        return _sent_us(self.hardware, kind, size, self.mesh, self.axis)

    def bulk_us(self, kind: str, size: float, axis: str | None = None) -> float:
        """The same for a part of a bucket."""
        return bulk_us(self.hardware, kind, size, self.mesh, axis or self.axis)

    def _copy_us(self, size: float) -> float:
        return copy_us(self.hardware, size)


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
