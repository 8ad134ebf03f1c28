"""Hardware by name. Fitted figures name the data they were fitted to; all others are from data sheets.

The two regimes of a curve, its own-piece rate and the latency of a hop have the least absolute log errors over the
published tables in `sources` (`benchmarks/accuracy.md` has their errors, with rows held out).
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from importlib.metadata import entry_points

from ..errors import PlanError, shown
from .curves import Curve, Regime
from .device import Ceiling, Device, Tile
from .hardware import Hardware, Level

_GB, _GIB, _TERA = 1e3, 1 << 30, 1e6  # bytes per microsecond, bytes, operations per microsecond

XLA = "XLA default_collective_perf_table and gemm tables (openxla/xla, Apache-2.0): H100 of 2 and 8 ranks, B200 of 8"
_VTRAIN = "vTrain nccl-tests tables (MIT): A100 all-reduce of 2, 4 and 8 ranks"
_H200_SOURCE = "nccl-tests of 8 H200 (NCCL 2.27.7, NVLS), published plot"
_PEAKS = "NVIDIA GTC24 S62129: peak bus bandwidths by link"
_CLOCKS = "sustained rates of bf16 products beside bursts (stas00/ml-engineering: MSMF and MAMF, 8 busy H200 and B200)"
_HPL = "A100: 1305 of 1410 MHz under HPL at its power limit; bursts reach 86 % of the peak (stas00/ml-engineering)"
_FLASH = "FlashAttention-2 and -3 papers (arXiv 2307.08691, 2407.08608): causal, heads of 128, 2k to 16k tokens"


SHEETS = {
    "A100": "NVIDIA A100 data sheet: 312 TFLOPS of bfloat16; 1,555 GB/s (40 GB), 1,935 (80 GB PCIe), 2,039 (80 GB SXM)",
    "H100": "NVIDIA H100 data sheet: SXM 989 TFLOPS of bfloat16, 1,979 of float8, 3.35 TB/s, NVLink 900 GB/s both ways",
    "H200": "NVIDIA H200 data sheet: 141 GB, 4.8 TB/s; peaks and NVLink of H100 SXM",
    "H100 500 W": "pytorch/torchtitan docs/performance.md: H100 of 96 GB HBM2e, 2.4 TB/s, 500 W (Grand Teton)",
    "B200": "NVIDIA HGX B200 data sheet: 2,250 TFLOPS of bfloat16, 8 TB/s, NVLink 1.8 TB/s both ways",
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


def _tiles(large: float, middle: float, small: float, smallest: float) -> tuple[Tile, ...]:
    """By the share of the ceiling that a processor reaches on each."""
    return (
        Tile(256, 128, large), Tile(128, 256, large), Tile(128, 128, middle), Tile(128, 64, small),
        Tile(64, 128, small), Tile(64, 64, smallest),
    )  # fmt: skip


HOPPER_HALF, _HOPPER_TF32, _HOPPER_EIGHT = (
    _tiles(0.61, 0.859, 0.721, 0.577), _tiles(0.664, 0.42, 0.333, 0.25), _tiles(0.913, 0.95, 0.704, 0.563),
)  # fmt: skip


_PCIE5 = 0.8 * 64 * _GB
"""Copies of pinned memory, one direction: 80 % of PCIe 5 x16 (assumed, as of the 32 GB/s of PCIe 4)."""
_NCCL_BLOCKS = 16
"""Processors that collectives keep busy: one a channel, two channels for each of eight adapters."""
_SLOWEST = 727 / 752
"""A step waits for the slowest of its ranks: TFLOPS of the slowest and of the median of 8 busy H200 (`_CLOCKS`)."""
_H200_SUSTAINED, _B200_SUSTAINED = 698.6 / 850 * _SLOWEST, 1426.4 / 1751.2 * _SLOWEST
_H100_SUSTAINED, _A100_SUSTAINED = _H200_SUSTAINED * 792.1 / 825.8, 1305 / 1410 * _SLOWEST
"""What lasts of the rate of short runs: H200 of the 850 TFLOPS of XLA's tables, B200 of its bursts, H100 as H200, by
the bursts of both (`_CLOCKS`), A100 by its clock under HPL (`_HPL`)."""


def _hopper(
    name: str, memory_bytes: int, memory_rate: float, sustained: float = _H100_SUSTAINED, watts: int = 700
) -> Device:
    """H100 SXM: 132 processors, bf16 989 TFLOPS dense. Of less power than 700 W, the clock keeps the cube root,
    but for 100 W that do not depend on the clock.
    """
    sustained *= ((watts - 100) / 600) ** (1 / 3)
    ceilings = (
        Ceiling("bfloat16", 989 * _TERA, HOPPER_HALF, 0.75, 0.7, attention=0.38, attention_backward=0.32),
        Ceiling("float16", 989 * _TERA, HOPPER_HALF, 0.75, 0.7, attention=0.38, attention_backward=0.32),
        Ceiling("tf32", 495 * _TERA, _HOPPER_TF32, 0.65, 0.62, attention=0.4, attention_backward=0.3),
        Ceiling("float8", 1979 * _TERA, _HOPPER_EIGHT, 0.6, 0.01, attention=0.4, attention_backward=0.3),
        Ceiling("float32", 67 * _TERA, (), 0.8),
        Ceiling("float64", 67 * _TERA, (), 0.8),
    )
    return Device(
        name, memory_bytes, memory_rate, ceilings, memory_rate=0.8, launch_us=4.9, host_us=5.0, processors=132,
        contention=132 / (132 - _NCCL_BLOCKS), sustained=sustained, host_bytes_per_us=_PCIE5,
    )  # fmt: skip


_A100_TILES = (
    Tile(256, 128, 0.859), Tile(128, 256, 0.859), Tile(128, 128, 0.82), Tile(128, 64, 0.7), Tile(64, 64, 0.59)
)  # fmt: skip
A100 = Device(
    "A100 SXM 80 GB", 80 * _GIB, 2039 * _GB,
    (
        Ceiling("bfloat16", 312 * _TERA, _A100_TILES, 0.72, 2.8, attention=0.6, attention_backward=0.5),
        Ceiling("float16", 312 * _TERA, _A100_TILES, 0.72, 2.8, attention=0.6, attention_backward=0.5),
        Ceiling("tf32", 156 * _TERA, _A100_TILES, 0.72, 2.8, attention=0.4, attention_backward=0.3),
        Ceiling("float32", 19.5 * _TERA, (), 0.8),
        Ceiling("float64", 19.5 * _TERA, (), 0.8),
    ),
    memory_rate=0.74, launch_us=3.0, host_us=7.0, processors=108, contention=108 / (108 - _NCCL_BLOCKS),
    sustained=_A100_SUSTAINED,
)  # fmt: skip
H100 = _hopper("H100 SXM 80 GB", 80 * _GIB, 3350 * _GB)
H100_500W = _hopper("H100 96 GB HBM2e, 500 W", 96 * _GIB, 2400 * _GB, watts=500)
H200 = _hopper("H200 SXM 141 GB", 141 * 10**9, 4800 * _GB, _H200_SUSTAINED)
B200 = Device(
    "B200 192 GB", 192 * 10**9, 8000 * _GB,
    (
        Ceiling("bfloat16", 2250 * _TERA, HOPPER_HALF, 0.7, 0.6, attention=0.4, attention_backward=0.33),
        Ceiling("float16", 2250 * _TERA, HOPPER_HALF, 0.7, 0.6, attention=0.4, attention_backward=0.33),
        Ceiling("tf32", 1125 * _TERA, _HOPPER_TF32, 0.65, 0.6, attention=0.4, attention_backward=0.3),
        Ceiling("float8", 4500 * _TERA, _HOPPER_EIGHT, 0.6, 0.01, attention=0.4, attention_backward=0.3),
        Ceiling("float32", 75 * _TERA, (), 0.8),
        Ceiling("float64", 37 * _TERA, (), 0.8),
    ),
    memory_rate=0.8, launch_us=4.9, host_us=5.0, processors=148, contention=148 / (148 - _NCCL_BLOCKS),
    sustained=_B200_SUSTAINED, host_bytes_per_us=_PCIE5,
)  # fmt: skip


def _curve(kind: str, algorithm: str, quick: tuple[float, float, float], long: tuple[float, float, float],
           own_rate: float = 0.0, least: int = 2) -> Curve:  # fmt: skip
    return Curve(kind, algorithm, (Regime(*quick), Regime(*long)), own_rate * _GB, least)


NVLINK3 = Level("nvlink3", 8, 240 * _GB, 3.1, (
    _curve("all_reduce", "ring", (32.2, 1.0, 0.907), (72.4, 1.0, 0.99), 560),
    _curve("all_gather", "ring", (20.0, 1.0, 0.5), (40.0, 1.0, 0.97), 1000),
    _curve("reduce_scatter", "ring", (20.0, 1.0, 0.5), (40.0, 1.0, 0.97), 500),
    _curve("all_to_all", "pairwise", (35.0, 0.1, 0.5), (60.0, 0.1, 0.93), 1000),
))  # fmt: skip
_HOPPER_RINGS = (
    _curve("all_gather", "ring", (13.0, 1.0, 0.478), (32.3, 1.0, 0.995), 937),
    _curve("reduce_scatter", "ring", (16.8, 0.7, 0.719), (41.5, 0.7, 1.0), 380),
    _curve("all_reduce", "ring", (10.8, 1.1, 0.39), (43.5, 1.1, 0.642)),
    _curve("all_to_all", "pairwise", (34.4, 0.0, 0.558), (56.5, 0.0, 0.949), 1923),
)
NVLINK4 = Level("nvlink4", 8, 370 * _GB, 1.83, (
    *_HOPPER_RINGS, _curve("all_reduce", "nvls", (40.7, 0.2, 0.403), (82.2, 0.2, 0.695), 0, 3),
))  # fmt: skip
NVLINK4_H200 = replace(NVLINK4, curves=(
    *_HOPPER_RINGS, _curve("all_reduce", "nvls", (26.2, 0.4, 0.115), (87.3, 0.4, 0.824), 0, 3),
))  # fmt: skip
NVLINK5 = Level("nvlink5", 72, 640 * _GB, 1.0, (
    _curve("all_gather", "ring", (33.3, 0.34, 0.782), (57.2, 0.34, 0.982)),
    _curve("reduce_scatter", "ring", (8.3, 3.5, 0.683), (51.4, 3.5, 1.0)),
    _curve("all_reduce", "ring", (45.0, 1.0, 0.39), (85.0, 1.0, 0.642)),
    _curve("all_reduce", "nvls", (50.3, 0.0, 0.337), (102.6, 0.0, 0.627), 0, 3),
    _curve("all_to_all", "pairwise", (36.3, 0.36, 0.617), (65.0, 0.36, 0.939)),
))  # fmt: skip
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def _between(name: str, bytes_per_us: float, latency_us: float, quick: tuple[float, float, float],
             long: tuple[float, float, float]) -> Level:  # fmt: skip
    """Links between nodes, one for each rank. An all-reduce may use trees; what it needs inside a node goes beside."""
    return Level(name, 0, bytes_per_us, latency_us, (
        *(_curve(kind, "ring", quick, long) for kind in _RINGS),
        _curve("all_reduce", "tree", quick, long),
        _curve("all_to_all", "pairwise", quick, (long[0], 0.1, long[2])),
    ))  # fmt: skip


def _infiniband(gbit: int, share: float = 0.96) -> Level:
    return _between(f"infiniband-{gbit}", gbit / 8 * _GB, 2.7, (25.0, 1.0, 0.25), (50.0, 5.2, share))


def _ethernet(gbit: int) -> Level:
    return _between(f"ethernet-{gbit}", gbit / 8 * _GB, 25.0, (60.0, 1.0, 0.6), (120.0, 1.2, 0.8))


def _roce(gbit: int) -> Level:
    """RDMA over Ethernet: the latency of InfiniBand's figures and a tenth less of the rate are assumed."""
    return _between(f"roce-{gbit}", gbit / 8 * _GB, 4.0, (25.0, 1.0, 0.25), (50.0, 5.2, 0.86))


