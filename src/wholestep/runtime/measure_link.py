"""What collectives of a job take: time on the link, and time of the processors that compute."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

import torch
import torch.distributed as dist

from ..backend.buffers import Buffers
from ..cost.machine import Wire, sent_bytes
from .launch import World

_FEW, _LEAST = 4 << 10, 1 << 20
_SIZES = ((4_000.0, 4 << 20, (3, 4)), (16_000.0, _LEAST, (4, 4)), (float("inf"), _LEAST, (3, 2)))
"""By what an all-reduce of `_LEAST` bytes takes at most: bytes to time, how many in a row, and how many rows."""
_OF_WHAT_CAME = 7
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
funcol = torch.ops._c10d_functional
Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one collective: until its result is there, of the thread that calls it, and of others that
    computing lacks.
    """

    us: float
    own_us: float
    busy_us: float


@dataclass(frozen=True)
class Link:
    """What each kind of collective takes along an axis, and a copy of what they carry, for each byte that it reads and
    writes; 0 where that is as any other.
    """

    wires: tuple[Wire, ...]
    carried_byte_us: float


def measure_link(world: World, axis: str) -> Link:
    """What collectives take along `axis`.

    Each is timed with few bytes and with many: their difference is the rate. Those of many follow each other without a
    pause, so that no rank counts a time in which it came late to what others had sent before. Many are 4 MiB, or as
    much less as a slow link sends in a bucket.
    """
    group, ranks = world.groups[axis], world.mesh.axis_size(axis)
    trial = _runner("all_reduce", _LEAST, ranks, group, world.device)
    trial()
    us = torch.tensor([_seconds(trial, world.device) * 1e6]).to(world.device)
    dist.all_reduce(us, dist.ReduceOp.MAX)  # ranks run the same collectives as often
    most, often = next((size, often) for limit_us, size, often in _SIZES if float(us) <= limit_us)
    share = crowded(world)
    on_cuda = world.device.startswith("cuda")
    before = (0.0, 0.0) if on_cuda else _of_what_came(ranks, group)
    wires = tuple(_wire(kind, most, often, ranks, group, world.device, share) for kind in KINDS)
    after = before if on_cuda else _of_what_came(ranks, group)
    copied, added = (min(both) for both in zip(before, after, strict=True))  # others may compute for a while
    return Link(tuple(replace(w, sum_byte_us=added) if w.kind == "reduce_scatter" else w for w in wires), copied)


def _of_what_came(ranks: int, group: str) -> tuple[float, float]:
    """Microseconds for each byte that a copy of what was gathered reads and writes, and for each that was sent to add
    up what was exchanged. Other threads received it, and then the rank computed: it is in no cache of this processor's.
    """
    kept, wait = Buffers(), funcol.wait_tensor.default
    whole = torch.full((max(_LEAST // 4 // ranks, 2) * ranks,), 0.5, dtype=torch.float32)
    part, other = whole[: len(whole) // ranks], torch.full((512, 512), 0.5, dtype=torch.float32)
    outlines, copies, sums = [(1,), (len(part) - 1,)], list[float](), list[float]()
    for _ in range(_OF_WHAT_CAME):
        came = wait(kept.gather(part, ranks, group))
        torch.mm(other, other)
        copies.append(_seconds(lambda came=came: kept.part_of_gather(came, outlines, 1, ranks), "cpu"))
        came = wait(kept.swap(whole, ranks, group))
        torch.mm(other, other)
        sums.append(_seconds(lambda came=came: kept.add_parts(came, ranks, "avg"), "cpu"))
    sent = sent_bytes("reduce_scatter", whole.nbytes, ranks)
    return statistics.median(copies) * 1e6 / (2 * whole.nbytes), statistics.median(sums) * 1e6 / sent


def _wire(kind: str, most: int, often: tuple[int, int], ranks: int, group: str, device: str, share: float) -> Wire:
    """From few bytes and many. What processors do for few varies tenfold: their time for many is what is kept to, and
    bytes are at least half of that; of the time that few take, starting is.
    """
    few, many = (sent_bytes(kind, size, ranks) for size in (_FEW, most))
    short = _timed(_runner(kind, _FEW, ranks, group, device), device, (1, 24), share)
    long = _timed(_runner(kind, most, ranks, group, device), device, often, share)
    each = max(long.us - long.own_us - short.us + short.own_us, 1e-6) / (many - few)
    own = max(long.own_us - short.own_us, 0.0) / (many - few)
    busy = max(long.busy_us - short.busy_us, long.busy_us / 2, 1e-6) / (many - few)
    start = max(short.us - short.own_us - each * few, short.us / 2, 1.0)
    return Wire(kind, start, each, max(long.busy_us - busy * many, 0.0), busy, short.own_us, own)


def crowded(world: World) -> float:
    """The share of a processor's time for communication that ranks of this machine lack for computing: 1 where every
    processor computes, 0 where each rank has one to spare.
    """
    if world.device.startswith("cuda"):
        return 0.0
    mine = torch.tensor([crc32(socket.gethostname().encode())])
    names = [torch.empty_like(mine) for _ in range(world.mesh.size)]
    dist.all_gather(names, mine)
    ranks = sum(bool(name == mine) for name in names)
    spare = len(os.sched_getaffinity(0)) / ranks - torch.get_num_threads()
    return min(max(1.0 - spare, 0.0), 1.0)


def _runner(kind: str, size: int, ranks: int, group: str, device: str) -> Run:
    """One collective of `size` bytes in the whole, as a step calls it."""
    length = max(size // 4 // ranks, 1) * ranks
    whole = torch.zeros(length, dtype=torch.float32, device=device)
    part = whole[: length // ranks]
    wait, kept = funcol.wait_tensor.default, Buffers()

    def scatter() -> object:
        if device.startswith("cuda"):
            return wait(funcol.reduce_scatter_tensor.default(whole, "avg", ranks, group))
        return wait(kept.swap(whole, ranks, group))

    return {
        "all_reduce": lambda: wait(funcol.all_reduce_.default(whole, "sum", group)),
        "all_gather": lambda: wait(kept.gather(part, ranks, group)),
        "reduce_scatter": scatter,
    }[kind]


def _timed(run: Run, device: str, often: tuple[int, int], share: float) -> Timed:
    """Of each of a row of runs, `often` being how many and how many rows: the best row, and what processors did in all.

    Of other threads the `share` that computing lacks counts; on a GPU nothing does.
    """
    times, rows = often
    run()
    process, own = time.process_time(), time.thread_time()
    us = min(_seconds(run, device, times) for _ in range(rows)) * 1e6
    process, own = time.process_time() - process, time.thread_time() - own
    if device.startswith("cuda"):
        return Timed(us / times, 0.0, 0.0)
    each = 1e6 / (times * rows)
    return Timed(us / times, own * each, share * (process - own) * each)


def _seconds(run: Run, device: str, times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
