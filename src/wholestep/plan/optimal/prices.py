"""What the parts of a problem cost on a machine: an op on a rank's share, a value brought from one state to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...cost.compute import node_us
from ...graph import meta
from ...graph.graph import operands
from ...graph.meta import TensorMeta
from ...hardware.hardware import Hardware
from ...hardware.work import Work
from ...layout import REPLICATED, AxisState
from ...mesh import Mesh

States = Mapping[int, AxisState]


@dataclass(frozen=True)
class Move:
    """Microseconds in which the axis carries a value from one state to another, and in which the rank copies it."""

    sent_us: float = 0.0
    copied_us: float = 0.0

    @property
    def busy_us(self) -> float:
        """What a rank takes for it that has nothing else to do meanwhile."""
        return self.sent_us + self.copied_us


@dataclass
class Prices:
    """Prices along one axis of `mesh`. `share`: the part of a value that depends on the batch which a rank has anyway,
    as other axes cut the batch.
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
        """What the first rank holds of a tensor."""
        if state.kind != "S":
            return made
        shape = (*made.shape[: state.dim], -(-made.shape[state.dim] // self.parts), *made.shape[state.dim + 1 :])
        return meta.with_shape(made, shape)

    def op_us(self, node: Node, takes: States, gives: States) -> float:
        """One op on a rank's share of its operands; what a state is not given of stays whole."""
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

    # -- bringing a value from one state to another ------------------------------------------
    def moves(
        self, made: TensorMeta, given: Sequence[AxisState], wanted: Sequence[AxisState], bulk: bool = False
    ) -> Iterator[tuple[tuple[AxisState, AxisState], Move]]:
        """For each pair of states that there is a way between what it takes. `bulk`: many are sent together."""
        for have in dict.fromkeys(given):
            for want in dict.fromkeys(wanted):
                found = self.move(made, have, want, bulk)
                if found is not None:
                    yield (have, want), found

    def move(self, made: TensorMeta, have: AxisState, want: AxisState, bulk: bool = False) -> Move | None:
        """What it takes to bring a value from one state to another, as `partition` does it; None: there is no way.

        Collectives take what is contiguous: partial results of products along a cut dim are copied, and so are pieces
        of any dim but the first. In bulk, pieces are copied into a bucket or out of one.
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
        """One collective of so many bytes."""
        return _sent_us(self.hardware, kind, size, self.mesh, self.axis)

    def bulk_us(self, kind: str, size: float, axis: str | None = None) -> float:
        """The same of a part of a bucket."""
        return bulk_us(self.hardware, kind, size, self.mesh, axis or self.axis)

    def _copy_us(self, size: float) -> float:
        return copy_us(self.hardware, size)


def copy_us(hardware: Hardware, size: float) -> float:
    """Microseconds of a copy of so many bytes, its launch included."""
    return hardware.work_us(Work(round(2 * size)))


def bulk_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axis: str) -> float:
    """Microseconds of `size` bytes that are sent together with others, a bucket at once; a piece costs a launch too."""
    if mesh.axis_size(axis) == 1 or size <= 0:
        return 0.0
    bucket = max(size, float(hardware.bucket_bytes))
    return hardware.launch_us + _sent_us(hardware, kind, bucket, mesh, axis) * size / bucket


def _sent_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axis: str) -> float:
    """Microseconds of a collective that nothing hides."""
    return hardware.collective_us(kind, size, mesh, axis) + sum(hardware.host_us(kind, size, mesh, axis))