def _efa(gbit: int) -> Level:
    """AWS: latency and share of the rate, between those of InfiniBand and of TCP, are assumed."""
    return _between(f"efa-{gbit}", gbit / 8 * _GB, 12.0, (40.0, 1.0, 0.3), (90.0, 2.0, 0.85))


FASTRAK = Level("fastrak-200", 0, 25 * _GB, 5.0, (
    _curve("all_reduce", "nvls_tree", (140.0, 1.0, 0.1), (880.0, 1.0, 0.92)),
    *(_curve(kind, "ring", (140.0, 1.0, 0.2), (300.0, 2.0, 0.9)) for kind in _RINGS[1:]),
    _curve("all_to_all", "pairwise", (140.0, 0.2, 0.2), (300.0, 0.2, 0.85)),
))  # fmt: skip
LINKS = {
    "infiniband-100": _infiniband(100), "infiniband-200": _infiniband(200), "infiniband-400": _infiniband(400, 0.95),
    "ethernet-10": _ethernet(10), "ethernet-100": _ethernet(100), "ethernet-400": _ethernet(400),
    "fastrak-200": FASTRAK,
    "roce-100": _roce(100), "roce-200": _roce(200), "roce-400": _roce(400),
    "efa-50": _efa(50), "efa-400": _efa(400), "infiniband-800": _infiniband(800, 0.95),
}  # fmt: skip

