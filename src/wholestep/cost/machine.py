"""What a machine can do, as far as scheduling needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..mesh import Mesh
from .speeds import Work


@dataclass(frozen=True)
class Wire:
    """What collectives of one kind take, in microseconds: to start, and for each byte that a rank sends; what they take
    from computing beside them, likewise; what the thread that computes does itself to start them, likewise, and for
    each byte to add up what came. Beside computing all takes `beside` times as long.
    """

    kind: str
    start_us: float
    byte_us: float
    busy_us: float = 0.0
    busy_byte_us: float = 0.0
    own_us: float = 0.0
    own_byte_us: float = 0.0
    sum_byte_us: float = 0.0
    beside: float = 1.0


def sent_bytes(kind: str, whole_bytes: float, ranks: int) -> float:
    """What a rank sends by the ring algorithm: 2(W-1)/W of the whole for an all-reduce, else (W-1)/W."""
    return (2 if kind == "all_reduce" else 1) * whole_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Machine:
    """Speeds of one rank: arithmetic, memory, and the link to its neighbours. Times are in microseconds.

    Args:
        flops_per_us: of a large matrix product in float32.
        memory_bytes_per_us: read plus written by ops on elements.
        launch_us: of one op, however small.
        link_us: of one collective of a few bytes.
        link_bytes_per_us: that a rank sends.
        math_bytes_per_us: read plus written by ops that do more than a sum with each element (exp, norms, sums over a
            dim); 0 for as many as others.
        attention_flops_per_us: of fused attention, what a mask leaves out counted too; 0 for those of products.
        view_us: of a view, which moves nothing; only where the host that calls ops computes them too.
        carried_bytes_per_us: read plus written by copies into and out of what collectives carry, which no cache holds;
            0 for as many as others.
        wires: what collectives take, by kind; what has none takes `link_us`, `link_bytes_per_us` and nothing from
            computing.

    Example:
        >>> print(ws.simulate(local, ws.Machine(link_bytes_per_us=119)))  # a link of 1 Gbit/s
    """

    flops_per_us: float = 50_000.0
    memory_bytes_per_us: float = 8_000.0
    launch_us: float = 4.0
    link_us: float = 250.0
    link_bytes_per_us: float = 1_000.0
    math_bytes_per_us: float = 0.0
    attention_flops_per_us: float = 0.0
    view_us: float = 0.0
    carried_bytes_per_us: float = 0.0
    wires: tuple[Wire, ...] = ()

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Machine:
        """The inverse of `dataclasses.asdict`."""
        given = dict(fields)
        wires = tuple(Wire(**wire) for wire in given.pop("wires"))
        return Machine(**given, wires=wires)

    @property
    def bucket_bytes(self) -> int:
        """What a rank should send at once: starting a collective then costs a twentieth of sending it.

        A power of two from 256 KiB to 64 MiB, so that measurements that differ a little agree.
        """
        wanted, size = 20 * self.link_us * self.link_bytes_per_us, 256 << 10
        while size < min(wanted, 64 << 20):
            size *= 2
        return size

    def peak_flops_per_us(self, dtype: str) -> float:
        """That of a large product, which is measured in float32 alone."""
        return self.flops_per_us

    def shares_links(self, mesh: Mesh, one: str, other: str) -> bool:
        """There is one link."""
        return True

    def work_us(self, work: Work) -> float:
        """One op: its launch, and the longer of its arithmetic and its bytes."""
        flops_per_us = self.attention_flops_per_us if work.attention else 0.0
        bytes_per_us = self.carried_bytes_per_us if work.carried else 0.0 if work.streams else self.math_bytes_per_us
        computing = work.flops / (flops_per_us or self.flops_per_us)
        return self.launch_us + max(computing, work.moved_bytes / (bytes_per_us or self.memory_bytes_per_us))

    def collective_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """One collective by the ring algorithm."""
        wire = self._wire(kind)
        return wire.start_us + wire.byte_us * sent_bytes(kind, whole_bytes, mesh.axis_size(axis))

    def beside(self, kind: str) -> float:
        """As measured beside products."""
        return self._wire(kind).beside

    def taken_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """What it takes from computing."""
        wire = self._wire(kind)
        return wire.busy_us + wire.busy_byte_us * sent_bytes(kind, whole_bytes, mesh.axis_size(axis))

    def handled_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> tuple[float, float]:
        """What the thread that computes does itself: to start it, and to add up what came."""
        wire, sent = self._wire(kind), sent_bytes(kind, whole_bytes, mesh.axis_size(axis))
        return max(wire.own_us + wire.own_byte_us * sent, self.launch_us), wire.sum_byte_us * sent

    def _wire(self, kind: str) -> Wire:
        found = (wire for wire in self.wires if wire.kind == kind)
        return next(found, None) or Wire(kind, self.link_us, 1 / self.link_bytes_per_us)
