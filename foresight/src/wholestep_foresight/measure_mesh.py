"""Measures the job it runs in for `calibration`: collectives by size, products by shape and dtype, copies."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from wholestep.backend.gloo.exchange import add_parts, exchanges, funcol, gather, swap
from wholestep.errors import MeshError
from wholestep.profiling.measure_hardware import seconds

from .calibration import Measurements, TimedCollective, TimedProduct, TimeSample

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
wait = torch.ops._c10d_functional.wait_tensor.default
_KIB = 1 << 10
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CalibrationSizes:
    """What is measured: bytes of collectives, sides of products, dtypes, bytes of copies; the fastest of `times`."""

    collectives: tuple[int, ...]
    products: tuple[tuple[int, int, int, int], ...]
    dtypes: tuple[str, ...]
    copies: tuple[int, ...]
    times: int = 5


@dataclass(frozen=True)
class _Unit:
    """The group that measures one level of links: this rank's group, and its units (see `hardware.curves`)."""

    name: str
    ranks: int
    units: tuple[int, ...]
    group: dist.ProcessGroup | None


def calibration_sizes(device: str, largest_bytes: int) -> CalibrationSizes:
    """What fits a device: a GPU gets larger products, and half precision."""
    on_gpu = device.startswith("cuda")
    smaller = takewhile(lambda size: size < largest_bytes, (4 * _KIB << doubled for doubled in count()))
    sides = (1024, 2048, 4096, 8192) if on_gpu else (128, 256, 512)
    least, most = sides[0], sides[-1]
    products = [(1, s, s, s) for s in sides] + [(1, most, least, s) for s in sides] + [(4, least, least, least)]
    copies = tuple(n << 20 for n in ((1, 16, 256) if on_gpu else (1, 4, 16)))
    dtypes = ("float32", "bfloat16", "float16") if on_gpu else ("float32", "bfloat16")
    return CalibrationSizes((*smaller, largest_bytes), tuple(products), dtypes, copies)


def count_measurements(sizes: CalibrationSizes) -> int:
    """How many times `measure_mesh` will call `step`."""
    return len(_levels()) * len(KINDS) * len(sizes.collectives) + len(sizes.dtypes) * len(sizes.products) + 1


def measure_mesh(device: str, sizes: CalibrationSizes, step: Callable[[str], None]) -> Measurements:
    """Measure on all ranks of the process group there is, or alone; the slowest rank counts. `step` is told of each."""
    levels = _levels()
    units = list(_units(levels))
    sent: list[TimedCollective] = []
    for number, unit in enumerate(units):
        for kind in KINDS:
            for size in sizes.collectives:
                step(f"{unit.name} {kind}")
                run, largest = _collective(kind, size, unit, device)
                sent.append(
                    TimedCollective(kind, number, TimeSample(largest, unit.units, _slowest(run, device, sizes.times)))
                )
    products: list[TimedProduct] = []
    for dtype in sizes.dtypes:
        for shape in sizes.products:
            step(f"products in {dtype}")
            products.append(TimedProduct(dtype, *shape, _slowest(_product(dtype, shape, device), device, sizes.times)))
    step("copies")
    moved, launch = _copies(device, sizes)
    return Measurements(
        _name(device), _memory(device), launch, moved, tuple(products),
        tuple((unit.name, unit.ranks) for unit in units), tuple(sent), dist.get_backend() if units else "",
    )  # fmt: skip


def _levels() -> list[tuple[str, int]]:
    """Levels of links in this job, inner to outer, with the ranks of a unit; none alone."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return []
    size, node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if size % node:
        raise MeshError(f"{size} ranks do not stand on nodes of {node}", "as many ranks on each node")
    if node == size:
        return [("node", 0)]
    return [("node", node), ("nodes", 0)] if node > 1 else [("nodes", 0)]


def _units(levels: list[tuple[str, int]]) -> Iterator[_Unit]:
    for number, (name, ranks) in enumerate(levels):
        size = dist.get_world_size()
        if number + 1 < len(levels):
            starts = range(0, size, ranks)
            groups = [dist.new_group(list(range(first, first + ranks))) for first in starts]  # all ranks make all
            yield _Unit(name, ranks, (ranks, 1), cast(dist.ProcessGroup, groups[dist.get_rank() // ranks]))
        else:
            inner = (size // levels[0][1],) if number else ()
            yield _Unit(name, ranks, (size, *inner, 1), None)


def _collective(kind: str, size_bytes: int, unit: _Unit, device: str) -> tuple[Callable[[], object], int]:
    """One run of it, and the bytes of the largest buffer that a rank holds for it."""
    parts = unit.units[0]
    each = max(size_bytes // 4 // parts, 1)
    full, piece = (torch.ones(n, device=device) for n in (each * parts, each))
    group, rows = (unit.group or dist.group.WORLD), [each] * parts
    assert group is not None, "a unit is measured by ranks of a group"
    name = group.group_name
    runs: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: gather(piece, parts, name),
        "reduce_scatter": lambda: funcol.reduce_scatter_tensor.default(full, "sum", parts, name),
        "all_reduce": lambda: funcol.all_reduce.default(full, "sum", name),
        "all_to_all": lambda: funcol.all_to_all_single.default(full, rows, rows, name),
        "broadcast": lambda: funcol.broadcast.default(full, 0, name),
    }
    if kind == "reduce_scatter" and exchanges(device):  # as a step runs it there
        return lambda: add_parts(wait(swap(full, parts, name)), parts, "sum"), full.nbytes
    return lambda: wait(runs[kind]()), full.nbytes


def _product(dtype: str, shape: tuple[int, int, int, int], device: str) -> Callable[[], object]:
    b, m, n, k = shape
    left = torch.ones(b, m, k, dtype=_DTYPES[dtype], device=device)
    right = torch.ones(b, k, n, dtype=_DTYPES[dtype], device=device)
    # the kernel that a single product gets is not always that of a batch of one
    return (lambda: torch.mm(left[0], right[0])) if b == 1 else (lambda: torch.bmm(left, right))


def _copies(device: str, sizes: CalibrationSizes) -> tuple[tuple[tuple[int, float], ...], float]:
    """Ops on elements by bytes moved, and an op on next to nothing."""

    def add(x: Tensor) -> Callable[[], object]:
        out = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=out)

    moved = [(2 * n, _slowest(add(torch.ones(n // 4, device=device)), device, sizes.times)) for n in sizes.copies]
    return tuple(moved), _slowest(add(torch.ones(8, device=device)), device, 4 * sizes.times)


def _slowest(run: Callable[[], object], device: str, times: int) -> float:
    """Microseconds: the fastest of some runs after two that do not count, on the slowest rank."""

    def once() -> float:
        if dist.is_initialized():
            dist.barrier()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return seconds(run, device) * 1e6

    fastest = min([once() for _ in range(times + 2)][2:])
    slowest = torch.tensor([fastest], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(float(slowest), 0.1)


def _memory(device: str) -> int:
    """Bytes of the device, for each rank of this node."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU ({platform.machine()})"