_CPU = Device(
    "CPU core", 8 * _GIB, 25 * _GB,
    tuple(Ceiling(*top) for top in (("float32", 0.08 * _TERA), ("float64", 0.04 * _TERA), ("bfloat16", 0.25 * _TERA))),
    memory_rate=1.0, launch_us=8.0, host_us=8.0,
)  # fmt: skip
LOOPBACK = Level("loopback", 0, 0.75 * _GB, 100.0, (
    Curve("all_gather", "gloo", (Regime(225.0),)),
    Curve("reduce_scatter", "gloo", (Regime(110.0, 1.0, 0.8),)),
    Curve("all_reduce", "gloo", (Regime(230.0, 0.5, 0.45), Regime(490.0, 0.5, 1.6))),
    Curve("all_to_all", "pairwise", (Regime(110.0, 1.0, 1.6),)),
    Curve("broadcast", "gloo", (Regime(60.0, 0.2, 3.5),)),
))  # fmt: skip


def presets() -> dict[str, Hardware]:
    """All presets by name; each also as `NAME+LINK`."""
    ib = LINKS["infiniband-200"], LINKS["infiniband-400"]
    rows = [
        preset_of("dgx-a100", A100, NVLINK3, ib[0], SHEETS["A100"], _VTRAIN, _HPL, _FLASH),
        preset_of("dgx-h100", H100, NVLINK4, ib[1], SHEETS["H100"], XLA, _CLOCKS, _FLASH),
        preset_of("h200", H200, NVLINK4_H200, ib[1], SHEETS["H200"], _H200_SOURCE, XLA, _CLOCKS, _FLASH),
        preset_of("b200-nvl72", B200, NVLINK5, ib[1], SHEETS["B200"], XLA, _CLOCKS, _FLASH),
        preset_of("h100-96gb-500w", H100_500W, NVLINK4, LINKS["roce-400"], SHEETS["H100 500 W"], XLA, _CLOCKS, _FLASH),
        preset_of("a3-mega", H100, NVLINK4, FASTRAK, SHEETS["H100"], XLA, _CLOCKS, _FLASH),
        *_by_sheet(),
        Hardware("loopback", _CPU, (LOOPBACK,), ("wholestep calibrate: two gloo ranks on two busy cores",)),
    ]
    return {row.name: row for row in rows}


