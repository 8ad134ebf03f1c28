"""Devices and links inside a node of which only data sheets are known.

Peaks, memory and link rates are from the sheets in `_SHEETS`. No times of these devices were fitted: the shares of the
peaks that kernels and collectives reach are those of the fitted device of the nearest generation. Each row of
`presets` says so in its `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wholestep.hardware.curves import Curve, Regime
from wholestep.hardware.device import Ceiling, Device, Tile
from wholestep.hardware.hardware import Hardware, Level
from wholestep.hardware.presets import (
    A100,
    B200,
    H100,
    H200,
    HOPPER_HALF,
    LINKS,
    NVLINK3,
    NVLINK4,
    NVLINK4_H200,
    NVLINK5,
    SHEETS,
    XLA,
    preset_of,
)

_GB, _GIB, _TERA = 1e3, 1 << 30, 1e6  # bytes per microsecond, bytes, operations per microsecond

_SHEETS = SHEETS | {
    "V100": "NVIDIA V100 data sheet: 125 (PCIe 112) TFLOPS of float16, 900 GB/s, NVLink 300 GB/s both ways",
    "L40S": "NVIDIA L40S data sheet: 362 TFLOPS of bfloat16, 733 of float8, 864 GB/s, PCIe 4 x16",
    "H100 PCIe": "NVIDIA H100 data sheet: PCIe 756 TFLOPS of bfloat16, 1,513 of float8, 2,000 GB/s, PCIe 5 x16",
    "GB200": "NVIDIA GB200 NVL72 data sheet, by 72: 2,500 TFLOPS of bfloat16, 5,000 of float8, 186 GB, 8 TB/s",
    "MI300X": "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS of bfloat16, 2,614.9 of float8, 5.3 TB/s, 7 x 64 GB/s",
    "board of 4": "NVIDIA HGX 4-GPU: each pair of GPUs is joined by a third of the NVLinks of each, without a switch",
}  # fmt: skip


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


def _board_of_4(level: Level) -> Level:
    """HGX with four GPUs."""
    curves = tuple(curve for curve in level.curves if curve.algorithm != "nvls")
    return replace(level, name=f"{level.name} of 4", ranks=4, curves=curves, direct=True)


def presets() -> list[Hardware]:
    """Devices that no published times were fitted to."""
    ampere = {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5}
    hopper = {"bfloat16": 756.5, "float16": 756.5, "tf32": 378.0, "float8": 1513.0, "float32": 51.0, "float64": 51.0}
    grace = {"bfloat16": 2500.0, "float16": 2500.0, "tf32": 1250.0, "float8": 5000.0, "float32": 80.0, "float64": 40.0}
    ada = {"bfloat16": 362.05, "float16": 362.05, "tf32": 183.0, "float8": 733.0, "float32": 91.6, "float64": 1.43}
    a100_40gb = replace(A100, name="A100 SXM 40 GB", memory_bytes=40 * _GIB, memory_bytes_per_us=1555 * _GB)
    ib100, ib200, ib400 = (LINKS[f"infiniband-{gbit}"] for gbit in (100, 200, 400))
    a100_pcie = [
        like(A100, f"A100 PCIe {gb} GB", gb * _GIB, rate * _GB, ampere, 108) for gb, rate in ((40, 1555), (80, 1935))
    ]
    h100_pcie = like(H100, "H100 PCIe 80 GB", 80 * _GIB, 2000 * _GB, hopper, 114)
    gb200 = like(B200, "GB200 186 GB", 186 * 10**9, 8000 * _GB, grace, 148)
    l40s = like(H100, "L40S 48 GB", 45 * _GIB, 864 * _GB, ada, 142)
    nvlink5 = replace(NVLINK5, ranks=8)
    four = _SHEETS["board of 4"]
    fitted = {
        "a100": assumed("A100 SXM 80 GB"),
        "h100": assumed("H100 SXM"),
        "b200": assumed("B200, itself not fitted"),
    }
    rows = [
        ("dgx-a100-40gb", a100_40gb, NVLINK3, ib200, "A100", fitted["a100"]),
        ("p4d", a100_40gb, NVLINK3, LINKS["efa-50"], "A100", fitted["a100"]),
        ("a100-pcie-40gb", a100_pcie[0], PCIE4, ib200, "A100", fitted["a100"]),
        ("a100-pcie-80gb", a100_pcie[1], PCIE4, ib200, "A100", fitted["a100"]),
        ("h100-pcie", h100_pcie, PCIE5, ib400, "H100 PCIe", fitted["h100"]),
        ("p5", H100, NVLINK4, LINKS["efa-400"], "H100", XLA),
        ("hgx-a100-4", A100, _board_of_4(NVLINK3), ib200, "A100", f"{fitted['a100']}; {four}"),
        ("hgx-h100-4", H100, _board_of_4(NVLINK4), ib400, "H100", f"{fitted['h100']}; {four}"),
        ("hgx-h200-4", H200, _board_of_4(NVLINK4_H200), ib400, "H200", f"{fitted['h100']}; {four}"),
        ("l40s", l40s, PCIE4, ib200, "L40S", fitted["h100"]),
        ("b200", B200, nvlink5, ib400, "B200", XLA),
        ("gb200-nvl72", gb200, NVLINK5, ib400, "GB200", fitted["b200"]),
        ("mi300x", mi300x(HOPPER_HALF), INFINITY_FABRIC, ib400, "MI300X", fitted["h100"]),
        ("v100-16gb", v100("V100 SXM 16 GB", 16, 125, 15.7), NVLINK2, ib100, "V100", fitted["a100"]),
        ("v100-32gb", v100("V100 SXM 32 GB", 32, 125, 15.7), NVLINK2, ib100, "V100", fitted["a100"]),
        ("v100-pcie", v100("V100 PCIe 16 GB", 16, 112, 14), PCIE3, ib100, "V100", fitted["a100"]),
    ]  # fmt: skip
    return [
        preset_of(name, device, inside, between, _SHEETS[sheet], near)
        for name, device, inside, between, sheet, near in rows
    ]  # fmt: skip
