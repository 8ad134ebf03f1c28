"""Devices by data sheet or as measured, and the time of ops on them: products by tiles and waves, others by bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from ..tuning import TUNING


@dataclass(frozen=True)
class Work:
    """What one op computes and how many bytes it moves.

    Args:
        moved_bytes: read plus written.
        flops: multiplications and additions; 0 for elementwise ops.
        dtype: of the arithmetic, without `torch.`.
        matmul: (b, m, n, k) of a matrix product.
        attention: (batch, heads, queries, keys, width) of fused attention.
        causal, backward: of that attention.
        streams: bound by memory bandwidth: at most a sum or a product for each byte (`graph.op_kinds.streams`).
        bucketed: copies into or out of a bucket of a collective.
        speed: of that attention, as a multiple of FlashAttention-2's rate.
        keys_before: of its keys, those before all queries, where it is causal to the others alone.
    """

    moved_bytes: float
    flops: float = 0.0
    dtype: str = "float32"
    matmul: tuple[int, int, int, int] | None = None
    attention: tuple[int, int, int, int, int] | None = None
    causal: bool = False
    backward: bool = False
    streams: bool = True
    bucketed: bool = False
    speed: float = 1.0
    keys_before: float = 0.0


_ITEM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a float dtype, given by name without `torch.`; 4 for any other dtype."""
    return _ITEM_BYTES.get("float8" if dtype.startswith("float8") else dtype, 4)


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
        attention: share of the peak that fused attention (FlashAttention-2) reaches in the forward.
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
        memory_bytes: of the device, as its driver shows it.
        memory_bytes_per_us: peak, read plus written.
        ceilings: peak rates of products by dtype.
        memory_rate: share of the peak memory rate that ops reach.
        launch_us: of one kernel, however small, in a stream of kernels.
        host_us: time of the host to start one op in eager mode.
        processors: that tiles are spread over.
        contention: how many times longer compute takes while a collective overlaps it.
        sustained: the clock under products for hours, as a share of that of the short runs that `tiles` and `rate` are
            from: power caps it. Other kernels have `clock`.
        host_bytes_per_us: of a copy between the device and pinned memory of its host, in each direction.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_us: float
    ceilings: tuple[Ceiling, ...]
    memory_rate: float = 0.85
    launch_us: float = 2.0
    host_us: float = 5.0
    processors: int = 1
    contention: float = 1.0
    sustained: float = 1.0
    host_bytes_per_us: float = 25e3

    view_us: ClassVar[float] = 0.0  # the host makes views while the device computes

    def ceiling(self, dtype: str) -> Ceiling:
        """The ceiling of `dtype`, else of the next wider dtype that has one, else the first."""
        kind = "float8" if dtype.startswith("float8") else dtype
        for name in (kind, *_WIDER.get(kind, ())):
            for top in self.ceilings:
                if top.dtype == name:
                    return top
        return self.ceilings[0]

    def matmul_us(self, b: int, m: int, n: int, k: int, dtype: str) -> float:
        """`b` products of (m, k) by (k, n), without the launch."""
        top = self.ceiling(dtype)
        moved = b * (m * k + k * n + m * n) * item_bytes(dtype)
        memory_us = self.bytes_us(moved)
        if not top.tiles:
            return max(2.0 * b * m * n * k / (top.flops_per_us * top.rate * self.sustained), memory_us)
        return max(memory_us, min(self._tiled_us(top, tile, b, m, n, k) for tile in top.tiles))

    def _tiled_us(self, top: Ceiling, tile: Tile, b: int, m: int, n: int, k: int) -> float:
        """Whole tiles in whole waves: the last wave takes its full time, however few tiles it has. A product of few
        tiles is split along k, which writes and reads partial sums.
        """
        tiles = b * ceil(m / tile.m) * ceil(n / tile.n)
        rate = top.flops_per_us * tile.rate * self.sustained / self.processors
        best = float("inf")
        for split in TUNING.split_k:
            waves = ceil(tiles * split / self.processors)
            added = 0.0 if split == 1 else top.wave_us + self.bytes_us(4 * b * m * n * split)
            best = min(best, waves * (2.0 * tile.m * tile.n * ceil(k / split) / rate + top.wave_us) + added)
        return best

    def attention_us(
        self, batch: int, heads: int, queries: int, keys: int, width: int, dtype: str,
        *, causal: bool = True, backward: bool = False, speed: float = 1.0, keys_before: float = 0.0,
    ) -> float:  # fmt: skip
        """Fused attention without the launch: two products, five backward. Causal blocks read keys up to their end."""
        top, after = self.ceiling(dtype), keys - keys_before
        shared = min(0.5 + 0.5 * _QUERIES / after, 1.0) if causal and after else 1.0
        shared = (keys_before + after * shared) / keys if keys_before else shared
        flops = 4.0 * batch * heads * queries * keys * width * (2.5 if backward else 1.0) * shared
        share = speed * ((top.attention_backward if backward else top.attention) or top.rate)
        rate = share * self.clock(top, share)
        moved = batch * heads * (2 * queries + 2 * keys) * width * item_bytes(dtype) * (2 if backward else 1)
        return max(flops / (top.flops_per_us * rate), self.bytes_us(moved))

    def clock(self, top: Ceiling, share: float) -> float:
        """The clock that lasts while a kernel reaches `share` of the peak of `top`, as a share of that of short runs.
        The power that depends on the clock grows with its cube, and with the arithmetic of a cycle: what computes less
        than the fastest product may run faster than at `sustained`.
        """
        fastest = max((tile.rate for tile in top.tiles), default=top.rate)
        return min(1.0, self.sustained * (fastest / share) ** (1 / 3))

    def bytes_us(self, size_bytes: float) -> float:
        """Reading and writing `size_bytes` of device memory in total."""
        return size_bytes / (self.memory_bytes_per_us * self.memory_rate)

    def peak_flops_per_us(self, dtype: str) -> float:
        """The data sheet's rate of products in `dtype`."""
        return self.ceiling(dtype).flops_per_us

    def work_us(self, work: Work) -> float:
        """One op, its launch included."""
        moved = self.launch_us + self.bytes_us(work.moved_bytes)
        if work.matmul:
            return max(self.launch_us + self.matmul_us(*work.matmul, work.dtype), moved)
        if work.attention:
            us = self.attention_us(
                *work.attention, work.dtype, causal=work.causal, backward=work.backward, speed=work.speed,
                keys_before=work.keys_before,
            )  # fmt: skip
            return max(self.launch_us + us, moved)
        if work.flops:
            top = self.ceiling(work.dtype)
            reached = max((tile.rate for tile in top.tiles), default=top.rate)
            return max(self.launch_us + work.flops / (top.flops_per_us * reached * self.sustained), moved)
        return moved