def preset_of(name: str, device: Device, inside: Level, between: Level, *sources: str) -> Hardware:
    """A preset with the sources of its links beside those of its device."""
    return Hardware(name, device, (inside, between), (*sources, _PEAKS, *link_sources(between.name)))


@functools.cache
def _by_sheet() -> tuple[Hardware, ...]:
    """The presets of installed packages: of their entry points `wholestep.hardware`."""
    return tuple(row for entry in entry_points(group="wholestep.hardware") for row in entry.load()())


def preset(name: str) -> Hardware:
    """One of `presets()`, or with another link between its nodes (`wired` for how they are wired)."""
    by_name = presets()
    base, _, link = name.partition("+")
    many = base in by_name and len(by_name[base].levels) > 1
    if many and (":" in link or "/" in link):
        machine = wired(by_name[base], link, LINKS)
        return replace(machine, name=name, sources=_with_link(by_name[base], machine.levels[-1].name, WIRING))
    if base not in by_name or (link and (link not in LINKS or not many)):
        raise PlanError(
            f"there is no hardware {shown(name)}", f"one of {', '.join(by_name)}, or NAME+LINK with {', '.join(LINKS)}",
            "correct the name, or give a file to Hardware.load"
            + ("" if _by_sheet() else "; pip install 'wholestep[foresight]' has presets from data sheets, as l40s"),
        )  # fmt: skip
    machine = by_name[base]
    if not link:
        return machine
    levels = (*machine.levels[:-1], LINKS[link])
    return replace(machine, name=name, levels=levels, sources=_with_link(machine, link))


