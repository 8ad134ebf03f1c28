"""How fast this job computes and communicates, measured in a fraction of a second; the same figures on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..cost.machine import Machine
from .launch import World

_SIDE, _ELEMENTS, _SMALL = 384, 1 << 20, 8
_OFTEN = 12  # for what takes little time itself


def measure(world: World) -> Machine:
    """The Machine that the slowest rank and the slowest axis make.

    An all-reduce is timed with 32 bytes and with 4 MiB: their difference is the link's rate.
    """
    made = torch.full((_SIDE, _SIDE), 0.5, dtype=torch.float32, device=world.device)
    flat = torch.full((_ELEMENTS,), 0.5, dtype=torch.float32, device=world.device)
    little = torch.full((_SMALL,), 0.5, dtype=torch.float32, device=world.device)
    times = [
        _best(lambda: torch.mm(made, made), world.device, _OFTEN),
        _best(lambda: torch.add(flat, 1.0), world.device, _OFTEN),
        _best(lambda: torch.add(little, 1.0), world.device, _OFTEN),
    ]
    sent, start, long = 1.0, 0.0, 1.0
    for axis in world.mesh.axes:
        if axis.size > 1 and world.devices is not None:
            group = world.groups[axis.name]
            small = _best(_reduce(little, group), world.device, _OFTEN)
            large = _best(_reduce(flat, group), world.device)
            if large >= long:
                sent, start, long = 2.0 * flat.nbytes * (axis.size - 1) / axis.size, small, large
    found = torch.tensor([*times, start, long], dtype=torch.float64).to(world.device)
    if world.mesh.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
        arrived = torch.tensor([sent], dtype=torch.float64).to(world.device)
        dist.all_reduce(arrived, dist.ReduceOp.MIN)
        sent = float(arrived)
    product, moved, launch, start, long = (float(v) for v in found)
    return Machine(
        flops_per_us=2.0 * _SIDE**3 / product, memory_bytes_per_us=2.0 * flat.nbytes / moved, launch_us=launch,
        link_us=start, link_bytes_per_us=sent / max(long - start, 1.0),
    )  # fmt: skip


def _reduce(x: torch.Tensor, group: str) -> Callable[[], object]:
    funcol = torch.ops._c10d_functional
    return lambda: funcol.wait_tensor.default(funcol.all_reduce_.default(x, "avg", group))


def _best(run: Callable[[], object], device: str, times: int = 3) -> float:
    """Microseconds of the fastest of a few runs, after one that does not count."""
    on_gpu = device.startswith("cuda")
    best = float("inf")
    for number in range(times + 1):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) * 1e6) if number else best
    return best
