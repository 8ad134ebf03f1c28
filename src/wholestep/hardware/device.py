"""The data sheet of a device, and the time of ops on it: products by tiles and waves, other ops by bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..tuning import TUNING
from .work import Work, item_bytes

_SPLITS = TUNING.split_k


@dataclass(frozen=True)
class Tile:
    """The block of a product that one processor computes at a time, and the share of the peak that it reaches."""

    m: int
    n: int
    rate: float


@dataclass(frozen=True)
class Ceiling:
    """The rate of products in `dtype`.

    Args:
        dtype: float64, float32, tf32, float16, bfloat16 or float8.
        flops_per_us: of the data sheet, dense.
        tiles: of which a product uses the fastest for its shape.
        rate: share of the peak that a product reaches without `tiles`, and attention without `attention`.
        wave_us: overhead of a processor for each tile.
        attention: share of the peak that fused attention reaches in the forward.
        attention_backward: the same in the backward.
    """

    dtype: str
    flops_per_us: float
    tiles: tuple[Tile, ...] = ()
    rate: float = 1.0
    wave_us: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0


@dataclass(frozen=True)
class Device:
    """The data sheet of one rank's device. Times in microseconds, rates in bytes or operations per microsecond.

    Args:
        name: to display.
        memory_bytes: of the device.
        memory_bytes_per_us: peak, read plus written.
        ceilings: peak rates of products by dtype.
        host_memory_bytes: of the host, for each rank.
        host_bytes_per_us: between device and host.
        memory_rate: share of the peak memory rate that ops reach.
        launch_us: of one kernel, however small, in a stream of kernels.
        host_us: time of the host to start one op in eager mode.
        processors: that tiles are spread over.
        contention: how many times longer compute takes while a collective overlaps it.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_us: float
    ceilings: tuple[Ceiling, ...]
    host_memory_bytes: int = 0
    host_bytes_per_us: float = 25_000.0
    memory_rate: float = 0.85
    launch_us: float = 2.0
    host_us: float = 5.0
    processors: int = 1
    contention: float = 1.0

    def ceiling(self, dtype: str) -> Ceiling:
        """The ceiling of `dtype`, else of the next wider dtype that has one, else the first."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            for one in self.ceilings:
                if one.dtype == name:
                    return one
        return self.ceilings[0]

    def matmul_us(self, b: int, m: int, n: int, k: int, dtype: str) -> float:
        """`b` products of (m, k) by (k, n), without the launch."""
        top = self.ceiling(dtype)
        moved = b * (m * k + k * n + m * n) * item_bytes(dtype)
        memory_us = self.bytes_us(moved)
        if not top.tiles:
            return max(2.0 * b * m * n * k / (top.flops_per_us * top.rate), memory_us)
        return max(memory_us, min(self._tiled_us(top, tile, b, m, n, k) for tile in top.tiles))

    def _tiled_us(self, top: Ceiling, tile: Tile, b: int, m: int, n: int, k: int) -> float:
        """Whole tiles in whole waves: the last wave takes its full time, however few tiles it has.

        A product of few tiles is split along k, which writes and reads partial sums.
        """
        tiles = b * ceil(m / tile.m) * ceil(n / tile.n)
        rate = top.flops_per_us * tile.rate / self.processors
        found = float("inf")
        for split in _SPLITS:
            waves = ceil(tiles * split / self.processors)
            added = 0.0 if split == 1 else top.wave_us + self.bytes_us(4 * b * m * n * split)
            found = min(found, waves * (2.0 * tile.m * tile.n * ceil(k / split) / rate + top.wave_us) + added)
        return found

    def attention_us(
        self, batch: int, heads: int, queries: int, keys: int, width: int, dtype: str,
        *, causal: bool = True, backward: bool = False,
    ) -> float:  # fmt: skip
        """Fused attention without the launch. A backward has five products, a forward two."""
        top = self.ceiling(dtype)
        flops = 4.0 * batch * heads * queries * keys * width * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)
        rate = (top.attention_backward if backward else top.attention) or top.rate
        moved = batch * heads * (2 * queries + 2 * keys) * width * item_bytes(dtype) * (2 if backward else 1)
        return max(flops / (top.flops_per_us * rate), self.bytes_us(moved))

    def bytes_us(self, size_bytes: float) -> float:
        """Reading and writing `size_bytes` of device memory in total."""
        return size_bytes / (self.memory_bytes_per_us * self.memory_rate)

    @property
    def view_us(self) -> float:
        """0: the host makes views while the device computes."""
        return 0.0

    def peak_flops_per_us(self, dtype: str) -> float:
        """The data sheet's rate of products in `dtype`."""
        return self.ceiling(dtype).flops_per_us

    def work_us(self, work: Work) -> float:
        """One op, its launch included."""
        moved = self.launch_us + self.bytes_us(work.moved_bytes)
        if work.matmul:
            return max(self.launch_us + self.matmul_us(*work.matmul, work.dtype), moved)
        if work.attention:
            us = self.attention_us(*work.attention, work.dtype, causal=work.causal, backward=work.backward)
            return max(self.launch_us + us, moved)
        if work.flops:
            top = self.ceiling(work.dtype)
            reached = max((tile.rate for tile in top.tiles), default=top.rate)
            return max(self.launch_us + work.flops / (top.flops_per_us * reached), moved)
        return moved


_WIDER = {
    "float8": ("bfloat16", "float16", "float32"),
    "float16": ("bfloat16", "tf32", "float32"),
    "bfloat16": ("float16", "tf32", "float32"),
    "tf32": ("float32",),
    "float32": ("tf32",),
}
