"""What collectives of a job take: time on the link, and time of the processors that compute."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist

from ..backend.bind import add_parts, gather, swap
from ..cost.machine import Wire, sent_bytes
from .launch import World

_FEW, _LEAST, _MOST = 4 << 10, 1 << 20, 4 << 20
_SLOW_US = 4_000.0  # an all-reduce of `_LEAST` bytes that takes longer is of a link that takes its time
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
funcol = torch.ops._c10d_functional
Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one collective: until its result is there, and of processors, on threads beside the caller's."""

    us: float
    busy_us: float


def measure_link(world: World, axis: str) -> tuple[Wire, ...]:
    """What each kind of collective takes along `axis`.

    Each is timed with few bytes and with many: their difference is the rate. Several follow each other without a
    pause, so that no rank counts a time in which it came late to what others had sent before. Many are 4 MiB, or as
    much less as a slow link sends in a bucket.
    """
    group, ranks = world.groups[axis], world.mesh.axis_size(axis)
    trial = _runner("all_reduce", _LEAST, ranks, group, world.device)
    trial()
    us = torch.tensor([_seconds(trial, world.device) * 1e6]).to(world.device)
    dist.all_reduce(us, dist.ReduceOp.MAX)  # ranks run the same collectives as often
    slow = float(us) > _SLOW_US
    sizes, often = (_FEW, _LEAST if slow else _MOST), (2, 1) if slow else (3, 4)
    return tuple(_wire(kind, sizes, often, ranks, group, world.device) for kind in KINDS)


def _wire(
    kind: str, sizes: tuple[int, int], often: tuple[int, int], ranks: int, group: str, device: str
) -> Wire:  # fmt: skip
    few, many = (sent_bytes(kind, size, ranks) for size in sizes)
    short = _timed(_runner(kind, sizes[0], ranks, group, device), device, 6, 8)
    long = _timed(_runner(kind, sizes[1], ranks, group, device), device, *often)
    each, busy = (max(b - a, 1e-6) / (many - few) for a, b in ((short.us, long.us), (short.busy_us, long.busy_us)))
    return Wire(kind, max(short.us - each * few, 1.0), each, max(short.busy_us - busy * few, 0.0), busy)


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
    whole = torch.full((length,), 0.5, dtype=torch.float32, device=device)
    part = whole[: length // ranks]
    wait = funcol.wait_tensor.default

    def scatter() -> object:
        if device.startswith("cuda"):
            return wait(funcol.reduce_scatter_tensor.default(whole, "avg", ranks, group))
        return add_parts(wait(swap(whole, ranks, group)), ranks, "avg")

    return {
        "all_reduce": lambda: wait(funcol.all_reduce_.default(whole, "avg", group)),
        "all_gather": lambda: wait(gather(part, ranks, group)),
        "reduce_scatter": scatter,
    }[kind]


def _timed(run: Run, device: str, times: int, rows: int) -> Timed:
    """Of each of `times` runs in a row, the best of some rows; a run before them does not count."""
    found: list[Timed] = []
    run()
    for _ in range(rows):
        busy = time.process_time() - time.thread_time()
        us = _seconds(run, device, times) * 1e6
        busy = (time.process_time() - time.thread_time() - busy) * 1e6
        found.append(Timed(us / times, busy / times))
    return Timed(min(one.us for one in found), min(one.busy_us for one in found))


def _seconds(run: Run, device: str, times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start