def _with_link(hardware: Hardware, link: str, *added: str) -> tuple[str, ...]:
    """The sources of `hardware` with another link between its nodes."""
    before = link_sources(hardware.levels[-1].name)
    return (*(source for source in hardware.sources if source not in before), *link_sources(link), *added)


def seed() -> Hardware:
    """DTensor's figures: 87.7 GiB/s and 0.6 us inside a host; 0.22 of that and 2.7 us along an axis that leaves it."""
    curves = tuple(Curve(kind, "flat", (Regime(6.6),)) for kind in (*_RINGS, "all_to_all", "broadcast"))
    rate = 87.7 * 2**30 / 1e6
    levels = Level("host", 8, rate, 0.6, curves), Level("hosts", 0, rate * 0.22, 2.7, curves)
    return Hardware("seed", A100, levels, ("torch.distributed.tensor._collective_utils",))


@functools.cache
def one_host() -> Hardware:
    """The formula of `seed` on one host that holds any number of ranks: what layouts are priced by by default."""
    host = seed()
    return replace(host, name="one host", levels=(replace(host.levels[0], ranks=0),))


_TEXT = re.compile(r"(?P<link>[a-z0-9-]+)(?::(?P<wired>rail|fat-tree))?(?:/(?P<times>[0-9]{1,3}(?:\.[0-9]{1,3})?))?")
_DOWN = 32  # ports of a leaf switch with 64 ports that go down to NICs, the usual half


def wired(hardware: Hardware, text: str, links: dict[str, Level]) -> Hardware:
    """`hardware` with the link `LINK[:rail|:fat-tree][/K]` between its nodes.

    A leaf switch of 64 ports has 32 down. `rail` gives each rank of a node a leaf of its own, so that 32 nodes share
    their leaves; in a `fat-tree` all NICs of a node are on one leaf. What leaves the leaves has 1/K of the rate.
    Between ranks of different rails inside a leaf group, the library is assumed to cross the node's own links first.

    Raises:
        PlanError: the text is malformed, the link unknown, or K below 1.
    """
    match = _TEXT.fullmatch(text)
    times = float((match and match["times"]) or 1)
    if match is None or match["link"] not in links or times < 1:
        raise PlanError(
            f"link {shown(text)}", f"LINK[:rail|:fat-tree][/K] with K of at least 1 and one of {', '.join(links)}",
            "correct it, as infiniband-400:rail/2",
        )  # fmt: skip
    link, node = links[match["link"]], hardware.ranks_per_node
    nodes = _DOWN if match["wired"] == "rail" else max(_DOWN // node, 1)
    spine = replace(link, name=f"{link.name} spine {times:,.9g}:1", bytes_per_us=link.bytes_per_us / times)
    if nodes == 1:
        return replace(hardware, levels=(*hardware.levels[:-1], spine))
    leaf = replace(link, name=f"{link.name} leaf", ranks=nodes * node)
    return replace(hardware, levels=(*hardware.levels[:-1], leaf, spine))
