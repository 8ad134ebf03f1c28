"""How fast this job computes and communicates, measured in a fraction of a second; the same figures on all ranks."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain, islice
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..backend.gloo.buffers import Buffers
from ..distributed.launch import World
from ..hardware.curves import CollectiveCost, sent_bytes
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .measure_gpu import GpuRates, measure_gpu
from .measure_messages import Products, measure_messages


def measure_hardware(world: World, stage_axis: str = "") -> Hardware:
    """The hardware, as the slowest rank and the slowest axis measure it; with messages between stages along
    `stage_axis`, if there is one.
    """
    if world.device.startswith("cuda"):
        return _measure_gpus(world)
    crowd = max(_ranks_here(world) * torch.get_num_threads() / len(os.sched_getaffinity(0)), 1.0)  # ranks on a core
    before = _computing(world)
    links = [measure_link(world, axis.name) for axis in world.mesh.axes if axis.size > 1 and world.devices is not None]
    rounds = torch.cat([before, _computing(world)], 1)  # others may compute during half of them
    times = [usual(row, crowd) for row in rounds]
    wires = max((wires for wires, _ in links), key=lambda wires: wires[0].byte_us, default=())
    times.append(max((carried for _, carried in links), default=0.0))
    if stage_axis and links:
        at, ranks = world.coordinate[stage_axis], world.mesh.axis_size(stage_axis)
        wires = (*wires, measure_messages(world.groups[stage_axis], ranks, at, crowded(world)))
    times, wires = _slowest(world, [*times, crowd], wires)
    product, small, attention, math, moved, launch, view, carried, crowd = times
    flop, product_byte = of_products(product - launch, small - launch)
    return Hardware.measured(
        flops_per_us=1 / flop, memory_bytes_per_us=1 / moved, launch_us=launch,
        link_us=wires[0].start_us if wires else 0.0, link_bytes_per_us=1 / wires[0].byte_us if wires else 1.0,
        math_bytes_per_us=1 / math, attention_flops_per_us=1 / attention, view_us=view,
        bucket_copy_bytes_per_us=1 / carried if carried else 0.0,
        product_bytes_per_us=1 / product_byte if product_byte else 0.0, ranks_per_core=crowd, collectives=wires,
    )  # fmt: skip


def usual(samples: Tensor, crowd: float) -> float:
    """The median of samples (n, 2), microseconds by the clock and of the processor: a step pays what is usual, not what
    is best. Where ranks have cores of their own, samples during which another process had the core are left out, unless
    few are left. Where `crowd` ranks share a core, a probe may be done before it is another one's turn: it counts as so
    many times its processor time.
    """
    us, own_us = samples.unbind(1)
    if crowd > 1:
        return crowd * float(own_us.median())
    alone = own_us >= TUNING.undisturbed_share * us
    return float((us[alone] if int(alone.sum()) >= TUNING.undisturbed_rounds else us).median())


def _measure_gpus(world: World) -> Hardware:
    """As `measure_hardware`, where each rank has a GPU."""
    rates = measure_gpu(world.device)
    links = [measure_link(world, axis.name)[0] for axis in world.mesh.axes if axis.size > 1]
    times, wires = _slowest(world, rates.flat(), max(links, key=lambda wires: wires[0].byte_us, default=()))
    linked = Hardware.measured(
        link_us=wires[0].start_us if wires else 0.0, link_bytes_per_us=1 / wires[0].byte_us if wires else 1.0,
        collectives=wires,
    )  # fmt: skip
    return replace(linked, device=GpuRates.of(times).device(world.device))


def _slowest(
    world: World, times: Sequence[float], wires: Sequence[CollectiveCost]
) -> tuple[list[float], tuple[CollectiveCost, ...]]:
    """What any rank has measured at most."""
    if world.mesh.size == 1:
        return list(times), tuple(wires)
    figures = [astuple(wire)[1:] for wire in wires]
    slowest = torch.tensor([*times, *chain(*figures)], dtype=torch.float64).to(world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    maxima = [float(v) for v in slowest.cpu()]
    rest = iter(maxima[len(times) :])
    costs = (CollectiveCost(wire.kind, *islice(rest, len(its))) for wire, its in zip(wires, figures, strict=True))
    return maxima[: len(times)], tuple(costs)


PRODUCTS = (512, 384, 768), (256, 256, 1024)
"""(m, k, n) of the products that are timed: of a step of some layers, and of a micro-batch of a narrower one."""


def of_products(large_us: float, small_us: float) -> tuple[float, float]:
    """Microseconds of a multiplication or addition, and of a byte that products read or write, from the times of two
    products. A byte takes none where the small one is not slower for its arithmetic.
    """
    (flops, moved), (low_flops, low_moved) = ((2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)) for m, k, n in PRODUCTS)
    byte_us = max((flops * small_us - low_flops * large_us) / (flops * low_moved - low_flops * moved), 0.0)
    each_us = (large_us - moved * byte_us) / flops
    return (each_us, byte_us) if each_us > 0 and byte_us > 0 else (large_us / flops, 0.0)


def _probes() -> Mapping[str, tuple[Callable[[], object], float]]:
    """What steps are made of, in sizes that a step has, of memory of their own; with operations, bytes or calls."""
    (rows, inner, columns), small = PRODUCTS
    heads, length, width = 4, 128, 64
    fill = torch.rand

    factor, other = fill(rows, inner), fill(inner, columns)
    panel, weight = fill(*small[:2]), fill(*small[1:])
    q, k, v = (fill(4, heads, length, width, requires_grad=True) for _ in range(3))
    wide, scratch, first, second, total = (fill(rows, 1024) for _ in range(5))
    little, sums = fill(8), fill(1024)

    def attention() -> object:
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), out)

    def math() -> None:
        torch.exp(wide, out=scratch)
        torch.softmax(wide, -1, out=scratch)
        torch.sum(wide, 0, out=sums)
        torch.ops.aten.gelu.out(wide, out=scratch)

    def launches() -> object:
        return little + 1.0, little * 2.0, little - 1.0, little.neg()

    def views() -> object:
        return little.view(2, 4), little.unsqueeze(0), little.expand(2, 8), little.detach()

    return {
        "product": (lambda: torch.mm(factor, other), 1.0),
        "small product": (lambda: torch.mm(panel, weight), 1.0),
        "attention": (attention, 3.5 * 16.0 * heads * length * length * width),
        "math": (math, 7.0 * wide.nbytes),
        "bytes": (lambda: torch.add(first, second, out=total), 3.0 * first.nbytes),
        "launch": (launches, 4.0),
        "view": (views, 4.0),
    }


def _computing(world: World) -> Tensor:
    """Microseconds for an operation, a byte or a call, by the clock and of the processor: (probes, rounds, 2).

    All ranks compute, as they do in a step. Probes take turns, so that each finds caches as in a step: full of what
    others left.
    """
    if world.mesh.size > 1:
        dist.barrier()
    with torch.random.fork_rng([]):  # the user's random numbers go on as if nothing had been measured
        probes = _probes().values()
        rounds = [[_sample(run, does) for run, does in probes] for _ in range(TUNING.compute_rounds)]
    return torch.tensor(rounds, dtype=torch.float64).transpose(0, 1)[:, 1:]


def _sample(run: Callable[[], object], does: float) -> tuple[float, float]:
    """Microseconds of one run for each of what it does: by the clock, and of the processor for this thread."""
    begin, thread = time.perf_counter(), time.thread_time()
    run()
    thread, us = time.thread_time() - thread, time.perf_counter() - begin
    return us * 1e6 / does, thread * 1e6 / does


_FEW, _LEAST = TUNING.link_few_bytes, TUNING.link_many_bytes
_SIZES = (
    (4_000.0, 4 << 20, (3, 3)),
    (16_000.0, _LEAST, (6, 3)),
    (64_000.0, _LEAST // 2, (8, 2)),
    (float("inf"), _LEAST, (2, 1)),
)
"""By what an all-reduce of `_LEAST` bytes takes at most: bytes to time, how many in a row, and how many rows."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
funcol = torch.ops._c10d_functional
Run = Callable[..., object]
Typical = Callable[[Iterable[float]], float]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one collective: until its result is there, on the calling thread, and taken from compute."""

    us: float
    own_us: float
    busy_us: float


def measure_link(world: World, axis: str) -> tuple[tuple[CollectiveCost, ...], float]:
    """The cost of each kind of collective along `axis`, and of a copy of its payload for each byte read and written; 0
    where that is as fast as any copy.

    Each kind is timed with small and with large messages; the difference gives the bandwidth. Large messages are in
    flight together, so that no rank counts time in which it was late for data that others had sent, and enough of
    them that the burst which a link passes before it limits the rate counts little. Large is 4 MiB, or less on a slow
    link: as much as it sends in a bucket.
    """
    group, ranks = world.groups[axis], world.mesh.axis_size(axis)
    trial = _runner("all_reduce", _LEAST, ranks, group, world.device)
    trial(1)
    us = torch.tensor([seconds(lambda: trial(1), world.device) * 1e6]).to(world.device)
    dist.all_reduce(us, dist.ReduceOp.MAX)  # ranks run the same collectives as often
    most, often = next((size, often) for limit_us, size, often in _SIZES if float(us) <= limit_us)
    share = crowded(world)
    on_cuda = world.device.startswith("cuda")
    before = (0.0, 0.0) if on_cuda else _of_what_came(ranks, group)
    wires = tuple(_wire(kind, most, often, ranks, group, world.device, share) for kind in KINDS)
    after = before if on_cuda else _of_what_came(ranks, group)
    copied, added = (min(both) for both in zip(before, after, strict=True))  # others may compute for a while
    return tuple(replace(w, reduce_byte_us=added) if w.kind == "reduce_scatter" else w for w in wires), copied


def _of_what_came(ranks: int, group: str) -> tuple[float, float]:
    """Microseconds a byte: of a copy of gathered data, for each byte read and written, and of the local reduction, for
    each byte sent. Other threads received the data and the rank computed since, so it is in no cache of this core.
    """
    buffers, wait = Buffers(), funcol.wait_tensor.default
    full = torch.full((max(_LEAST // 4 // ranks, 2) * ranks,), 0.5, dtype=torch.float32)
    part, other = full[: len(full) // ranks], torch.full((512, 512), 0.5, dtype=torch.float32)
    outlines, copies, sums = [(1,), (len(part) - 1,)], list[float](), list[float]()
    for _ in range(TUNING.copy_rounds):
        came = wait(buffers.gather(part, ranks, group))
        torch.mm(other, other)
        copies.append(seconds(lambda came=came: buffers.part_of_gather(came, outlines, 1, ranks), "cpu"))
        came = wait(buffers.swap(full, ranks, group))
        torch.mm(other, other)
        sums.append(seconds(lambda came=came: buffers.add_parts(came, ranks, "avg"), "cpu"))
    sent = sent_bytes("reduce_scatter", full.nbytes, ranks)
    return statistics.median(copies) * 1e6 / (2 * full.nbytes), statistics.median(sums) * 1e6 / sent


def _wire(
    kind: str, most: int, often: tuple[int, int], ranks: int, group: str, device: str, share: float
) -> CollectiveCost:
    """Fit from small messages, large messages, and large messages beside matrix products.

    CPU time of small messages varies tenfold, so the CPU time of large messages counts, at least half of it for bytes;
    at least half of the time of small messages counts for the start.
    """
    small, large = (sent_bytes(kind, size, ranks) for size in (_FEW, most))
    short = _timed(_runner(kind, _FEW, ranks, group, device), device, TUNING.link_repeats, share, min)
    run = _runner(kind, most, ranks, group, device)
    long = _timed(run, device, often, share, statistics.median)
    stretch, busy_us = (1.0, long.busy_us) if device.startswith("cuda") else _beside(run, long, often, share)
    each = max(long.us - long.own_us - short.us + short.own_us, 1e-6) / (large - small)
    own_byte = max(long.own_us - short.own_us, 0.0) / (large - small)
    busy = max(busy_us - short.busy_us, busy_us / 2, 1e-6) / (large - small)
    start = max(short.us - short.own_us - each * small, short.us / 2, 1.0)
    start_busy = max(busy_us - busy * large, 0.0)
    return CollectiveCost(kind, start, each, start_busy, busy, short.own_us, own_byte, overlap_slowdown=stretch)


def crowded(world: World) -> float:
    """The share of the CPU time of communication that is taken from compute: 1 where every core computes, 0 where each
    rank has a spare core.
    """
    if world.device.startswith("cuda"):
        return 0.0
    spare_cores = len(os.sched_getaffinity(0)) / _ranks_here(world) - torch.get_num_threads()  # of each rank
    return min(max(1.0 - spare_cores, 0.0), 1.0)


def _ranks_here(world: World) -> int:
    """Ranks of the job on this host."""
    if world.mesh.size == 1:
        return 1
    mine = torch.tensor([crc32(socket.gethostname().encode())])
    names = [torch.empty_like(mine) for _ in range(world.mesh.size)]
    dist.all_gather(names, mine)
    return sum(bool(name == mine) for name in names)


def _runner(kind: str, size: int, ranks: int, group: str, device: str) -> Run:
    """Starts the given number of collectives of `size` bytes at once, then waits for each, as a step does."""
    length, buffers = max(size // 4 // ranks, 1) * ranks, Buffers()
    wholes = [torch.zeros(length, dtype=torch.float32, device=device)]

    def start(tensor: Tensor) -> Tensor:
        if kind == "all_reduce":
            return funcol.all_reduce_.default(tensor, "sum", group)
        if kind == "all_gather":
            return buffers.gather(tensor[: length // ranks], ranks, group)
        if device.startswith("cuda"):
            return funcol.reduce_scatter_tensor.default(tensor, "avg", ranks, group)
        return buffers.swap(tensor, ranks, group)

    def run(times: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        while len(wholes) < times:
            wholes.append(torch.zeros_like(wholes[0]))
        started = [start(tensor) for tensor in wholes[:times]]
        meanwhile()
        for sent in started:
            funcol.wait_tensor.default(sent)

    return run


def _timed(run: Run, device: str, often: tuple[int, int], share: float, typical: Typical) -> Timed:
    """Of each of a row of runs, `often` being how many and how many rows: the typical row, and what processors did. Of
    other threads the `share` that computing lacks counts; on a GPU nothing does.
    """
    times, rows = often
    run(times)
    process, thread = time.process_time(), time.thread_time()
    us = typical(seconds(lambda: run(times), device) for _ in range(rows)) * 1e6
    process, thread = time.process_time() - process, time.thread_time() - thread
    if device.startswith("cuda"):
        return Timed(us / times, 0.0, 0.0)
    each = 1e6 / (times * rows)
    return Timed(us / times, thread * each, share * (process - thread) * each)


def _beside(run: Run, alone: Timed, often: tuple[int, int], share: float) -> tuple[float, float]:
    """How many times as long as `alone` they take while the rank computes, and what computing lacks for each of them.

    The rank computes for most of the time that they take alone, and what is left of them then goes at that speed. Of
    computing they take what other threads do; and its own thread takes longer for the same products: their caches are
    others', and the kernel handles packets on its time.
    """
    times, rows = often
    lasts_us = times * alone.us
    products = Products(TUNING.beside_share * lasts_us / 1e6)
    stretch, others_us, longer = list[float](), list[float](), list[float]()
    for _ in range(rows):
        products()
        usual_us = products.own_us / products.count
        process, thread = time.process_time(), time.thread_time()
        us = seconds(lambda: run(times, products), "cpu") * 1e6
        process, thread = time.process_time() - process, time.thread_time() - thread
        others_us.append((process - thread) * 1e6)
        longer.append(products.own_us - products.count * usual_us)
        done_us = lasts_us - (us - products.us)  # of their time alone, while the rank computed
        stretch.append(products.us / max(done_us, products.us / TUNING.most_slower))
    busy = share * statistics.mean(others_us) + max(statistics.median(longer), 0.0)
    return max(statistics.median(stretch), 1.0), busy / times


def seconds(run: Callable[[], object], device: str) -> float:
    """The time of one run."""
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