_QUERIES = 128  # in a block of FlashAttention 1 (Triton), 2 and 3, for heads of 64 and 128
_WIDER = {
    "float8": ("bfloat16", "float16", "float32"),
    "float16": ("bfloat16", "tf32", "float32"),
    "bfloat16": ("float16", "tf32", "float32"),
    "tf32": ("float32",),
    "float32": ("tf32",),
}


@dataclass(frozen=True)
class MeasuredDevice:
    """The measured rates of one rank. Times in microseconds, rates in bytes or operations per microsecond.

    Args:
        flops_per_us: of a large matrix product in float32, beside `product_bytes_per_us`.
        memory_bytes_per_us: read plus written by elementwise ops.
        launch_us: of one op, however small.
        math_bytes_per_us: read plus written by ops that compute more than a sum per element (exp, norms, reductions);
            0 for `memory_bytes_per_us`.
        attention_flops_per_us: of fused attention, masked elements counted as computed; 0 for `flops_per_us`.
        view_us: of a view. Views cost time only where the host that calls ops also computes them.
        bucket_copy_bytes_per_us: read plus written by copies into and out of buckets, which are in no cache; 0 for
            `memory_bytes_per_us`.
        product_bytes_per_us: read plus written by products, before and after their arithmetic, so that small products
            are slower; 0 for no time.
        ranks_per_core: that share a core; the rates are those of all of them computing at once.
    """

    name: str
    flops_per_us: float
    memory_bytes_per_us: float
    launch_us: float
    math_bytes_per_us: float = 0.0
    attention_flops_per_us: float = 0.0
    view_us: float = 0.0
    bucket_copy_bytes_per_us: float = 0.0
    product_bytes_per_us: float = 0.0
    ranks_per_core: float = 1.0

    def peak_flops_per_us(self, dtype: str) -> float:
        """The rate of a large product. Only float32 is measured."""
        return self.flops_per_us

    def work_us(self, work: Work) -> float:
        """One op: its launch, and the longer of its arithmetic and its memory traffic; both, of products."""
        flops_per_us = self.attention_flops_per_us * work.speed if work.attention else 0.0
        bytes_per_us = (
            self.bucket_copy_bytes_per_us if work.bucketed else 0.0 if work.streams else self.math_bytes_per_us
        )
        computing = work.flops / (flops_per_us or self.flops_per_us)
        if work.matmul and self.product_bytes_per_us:
            computing += work.moved_bytes / self.product_bytes_per_us
        return self.launch_us + max(computing, work.moved_bytes / (bytes_per_us or self.memory_bytes_per_us))
