"""What collectives of a job take: time on the link, and time of the processors that compute."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from zlib import crc32

import torch
import torch.distributed as dist

from ..backend.bind import add_parts, gather, swap
from ..cost.machine import Toll, sent_bytes
from .launch import World

_LITTLE, _MUCH = 64 << 10, 4 << 20
_FEW_US = 8_000.0  # what takes longer is run but twice
_OFTEN = 12
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
funcol = torch.ops._c10d_functional
Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one collective: until its result is there, and of processors, on threads beside the caller's."""

    us: float
    busy_us: float


@dataclass(frozen=True)
class Link:
    """Microseconds of a collective of a few bytes, and of each byte that a rank sends; what each kind takes of computing."""

    start_us: float
    byte_us: float
    tolls: tuple[Toll, ...]


def measure_link(world: World, axis: str) -> Link:
    """That along `axis`. An all-reduce is timed with 32 bytes and with 4 MiB: their difference is the link's rate."""
    group, ranks = world.groups[axis], world.mesh.axis_size(axis)
    start = _timed(_runner("all_reduce", 32, ranks, group, world.device), world.device, _OFTEN)
    tolls: list[Toll] = []
    byte_us = 0.0
    for kind in KINDS:
        little, much = (
            _timed(_runner(kind, size, ranks, group, world.device), world.device) for size in (_LITTLE, _MUCH)
        )
        sent = sent_bytes(kind, _MUCH, ranks)
        if kind == "all_reduce":
            byte_us = max(much.us - start.us, 1.0) / sent
        each = max(much.busy_us - little.busy_us, 0.0) / (sent - sent_bytes(kind, _LITTLE, ranks))
        tolls.append(Toll(kind, max(little.busy_us - each * sent_bytes(kind, _LITTLE, ranks), 0.0), each))
    return Link(start.us, byte_us, tuple(tolls))


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


def _timed(run: Run, device: str, times: int = 4) -> Timed:
    """The fastest of a few runs, and the median of what processors did; the first does not count."""
    found: list[Timed] = []
    for _ in range(1 + times):
        start, busy = time.perf_counter(), time.process_time() - time.thread_time()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        us = (time.perf_counter() - start) * 1e6
        found.append(Timed(us, (time.process_time() - time.thread_time() - busy) * 1e6))
        if len(found) > 2 and us > _FEW_US:
            break
    counted: Sequence[Timed] = found[1:]
    return Timed(min(one.us for one in counted), median(one.busy_us for one in counted))
