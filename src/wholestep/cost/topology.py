"""A machine of any size as a value: its devices, the levels of links between them, what collectives take there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import ceil
from pathlib import Path

from ..mesh import Mesh
from .curves import Curve, Regime, curve_us
from .device import Device
from .speeds import Work

_LOCAL = ("slice", "mask", "vary")


@dataclass(frozen=True)
class Level:
    """Links that join units into a larger one: GPUs into a node, nodes into a cluster.

    Args:
        name: to be shown.
        ranks: that one unit of this level holds; 0 for the outermost, which holds any number.
        bytes_per_us: that one rank sends over its link in the best case.
        latency_us: of one hop of a small message.
        curves: what collectives take whose group this level is the outermost to join. A kind without a curve runs as a
            ring (an all-to-all in pairs) that takes 10 us to start.
    """

    name: str
    ranks: int
    bytes_per_us: float
    latency_us: float
    curves: tuple[Curve, ...] = ()

    def curves_for(self, kind: str, ranks: int) -> tuple[Curve, ...]:
        """Those that a group of `ranks` can choose from."""
        found = tuple(c for c in self.curves if c.kind == kind and ranks >= c.least_ranks)
        return found or (Curve(kind, "pairwise" if kind == "all_to_all" else "ring", (Regime(10.0),)),)


@dataclass(frozen=True)
class Topology:
    """What planning and simulation know of a machine. Ranks are numbered row-major over the mesh, node by node.

    Args:
        name: to be shown.
        device: of every rank.
        levels: of links, inner to outer; `levels[0].ranks` is the ranks of a node.
        sources: where the figures come from.

    Example:
        >>> wholestep.Topology.preset("dgx-h100").collective_us("all_gather", 1 << 30, Mesh("dp=16,tp=8"), "dp")

    Raises:
        PlanError: a level is not larger than the one inside it, or a figure is not positive.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    sources: tuple[str, ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from .topology_file import check

        check(self)
        object.__setattr__(self, "_hash", hash((self.name, self.device, self.levels)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def preset(name: str) -> Topology:
        """One of `Topology.presets()`, or `NAME+LINK` with a link of `LINKS` between nodes: "dgx-a100+ethernet-100".

        Raises:
            PlanError: there is none of that name.
        """
        from .presets import preset

        return preset(name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of presets."""
        from .presets import names

        return names()

    @staticmethod
    def seed() -> Topology:
        """The formulas of DTensor's planner: 6.6 us + hops * latency + bytes * (n-1)/n / bandwidth, on a DGX A100."""
        from .presets import seed

        return seed()

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Read what `save` wrote, or a person.

        Raises:
            PlanError: a field is missing, unknown or of the wrong kind; it is named.
        """
        from .topology_file import load

        return load(path)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; folders on the way are made."""
        from .topology_file import save

        save(self, path)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that the innermost level joins."""
        return self.levels[0].ranks

    @property
    def launch_us(self) -> float:
        """Of one kernel, however small."""
        return self.device.launch_us

    @property
    def view_us(self) -> float:
        """The host makes views while the device computes."""
        return 0.0

    @property
    def bucket_bytes(self) -> int:
        """What a rank should send at once: the smallest power of two from 256 KiB to 64 MiB at which starting an
        all-gather over two of the outermost units takes at most a twentieth of sending it.
        """
        return _bucket_bytes(self)

    def peak_flops_per_us(self, dtype: str) -> float:
        """Operations of products in `dtype` by the data sheet, or as measured."""
        return self.device.ceiling(dtype).flops_per_us

    def shares_links(self, mesh: Mesh, one: str, other: str) -> bool:
        """True where the outermost level that both axes cross is the same."""
        sizes = tuple(level.ranks for level in self.levels)
        return _outermost(units_of(mesh, one, sizes)) == _outermost(units_of(mesh, other, sizes))

    def collective_us(
        self, kind: str, whole_bytes: float, mesh: Mesh, axis: str, largest_bytes: float | None = None
    ) -> float:
        """Microseconds of one collective along `axis`, while all groups of that axis run theirs.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send; what a rank does alone (slice,
                mask, vary) takes none.
            whole_bytes: of the largest buffer that a rank holds for it: the result of a gather, else the input.
            mesh: numbered over the ranks row-major.
            axis: of the mesh.
            largest_bytes: of the largest piece, where pieces are ragged: the others are padded to it.
        """
        if kind in _LOCAL:
            return 0.0
        units = units_of(mesh, axis, tuple(level.ranks for level in self.levels))
        return self.units_us(kind, whole_bytes if largest_bytes is None else largest_bytes * units[0], units)

    def beside(self, kind: str) -> float:
        """1: links are as fast while a device computes."""
        return 1.0

    def taken_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """By the device's contention: computing takes that much longer while a collective is on its way."""
        return self.collective_us(kind, whole_bytes, mesh, axis) * (1 - 1 / self.device.contention)

    def group_us(self, kind: str, whole_bytes: float, ranks: int, per_node: int | None = None) -> float:
        """The same for a group of `ranks` with `per_node` of them on each node; as many as fit if None."""
        node = self.ranks_per_node or ranks
        per_node = min(per_node or node, ranks)
        nodes = ceil(ranks / per_node)
        units = [ranks] if len(self.levels) == 1 else [ranks, nodes]
        for level in self.levels[1:-1]:
            units.append(ceil(nodes * node / level.ranks))
        return self.units_us(kind, whole_bytes, (*units, 1))

    def units_us(self, kind: str, whole_bytes: float, units: tuple[int, ...]) -> float:
        """The same for a group by its units (see `cost.curves`)."""
        if units[0] <= 1:
            return 0.0
        outermost = _outermost(units)
        crossed = self.levels[: outermost + 1]
        rates, latencies = [level.bytes_per_us for level in crossed], [level.latency_us for level in crossed]
        curves = crossed[-1].curves_for(kind, units[0])
        return min(curve_us(c, whole_bytes, units[: outermost + 2], rates, latencies) for c in curves)

    def matmul_us(self, b: int, m: int, n: int, k: int, dtype: str = "bfloat16") -> float:
        """`b` products of (m, k) by (k, n) as one kernel, its launch included."""
        return self.device.launch_us + self.device.matmul_us(b, m, n, k, dtype)

    def attention_us(
        self, batch: int, heads: int, queries: int, keys: int, width: int, dtype: str = "bfloat16",
        *, causal: bool = True, backward: bool = False,
    ) -> float:  # fmt: skip
        """Fused attention, forward or backward, its launch included. `width` is that of one head."""
        us = self.device.attention_us(batch, heads, queries, keys, width, dtype, causal=causal, backward=backward)
        return self.device.launch_us + us

    def bytes_us(self, size_bytes: float) -> float:
        """An op that reads and writes so many bytes in all, its launch included."""
        return self.device.launch_us + self.device.bytes_us(size_bytes)

    def handled_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> tuple[float, float]:
        """What a rank computes nothing for: the launch of a collective, and nothing once it is complete."""
        return self.launch_us, 0.0

    def work_us(self, work: Work) -> float:
        """One op, as `cost.compute` describes the node that calls it."""
        moved = self.bytes_us(work.moved_bytes)
        if work.matmul:
            return max(self.matmul_us(*work.matmul, work.dtype), moved)
        if work.attention:
            us = self.attention_us(*work.attention, work.dtype, causal=work.causal, backward=work.backward)
            return max(us, moved)
        if work.flops:
            top = self.device.ceiling(work.dtype)
            reached = max((tile.rate for tile in top.tiles), default=top.rate)
            return max(self.launch_us + work.flops / (top.flops_per_us * reached), moved)
        return moved

    def __str__(self) -> str:
        rows = [f"{level.name} x{level.ranks or 'any'} {level.bytes_per_us / 1e3:.3g} GB/s" for level in self.levels]
        return f"{self.name}: {self.device.name}, {', '.join(rows)}"


def _outermost(units: tuple[int, ...]) -> int:
    """The level that joins the units of a group; -1 for one rank."""
    return max((i for i, (under, over) in enumerate(pairwise(units)) if under > over), default=-1)


@lru_cache(maxsize=4096)
def units_of(mesh: Mesh, axis: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The units (see `cost.curves`) of a group of `axis`, of the first one or the last, whichever crosses more.

    `sizes` are the ranks of a unit of each level; 0 holds any number.
    """
    size = mesh.axis_size(axis)
    stride = 1
    for one in reversed(mesh.axes):
        if one.name == axis:
            break
        stride *= one.size
    found: list[tuple[int, ...]] = []
    for first in (0, mesh.size - 1 - stride * (size - 1)):
        ranks = range(first, first + stride * size, stride)
        found.append((size, *(len({rank // unit for rank in ranks}) if unit else 1 for unit in sizes[:-1]), 1))
    return max(found, key=lambda units: units[1:])


@lru_cache(maxsize=64)
def _bucket_bytes(topology: Topology) -> int:
    sizes = [level.ranks for level in topology.levels[:-1]]
    units = (2, *(2 for _ in sizes), 1)
    start = topology.units_us("all_gather", 0, units)
    size = 256 << 10
    while size < 64 << 20 and topology.units_us("all_gather", size, units) < 21 * start:
        size *= 2
    return size
