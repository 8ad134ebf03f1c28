"""The cost model's one description of hardware: the device of every rank, and the levels of links between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil, prod
from pathlib import Path

from ..errors import PlanError
from ..mesh import TIME, Mesh
from ..tuning import TUNING
from ..typed_json import write_text
from .curves import KINDS, CollectiveCost, Curve, Regime, curve_us, sent_bytes
from .device import Device, MeasuredDevice, Work, item_bytes

_LOCAL = ("slice", "mask", "vary", "own", "share")
_LEAST_BUCKET, _LARGEST_BUCKET = 256 << 10, 64 << 20


@dataclass(frozen=True)
class Level:
    """Links that join units into a larger unit: GPUs into a node, nodes into a cluster.

    The cost of a collective is that of the outermost level that its group crosses. A level has fitted `curves`, or the
    measured `costs` of a job. A kind with neither runs as a ring (an all-to-all in pairs) that takes 10 us to start.

    Args:
        name: to display.
        ranks: in one unit of this level; 0 in the outermost level means any number.
        bytes_per_us: that one rank sends over its link at best.
        latency_us: of one hop of a small message.
        curves: collective times by algorithm.
        costs: measured collective times, at most one per kind.
        direct: each pair of ranks is joined by links of its own, without a switch: a group of some of them has the
            links among these alone.
    """

    name: str
    ranks: int
    bytes_per_us: float
    latency_us: float
    curves: tuple[Curve, ...] = ()
    costs: tuple[CollectiveCost, ...] = ()
    direct: bool = False

    def rate(self, joined: float) -> float:
        """Bytes per microsecond that one of `joined` ranks sends to the others, at best."""
        part = (joined - 1) / (self.ranks - 1) if self.direct and joined > 1 else 1.0
        return self.bytes_per_us * part

    def curves_for(self, kind: str, ranks: int) -> tuple[Curve, ...]:
        """The curves that a group of `ranks` can choose from."""
        curves = tuple(c for c in self.curves if c.kind == kind and ranks >= c.least_ranks)
        return curves or (Curve(kind, "pairwise" if kind == "all_to_all" else "ring", (Regime(10.0),)),)

    def cost(self, kind: str) -> CollectiveCost | None:
        """The measured cost of `kind`."""
        return next((cost for cost in self.costs if cost.kind == kind), None)


@dataclass(frozen=True)
class Hardware:
    """All that planning, scheduling and simulation know of the hardware. Ranks are numbered row-major over the mesh,
    node by node.

    Args:
        name: to display.
        device: of every rank: a data sheet (`Device`) or measured rates (`MeasuredDevice`).
        levels: of links, inner to outer; `levels[0].ranks` is the number of ranks of a node.
        sources: of the figures.

    Example:
        >>> wholestep.Hardware.preset("dgx-h100").collective_us("all_gather", 1 << 30, Mesh("dp=16,tp=8"), "dp")

    Raises:
        PlanError: a level is not larger than the one inside it, or a figure is out of range.
    """

    name: str
    device: Device | MeasuredDevice
    levels: tuple[Level, ...]
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from .hardware_file import check

        check(self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.device, self.levels))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # text hashes differ by process

    @staticmethod
    def measured(
        *, flops_per_us: float = 50_000.0, memory_bytes_per_us: float = 8_000.0, launch_us: float = 4.0,
        link_us: float = 250.0, link_bytes_per_us: float = 1_000.0, math_bytes_per_us: float = 0.0,
        attention_flops_per_us: float = 0.0, view_us: float = 0.0, bucket_copy_bytes_per_us: float = 0.0,
        product_bytes_per_us: float = 0.0, ranks_per_core: float = 1.0, collectives: Sequence[CollectiveCost] = (),
        name: str = "measured",
    ) -> Hardware:  # fmt: skip
        """Hardware from the rates of one rank, with one link that all ranks share. The default rates are those of a
        slow CPU on a slow link.

        Args:
            flops_per_us: see `MeasuredDevice`.
            memory_bytes_per_us: see `MeasuredDevice`.
            launch_us: see `MeasuredDevice`.
            link_us: time to start a collective of a kind that `collectives` lacks.
            link_bytes_per_us: that a rank sends in a collective of such a kind.
            math_bytes_per_us: see `MeasuredDevice`.
            attention_flops_per_us: see `MeasuredDevice`.
            view_us: see `MeasuredDevice`.
            bucket_copy_bytes_per_us: see `MeasuredDevice`.
            product_bytes_per_us: see `MeasuredDevice`.
            ranks_per_core: see `MeasuredDevice`.
            collectives: measured costs, at most one per kind.
            name: to display.

        Example:
            >>> gigabit = ws.Hardware.measured(link_bytes_per_us=119)  # 1 Gbit/s
        """
        several = tuple(collectives)
        if not link_bytes_per_us > 0:
            raise PlanError(f"link_bytes_per_us={link_bytes_per_us}", "a number above 0", "correct it")
        device = MeasuredDevice(
            name, flops_per_us, memory_bytes_per_us, launch_us, math_bytes_per_us, attention_flops_per_us, view_us,
            bucket_copy_bytes_per_us, product_bytes_per_us, ranks_per_core,
        )  # fmt: skip
        by_kind = {cost.kind: cost for cost in several}
        costs = tuple(by_kind.get(kind) or CollectiveCost(kind, link_us, 1 / link_bytes_per_us) for kind in KINDS)
        return Hardware(name, device, (Level("link", 0, link_bytes_per_us, link_us, costs=costs),))

    @staticmethod
    def default() -> Hardware:
        """The hardware that predictions use if none is given: a slow CPU on a slow link."""
        return Hardware.measured(name="default (a slow CPU on a slow link)")

    @staticmethod
    def preset(name: str) -> Hardware:
        """One of `Hardware.presets()`, or `NAME+LINK` with another link between nodes: "dgx-a100+ethernet-100".

        Raises:
            PlanError: there is no such preset.
        """
        from .presets import preset

        return preset(name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of presets."""
        from .presets import presets

        return tuple(presets())

    @staticmethod
    def seed() -> Hardware:
        """The formulas of DTensor's planner: 6.6 us + hops * latency + bytes * (n-1)/n / bandwidth, on a DGX A100."""
        from .presets import seed

        return seed()

    @staticmethod
    def load(path: str | Path) -> Hardware:
        """Read a file that `save` wrote, or one written by hand.

        Raises:
            PlanError: a field is missing, unknown or of the wrong type; the message names it.
        """
        from .hardware_file import load

        return load(path)

    def save(self, path: str | Path) -> None:
        """Write the hardware as JSON; missing folders are created."""
        from .hardware_file import to_json

        write_text(path, json.dumps(to_json(self), indent=1) + "\n")

    @property
    def ranks_per_node(self) -> int:
        """Ranks that the innermost level joins; 0 for any number."""
        return self.levels[0].ranks

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device for torch's allocator: of a GPU without what its driver, the CUDA context and NCCL take
        (`TUNING.device_reserve_bytes`); None for measured hardware.
        """
        if not isinstance(self.device, Device):
            return None
        return max(self.device.memory_bytes - TUNING.device_reserve_bytes * self.has_gpus, 0)

    @property
    def has_gpus(self) -> bool:
        """True if a data sheet describes the devices, with more processors than a core has."""
        return isinstance(self.device, Device) and self.device.processors > 1

    @property
    def spare_bytes(self) -> int:
        """The part of a device's memory that buckets in flight may take to start fewer collectives; 0 if unknown."""
        return int((self.memory_bytes or 0) * TUNING.bucket_memory_share)

    @property
    def launch_us(self) -> float:
        """Time of one op or kernel, however small."""
        return self.device.launch_us

    @property
    def start_us(self) -> float:
        """Time of the host to start one op; 0 where the host computes."""
        return self.device.host_us if isinstance(self.device, Device) else 0.0

    @property
    def view_us(self) -> float:
        """Time of a view; 0 where a host calls ops ahead of the device."""
        return self.device.view_us

    @property
    def ranks_per_core(self) -> float:
        """Ranks that share a core; 1 for described devices."""
        return self.device.ranks_per_core if isinstance(self.device, MeasuredDevice) else 1.0

    @property
    def bucket_bytes(self) -> int:
        """The bucket size at which starting a collective takes at most a twentieth of sending it: the smallest such
        power of two from 256 KiB to 64 MiB. Described links: an all-gather over two units of the outermost level.
        """
        return _bucket_bytes(self)

    def peak_flops_per_us(self, dtype: str) -> float:
        """Peak rate of products in `dtype`, of which MFU is a share."""
        return self.device.peak_flops_per_us(dtype)

    def shares_links(self, mesh: Mesh, axis: str, other: str) -> bool:
        """True if collectives along two axes slow each other: the outermost level that both cross is the same."""
        return _route(self, mesh, axis)[0] == _route(self, mesh, other)[0]

    def is_in_node(self, mesh: Mesh, axis: str) -> bool:
        """True if the ranks of each group along `axis` are joined by the innermost links."""
        return _route(self, mesh, axis)[0] <= 0

    def collective_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """Microseconds of one collective along `axis`, while all groups of that axis run theirs.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send. What a rank does alone (slice,
                mask, vary) takes none.
            whole_bytes: of the largest buffer that a rank holds for it: the result of a gather, else the input.
            mesh: numbered over the ranks row-major.
            axis: of the mesh. Along `time` nothing is sent: results are accumulated in memory.
        """
        if axis == TIME:  # memory that each piece reads and writes
            return 0.0 if kind in _LOCAL else self.bytes_us(2 * whole_bytes * mesh.pieces)
        return 0.0 if kind in _LOCAL else self._units_us(kind, whole_bytes, *_route(self, mesh, axis))

    def algorithm_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """`collective_us` by the algorithms of its own kind alone: what a bucket should be large enough for."""
        return self._algorithm_us(kind, whole_bytes, *_route(self, mesh, axis)) if mesh.axis_size(axis) > 1 else 0.0

    def overlap_slowdown(self, kind: str, mesh: Mesh, axis: str) -> float:
        """How many times longer a collective takes while the rank computes."""
        cost = self._cost(kind, mesh, axis)
        return cost.overlap_slowdown if cost else 1.0

    def compute_steal_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> float:
        """Compute time that a rank loses to a collective that it overlaps: as measured, or by `Device.contention`."""
        if cost := self._cost(kind, mesh, axis):
            return cost.cpu_us + cost.cpu_byte_us * sent_bytes(kind, whole_bytes, mesh.axis_size(axis))
        contention = self.device.contention if isinstance(self.device, Device) else 1.0
        return self.collective_us(kind, whole_bytes, mesh, axis) * (1 - 1 / contention)

    def host_us(self, kind: str, whole_bytes: float, mesh: Mesh, axis: str) -> tuple[float, float]:
        """Time in which a rank computes nothing: to start a collective, and once it is complete to sum its data."""
        cost = self._cost(kind, mesh, axis)
        if cost is None:
            return self.launch_us, 0.0
        sent = sent_bytes(kind, whole_bytes, mesh.axis_size(axis))
        return max(cost.host_us + cost.host_byte_us * sent, self.launch_us), cost.reduce_byte_us * sent

    def message_end_us(self, size_bytes: float, mesh: Mesh, axis: str) -> float:
        """Compute time that a rank loses to a message along `axis` which it sends or receives; 0 where not measured."""
        cost = self._cost("send", mesh, axis)
        return cost.end_us(size_bytes) if cost else 0.0

    def group_us(self, kind: str, whole_bytes: float, ranks: int, per_node: int | None = None) -> float:
        """`collective_us` of a group of `ranks` with `per_node` of them on each node; as many as fit if None."""
        node = self.ranks_per_node or ranks
        per_node = min(per_node or node, ranks)
        nodes = ceil(ranks / per_node)
        units = [ranks] if len(self.levels) == 1 else [ranks, nodes]
        for level in self.levels[1:-1]:
            units.append(ceil(nodes * node / level.ranks))
        return self.units_us(kind, whole_bytes, (*units, 1))

    def units_us(self, kind: str, whole_bytes: float, units: tuple[int, ...]) -> float:
        """`collective_us` of a group by its units (see `hardware.curves`)."""
        return self._units_us(kind, whole_bytes, _outermost(units), units)

    def _units_us(self, kind: str, whole_bytes: float, outermost: int, units: tuple[int, ...]) -> float:
        """An all-reduce contains a gather and a reduce-scatter, and these two in turn make one: none of the three takes
        longer than what contains it. A group that crosses a level takes at least as long as its part inside a unit.
        """
        if units[0] <= 1:
            return 0.0
        us = self._algorithm_us(kind, whole_bytes, outermost, units)
        if kind in ("all_gather", "reduce_scatter"):
            us = min(us, self._algorithm_us("all_reduce", whole_bytes, outermost, units))
        elif kind == "all_reduce":
            both = "reduce_scatter", "all_gather"
            us = min(us, sum(self._algorithm_us(part, whole_bytes, outermost, units) for part in both))
        inside = tuple(ceil(n / units[outermost]) for n in units[: outermost + 1])
        return max(us, self._units_us(kind, whole_bytes, _outermost(inside), inside)) if outermost > 0 else us

    def _algorithm_us(self, kind: str, whole_bytes: float, outermost: int, units: tuple[int, ...]) -> float:
        crossed = self.levels[: outermost + 1]
        if cost := crossed[-1].cost(kind):
            return cost.us(sent_bytes(kind, whole_bytes, units[0]))
        joined = zip(crossed, units, units[1:], strict=False)
        rates, latencies = [level.rate(n / over) for level, n, over in joined], [level.latency_us for level in crossed]
        curves = crossed[-1].curves_for(kind, units[0])
        return min(curve_us(c, whole_bytes, units[: outermost + 2], rates, latencies) for c in curves)

    def _cost(self, kind: str, mesh: Mesh, axis: str) -> CollectiveCost | None:
        """The measured cost of a collective along `axis`."""
        return self.levels[_route(self, mesh, axis)[0]].cost(kind)

    def work_us(self, work: Work) -> float:
        """One op, its launch included."""
        return self.device.work_us(work)

    def matmul_us(self, b: int, m: int, n: int, k: int, dtype: str = "bfloat16") -> float:
        """`b` products of (m, k) by (k, n) as one kernel, its launch included."""
        moved = b * (m * k + k * n + m * n) * item_bytes(dtype)
        return self.device.work_us(Work(moved, 2.0 * prod((b, m, n, k)), dtype, matmul=(b, m, n, k)))

    def attention_us(
        self, batch: int, heads: int, queries: int, keys: int, width: int, dtype: str = "bfloat16",
        *, causal: bool = True, backward: bool = False,
    ) -> float:  # fmt: skip
        """Fused attention, forward or backward, its launch included. `width` is the width of one head."""
        flops = 4.0 * batch * heads * queries * keys * width * (2.5 if backward else 1.0)  # masked elements count too
        moved = batch * heads * (2 * queries + 2 * keys) * width * item_bytes(dtype) * (2 if backward else 1)
        shape = batch, heads, queries, keys, width
        return self.device.work_us(Work(moved, flops, dtype, None, shape, causal, backward))

    def bytes_us(self, size_bytes: float) -> float:
        """An op that reads and writes `size_bytes` in total, its launch included."""
        return self.device.work_us(Work(size_bytes))

    def host_copy_us(self, size_bytes: float) -> float | None:
        """A copy between device and host, beside the step; None where the host computes, or its link is not known."""
        return size_bytes / self.device.host_bytes_per_us if isinstance(self.device, Device) and self.has_gpus else None

    def __str__(self) -> str:
        rows = [
            f"{level.name} x{level.ranks or 'any'} {round(level.bytes_per_us / 1e3, 2):,.9g} GB/s"
            for level in self.levels
        ]
        return f"{self.name}: {self.device.name}, {', '.join(rows)}"


