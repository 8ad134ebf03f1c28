"""What a machine can do, as far as scheduling needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh import Mesh
from .speeds import Work


@dataclass(frozen=True)
class Machine:
    """Speeds of one rank: arithmetic, memory, and the link to its neighbours. Times are in microseconds.

    Args:
        flops_per_us: of a large matrix product in float32.
        memory_bytes_per_us: read plus written by ops on elements.
        launch_us: of one op, however small.
        link_us: of one collective of a few bytes.
        link_bytes_per_us: that a rank sends.
    """

    flops_per_us: float = 50_000.0
    memory_bytes_per_us: float = 8_000.0
    launch_us: float = 4.0
    link_us: float = 250.0
    link_bytes_per_us: float = 1_000.0

    @property
    def bucket_bytes(self) -> int:
        """What a rank should send at once: starting a collective then costs a twentieth of sending it.

        A power of two from 256 KiB to 64 MiB, so that measurements that differ a little agree.
        """
        wanted, size = 20 * self.link_us * self.link_bytes_per_us, 256 << 10
        while size < min(wanted, 64 << 20):
            size *= 2
        return size

    @property
    def contention(self) -> float:
        """Compute and collectives are measured apart: they do not slow each other."""
        return 1.0

    def peak_flops_per_us(self, dtype: str) -> float:
        """That of a large product, which is measured in float32 alone."""
        return self.flops_per_us

    def shares_links(self, mesh: Mesh, one: str, other: str) -> bool:
        """There is one link."""
        return True

    def work_us(self, work: Work) -> float:
        """One op: its launch, and the longer of its arithmetic and its bytes."""
        return self.launch_us + max(work.flops / self.flops_per_us, work.moved_bytes / self.memory_bytes_per_us)

    def collective_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """One collective by the ring algorithm: 2(W-1)/W of the whole for an all-reduce, else (W-1)/W."""
        ranks, rounds = mesh.axis_size(axis), 2 if kind == "all_reduce" else 1
        return self.link_us + rounds * whole_bytes * (ranks - 1) / ranks / self.link_bytes_per_us
