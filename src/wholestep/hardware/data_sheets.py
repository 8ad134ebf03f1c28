"""Devices and links inside a node of which only data sheets are known.

Peaks, memory and link rates are from the sheets in `SHEETS`. No times of these devices were fitted: the shares of the
peaks that kernels and collectives reach are those of the fitted device of the nearest generation. Each row of
`presets.presets` says so in its `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .curves import Curve, Regime
from .device import Ceiling, Device, Tile
from .hardware import Level

_GB, _GIB, _TERA = 1e3, 1 << 30, 1e6  # bytes per microsecond, bytes, operations per microsecond

SHEETS = {
    "V100": "NVIDIA V100 data sheet: 125 (PCIe 112) TFLOPS of float16, 900 GB/s, NVLink 300 GB/s both ways",
    "A100": "NVIDIA A100 data sheet: 312 TFLOPS of bfloat16; 1,555 GB/s (40 GB), 1,935 (80 GB PCIe), 2,039 (80 GB SXM)",
    "H100": "NVIDIA H100 data sheet: SXM 989 TFLOPS of bfloat16, 1,979 of float8, 3.35 TB/s, NVLink 900 GB/s both ways",
    "H200": "NVIDIA H200 data sheet: 141 GB, 4.8 TB/s; peaks and NVLink of H100 SXM",
    "H100 500 W": "pytorch/torchtitan docs/performance.md: H100 of 96 GB HBM2e, 2.4 TB/s, 500 W (Grand Teton)",
    "L40S": "NVIDIA L40S data sheet: 362 TFLOPS of bfloat16, 733 of float8, 864 GB/s, PCIe 4 x16",
    "H100 PCIe": "NVIDIA H100 data sheet: PCIe 756 TFLOPS of bfloat16, 1,513 of float8, 2,000 GB/s, PCIe 5 x16",
    "B200": "NVIDIA HGX B200 data sheet: 2,250 TFLOPS of bfloat16, 8 TB/s, NVLink 1.8 TB/s both ways",
    "GB200": "NVIDIA GB200 NVL72 data sheet, by 72: 2,500 TFLOPS of bfloat16, 5,000 of float8, 186 GB, 8 TB/s",
    "MI300X": "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS of bfloat16, 2,614.9 of float8, 5.3 TB/s, 7 x 64 GB/s",
    "board of 4": "NVIDIA HGX 4-GPU: each pair of GPUs is joined by a third of the NVLinks of each, without a switch",
    "EFA": "AWS documentation: P4d 400 Gbit/s, P5 and P6 3,200 Gbit/s for a node of 8 GPUs",
}  # fmt: skip


_LINKS = {
    "infiniband": "NVIDIA GTC24 S62129: peak bus bandwidths of InfiniBand; NCCL src/graph/tuning.cc: latency of a hop",
    "roce": "assumed, not measured: RoCE has the curves of InfiniBand, a tenth less of the rate, 4 us of latency",
    "efa": "assumed, not measured: EFA reaches 85 % of its rate with 12 us of latency, between InfiniBand and TCP",
    "ethernet": "assumed, not measured: TCP reaches 80 % of the rate with 25 us of latency",
    "fastrak": "GCP A3-mega nccl-tests, 16 H100",
}  # fmt: skip
WIRING = "assumed: leaf switches of 64 ports, half of them down; what crosses them has 1/K of the rate"


def link_sources(link: str) -> tuple[str, ...]:
    """The sources of the figures of a link between nodes, by its name."""
    kind = link.partition("-")[0]
    return (*([SHEETS["EFA"]] if kind == "efa" else []), _LINKS[kind])


def assumed(near: str) -> str:
    """The source of everything that no sheet says."""
    return f"assumed, not measured: shares of the peaks, launches and curves are those of {near}"


def like(
    device: Device, name: str, memory_bytes: int, bytes_per_us: float, tera: Mapping[str, float], processors: int
) -> Device:
    """`device` with the numbers of another sheet; `tera` are TFLOPS by dtype, and dtypes that it lacks are dropped."""
    tops = tuple(replace(top, flops_per_us=tera[top.dtype] * _TERA) for top in device.ceilings if top.dtype in tera)
    return replace(
        device, name=name, memory_bytes=memory_bytes, memory_bytes_per_us=bytes_per_us, ceilings=tops,
        processors=processors,
    )  # fmt: skip


# Tensor cores of V100 have no bfloat16: products in it run at the rate of float32.
_V100_TILES = (Tile(256, 128, 0.756), Tile(128, 256, 0.756), Tile(128, 128, 0.722), Tile(64, 64, 0.52))


def v100(name: str, gib: int, half: float, single: float) -> Device:
    """80 processors; peaks in TFLOPS of float16 and of float32."""
    tops = (
        Ceiling("float16", half * _TERA, _V100_TILES, 0.72, 2.8, attention=0.4, attention_backward=0.25),
        Ceiling("bfloat16", single * _TERA, (), 0.8),
        Ceiling("float32", single * _TERA, (), 0.8),
        Ceiling("float64", single / 2 * _TERA, (), 0.8),
    )
    return Device(name, gib * _GIB, 900 * _GB, tops, 0.74, 3.0, 7.0, 80, 1.08)


def mi300x(hopper: tuple[Tile, ...]) -> Device:
    """304 compute units. `hopper`: the tiles of H100, scaled to the 620 TFLOPS that published products reach."""
    reached = 620 / 1307.4 / max(tile.rate for tile in hopper)
    tiles = tuple(replace(tile, rate=tile.rate * reached) for tile in hopper)
    half = Ceiling("bfloat16", 1307.4 * _TERA, tiles, 0.45, 0.7, attention=0.35, attention_backward=0.25)
    tops = (
        half, replace(half, dtype="float16"),
        Ceiling("tf32", 653.7 * _TERA, tiles, 0.45, 0.7, attention=0.3, attention_backward=0.2),
        Ceiling("float8", 2614.9 * _TERA, tiles, 0.45, 0.7, attention=0.3, attention_backward=0.2),
        Ceiling("float32", 163.4 * _TERA, (), 0.6), Ceiling("float64", 163.4 * _TERA, (), 0.6),
    )  # fmt: skip
    return Device("MI300X 192 GB", 192 * 10**9, 5300 * _GB, tops, 0.75, 5.0, 6.0, 304, 1.08)


def ring_level(name: str, ranks: int, gb_per_s: float, latency_us: float, rate: float) -> Level:
    """Links inside a node on which collectives run as rings that reach `rate` of `gb_per_s`."""
    quick, long = Regime(20.0, 1.0, rate / 2), Regime(40.0, 1.0, rate)
    rings = tuple(Curve(kind, "ring", (quick, long)) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    return Level(name, ranks, gb_per_s * _GB, latency_us, (*rings, Curve("all_to_all", "pairwise", (quick, long))))


# One direction. All cards of a node share switches and the host's memory: a ring reaches some 0.7 of a slot (assumed).
PCIE3, PCIE4, PCIE5 = (ring_level(f"pcie{n}", 8, rate, 5.0, 0.7) for n, rate in ((3, 16), (4, 32), (5, 64)))
NVLINK2 = ring_level("nvlink2", 8, 150, 3.1, 0.85)
# 64 GB/s to each other GPU. All-reduces of 4 GiB: 313 GB/s of 8 GPUs, 48 of 2 (stas00/ml-engineering).
INFINITY_FABRIC = replace(ring_level("infinity-fabric", 8, 448, 3.1, 0.7), direct=True)
