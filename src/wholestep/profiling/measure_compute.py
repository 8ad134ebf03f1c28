"""How fast this job computes and communicates, measured in a fraction of a second; the same figures on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from itertools import chain, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..distributed.launch import World
from ..hardware.curves import CollectiveCost
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .measure_link import measure_link

_ROUNDS = TUNING.compute_rounds


def measure_hardware(world: World) -> Hardware:
    """The hardware, as the slowest rank and the slowest axis measure it."""
    before = _together(world)
    links = [measure_link(world, axis.name) for axis in world.mesh.axes if axis.size > 1 and world.devices is not None]
    rounds = torch.cat([before, _together(world)], 1)  # others may compute during half of them
    times = [float(usual) for usual in rounds.median(1).values]  # a step pays what is usual, not what is best
    wires = max((link.wires for link in links), key=lambda wires: wires[0].byte_us, default=())
    times.append(max((link.carried_byte_us for link in links), default=0.0))
    if world.mesh.size > 1:
        figures = [astuple(wire)[1:] for wire in wires]
        slowest = torch.tensor([*times, *chain(*figures)], dtype=torch.float64).to(world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found = [float(v) for v in slowest]
        times, rest = found[: len(times)], iter(found[len(times) :])
        wires = tuple(
            CollectiveCost(wire.kind, *islice(rest, len(its))) for wire, its in zip(wires, figures, strict=True)
        )
    product, attention, math, moved, launch, view, carried = times
    return Hardware.measured(
        flops_per_us=1 / product, memory_bytes_per_us=1 / moved, launch_us=launch,
        link_us=wires[0].start_us if wires else 0.0, link_bytes_per_us=1 / wires[0].byte_us if wires else 1.0,
        math_bytes_per_us=1 / math, attention_flops_per_us=1 / attention,
        view_us=0.0 if world.device.startswith("cuda") else view,
        bucket_copy_bytes_per_us=1 / carried if carried else 0.0, collectives=wires,
    )  # fmt: skip


def _together(world: World) -> Tensor:
    """What `_computing` finds while all ranks compute, as they do in a step: a row of each probe, of rounds."""
    if world.mesh.size > 1:
        dist.barrier()
    devices = [torch.device(world.device)] if world.device.startswith("cuda") else []
    with torch.random.fork_rng(devices):  # the user's random numbers go on as if nothing had been measured
        return torch.tensor(list(_computing(world.device).values()), dtype=torch.float64)[:, 1:]


@dataclass(frozen=True)
class _Probe:
    """Something to time, and how much it does: of operations, bytes or calls."""

    run: Callable[[], object]
    does: float


def _probes(device: str) -> Mapping[str, _Probe]:
    """What steps are made of, in sizes that a step has, of memory of their own."""
    rows, inner, columns = (4096, 4096, 4096) if device.startswith("cuda") else (512, 384, 768)
    heads, length, width = 4, 128, 64
    fill = torch.rand

    one, other = fill(rows, inner, device=device), fill(inner, columns, device=device)
    q, k, v = (fill(4, heads, length, width, device=device, requires_grad=True) for _ in range(3))
    wide, made, left, right, total = (fill(rows, 1024, device=device) for _ in range(5))
    little, sums = fill(8, device=device), fill(1024, device=device)

    def attention() -> object:
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), out)

    def math() -> None:
        torch.exp(wide, out=made)
        torch.softmax(wide, -1, out=made)
        torch.sum(wide, 0, out=sums)
        torch.ops.aten.gelu.out(wide, out=made)

    def launches() -> object:
        return little + 1.0, little * 2.0, little - 1.0, little.neg()

    def views() -> object:
        return little.view(2, 4), little.unsqueeze(0), little.expand(2, 8), little.detach()

    return {
        "product": _Probe(lambda: torch.mm(one, other), 2.0 * rows * inner * columns),
        "attention": _Probe(attention, 3.5 * 16.0 * heads * length * length * width),
        "math": _Probe(math, 7.0 * wide.nbytes),
        "bytes": _Probe(lambda: torch.add(left, right, out=total), 3.0 * left.nbytes),
        "launch": _Probe(launches, 4.0),
        "view": _Probe(views, 4.0),
    }


def _computing(device: str) -> dict[str, list[float]]:
    """Microseconds for an operation, a byte or a call of each probe, in each of a few rounds.

    They take turns, so that each finds caches as in a step: full of what others left.
    """
    probes = _probes(device)
    times: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(_ROUNDS):
        for name, probe in probes.items():
            times[name].append(_timed(probe.run, device) / probe.does)
    return times


def _timed(run: Callable[[], object], device: str) -> float:
    """Microseconds of one run."""
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6
