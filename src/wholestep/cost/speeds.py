"""What a simulation asks of a machine. `Machine` (measured at start-up) and `Topology` (described) both answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..mesh import Mesh


@dataclass(frozen=True)
class Work:
    """What one op does on one rank.

    Args:
        moved_bytes: read plus written.
        flops: multiplications and additions; 0 for ops on elements.
        dtype: of the arithmetic, without `torch.`.
        matmul: (b, m, n, k) of a product.
        attention: (batch, heads, queries, keys, width) of fused attention.
        causal: of that attention; `backward`: that it is a backward.
        streams: nothing but a sum or a product is done with each byte (`graph.ops.streams`).
        carried: it copies into or out of what collectives carry (`graph.ops.CARRIED`).
    """

    moved_bytes: int
    flops: float = 0.0
    dtype: str = "float32"
    matmul: tuple[int, int, int, int] | None = None
    attention: tuple[int, int, int, int, int] | None = None
    causal: bool = False
    backward: bool = False
    streams: bool = True
    carried: bool = False


class Speeds(Protocol):
    """Microseconds of ops and collectives on one rank."""

    @property
    def launch_us(self) -> float:
        """Of one op, however small."""
        ...

    @property
    def view_us(self) -> float:
        """What a rank computes nothing for while it makes a view; 0 where a host calls ops ahead of the device."""
        ...

    @property
    def bucket_bytes(self) -> int:
        """What a rank should send at once."""
        ...

    def work_us(self, work: Work) -> float:
        """One op, its launch included."""
        ...

    def peak_flops_per_us(self, dtype: str) -> float:
        """Operations of products in `dtype` at best, by the data sheet or as measured: what MFU is a share of."""
        ...

    def shares_links(self, mesh: Mesh, one: str, other: str) -> bool:
        """True where collectives along two axes go over the same links, so that each slows the other."""
        ...

    def collective_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """One collective along `axis` on the largest buffer that a rank holds for it."""
        ...

    def beside(self, kind: str) -> float:
        """How many times as long a collective takes while the rank computes."""
        ...

    def taken_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """How much less a rank has computed when that collective, beside which it computes, is complete."""
        ...

    def handled_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> tuple[float, float]:
        """What a rank computes nothing for while it starts that collective, and once that is complete."""
        ...