def _outermost(units: tuple[int, ...]) -> int:
    """The level that joins the units of a group; -1 for one rank."""
    return max((i for i, (under, over) in enumerate(pairwise(units)) if under > over), default=-1)


@lru_cache(maxsize=4096)
def _route(hardware: Hardware, mesh: Mesh, axis: str) -> tuple[int, tuple[int, ...]]:
    """The outermost level that groups of `axis` cross, and the units of such a group."""
    units = units_of(mesh.of_ranks, axis, tuple(level.ranks for level in hardware.levels))
    return _outermost(units), units


def units_of(mesh: Mesh, axis: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The units (see `hardware.curves`) of the first or the last group of `axis`, whichever crosses more. `sizes` are
    the ranks of a unit of each level; 0 means any number.
    """
    size, inner = mesh.axis_size(axis), mesh.axes[mesh.names.index(axis) + 1 :]
    stride = prod(inner_axis.size for inner_axis in inner)
    groups: list[tuple[int, ...]] = []
    for first in (0, mesh.size - 1 - stride * (size - 1)):
        ranks = range(first, first + stride * size, stride)
        groups.append((size, *(len({rank // unit for rank in ranks}) if unit else 1 for unit in sizes[:-1]), 1))
    return max(groups, key=lambda units: units[1:])


@lru_cache(maxsize=64)
def _bucket_bytes(hardware: Hardware) -> int:
    """For measured links, sending is what the link carries at its full rate."""
    outer = hardware.levels[-1]
    units = (2, *(2 for _ in hardware.levels[:-1]), 1)
    start = outer.latency_us if outer.costs else hardware.units_us("all_gather", 0, units)

    def is_small(size: int) -> bool:
        if outer.costs:
            return size < 20 * start * outer.bytes_per_us
        return hardware.units_us("all_gather", size, units) < 21 * start

    size = _LEAST_BUCKET
    while size < _LARGEST_BUCKET and is_small(size):
        size *= 2
    return size
