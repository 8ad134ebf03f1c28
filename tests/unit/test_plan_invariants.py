"""What holds for every plan and price, whatever the hardware, the ranks and the sizes: prices of collectives among each
other, what a style may hold whole, and what a plan says that a device has.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from math import prod

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.graph import meta
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import collective_kind
from wholestep.hardware.hardware import Hardware
from wholestep.passes.recompute_layers import RecomputeLayers

SIZES = [1 << n for n in range(0, 37, 2)]
RANKS = [2**n for n in range(1, 13)]
LINKS = ("infiniband-100", "ethernet-10", "efa-400", "infiniband-400:rail/2", "infiniband-400:fat-tree/4")
HARDWARE = [*ws.Hardware.presets(), *(f"dgx-h100+{link}" for link in LINKS)]


def groups(hardware: Hardware) -> list[tuple[int, int | None]]:
    """Numbers of ranks, and how many of them are on a node: contiguous, and one of each node."""
    on_a_node = (None, 1) if hardware.ranks_per_node else (None,)
    return [(ranks, per_node) for ranks in RANKS for per_node in on_a_node]


@pytest.mark.parametrize("name", HARDWARE)
def test_a_collective_takes_at_most_what_contains_it(name: str) -> None:
    hardware = ws.Hardware.preset(name)
    for ranks, per_node in groups(hardware):
        shorter = dict[str, float]()
        for size in SIZES:
            us = {
                kind: hardware.group_us(kind, size, ranks, per_node)
                for kind in ("all_gather", "reduce_scatter", "all_reduce")
            }
            gather, scatter, reduce = us.values()
            assert max(gather, scatter) <= reduce <= (gather + scatter) * (1 + 1e-9), (ranks, per_node, size, us)
            assert all(us[kind] >= before for kind, before in shorter.items()), (ranks, per_node, size)
            shorter = us


@pytest.mark.parametrize("name", HARDWARE)
def test_more_ranks_take_at_least_as_long(name: str) -> None:
    """By doublings. But for two facts of the machines: on boards whose GPUs are joined pair by pair, more of them have
    more links, and a switch that adds moves (n+1)/n of a buffer for n ranks (measured on four and eight H200), which
    bounds gathers too.
    """
    hardware = ws.Hardware.preset(name)
    inner = hardware.levels[0]
    adds = max((inner.ranks for curve in inner.curves if curve.algorithm == "nvls"), default=0)
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"):
        least = inner.ranks if inner.direct else adds if kind not in ("all_to_all", "broadcast") else 0
        ranks = [n for n in RANKS if n >= least] or RANKS
        for size in SIZES:
            times = [hardware.group_us(kind, size, n) for n in ranks]
            grows = all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
            assert grows, (kind, size, dict(zip(ranks, times, strict=True)))


def captured(make: Callable[[], nn.Module], width: int) -> ws.TrainGraph:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch.device("meta"):
        model, x = make(), torch.empty(4096, width)
    precision = ws.MixedPrecision(torch.bfloat16, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return ws.capture(step, model, optimizer, x, options=ws.CaptureOptions(mixed_precision=precision))


@pytest.fixture(scope="module")
def small() -> ws.TrainGraph:
    return captured(lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]), 512)


@pytest.mark.parametrize("style", ["fully_shard", "zero1", "hybrid"])
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "b200-nvl72", "dgx-h100+ethernet-100", "loopback"])
def test_what_rests_in_shards_is_never_summed_whole(small: ws.TrainGraph, name: str, style: str) -> None:
    hardware = ws.Hardware.preset(name)
    for ranks in (16, 256, 4096):
        mesh = f"node={ranks // 8},gpu=8" if style == "hybrid" else f"dp={ranks}"
        local = ws.partition(small, ws.plan(small, mesh, ws.DataParallel(style), hardware=hardware))
        summed = [
            meta.size_bytes(node) for node in local.graph.nodes
            if is_collective(node) and collective_kind(node.target) == "all_reduce"
        ]  # fmt: skip
        most = 512 * 512 * 4 / 8 if style == "hybrid" else 4  # pieces of a group, or the loss
        assert max(summed, default=0) <= most, (ranks, summed)


class Gated(nn.Module):
    """A layer whose norm saves a cast of what the layer before handed on, and not that itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def test_more_recomputation_holds_less_and_at_most_two_layers_are_gathered() -> None:
    layers, width = 6, 1024
    graph = captured(lambda: nn.Sequential(*[Gated(width) for _ in range(layers)]), width)
    hardware = ws.Hardware.preset("dgx-h100")
    plan = ws.plan(graph, "dp=64", ws.DataParallel("fully_shard", reshard_after_forward=True), hardware=hardware)
    local, peaks = ws.partition(graph, plan), list[int]()
    for kind in ("none", "selective", "full"):
        made = local if kind == "none" else RecomputeLayers(kind)(local)
        gathered = ws.peak_memory(made).by_kind().get("gathered", 0)
        assert gathered <= 2 * 3 * width * width * 2, (kind, gathered)
        peaks.append(ws.peak_memory(ws.run_passes(made, ws.default_passes(hardware))).size_bytes)
    assert peaks == sorted(peaks, reverse=True), peaks
    again = sum(node.name.startswith("mm") and node.name.endswith("_again") for node in made.graph.nodes)
    assert again <= 3 * layers, "a layer runs once more, from what it was handed"


@pytest.mark.parametrize("shape", [(8, 96, 256), (1, 512), (3, 5, 1024), (8, 300, 7), (7,), (256, 3)])
def test_shards_are_padded_to_at_most_twice(shape: tuple[int, ...]) -> None:
    """Where a dim has as many entries as there are ranks. A stack of experts has fewer rows."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.sum()

    graph = captured(Stack, 4)
    for ranks, style in product((2, 3, 8, 48, 64, 256), ("fully_shard", "zero1")):
        plan = ws.plan(graph, f"dp={ranks}", ws.DataParallel(style))
        stored = [given for given in plan.inputs if given.role.name == "STATE" and len(given.meta.shape) == len(shape)]
        for given in stored:
            local = plan.storage[given.name].local_shape(shape, plan.mesh, plan.mesh.coordinate(0))
            if max(shape) >= ranks:
                assert prod(local) * ranks <= 2 * prod(shape), (given.name, ranks, local)


@pytest.mark.parametrize("name", HARDWARE)
def test_more_work_takes_at_least_as_long(name: str) -> None:
    """Products in each of their sizes, attention by length, and bytes; what a GPU keeps for others than tensors."""
    hardware = ws.Hardware.preset(name)
    sizes = (1, 16, 48, 64, 100, 128, 192, 256, 384, 512, 1000, 1024, 2048, 4096, 5000, 8192, 16384)
    timed: list[list[float]] = [[hardware.bytes_us(10.0**n) for n in range(12)]]
    for dtype, (n, k) in product(("bfloat16", "float32"), ((512, 512), (4096, 4096), (128, 8192))):
        timed.append([hardware.matmul_us(1, m, n, k, dtype) for m in sizes])
        timed.append([hardware.matmul_us(1, n, m, k, dtype) for m in sizes])
        timed.append([hardware.matmul_us(1, n, k, m, dtype) for m in sizes])
    for backward in (False, True):
        timed.append([hardware.attention_us(1, 8, q, q, 128, backward=backward) for q in sizes])
    assert all(times == sorted(times) for times in timed)


@pytest.mark.parametrize(
    (
        "name",
        "torch_sees_gib",
    ),  # `torch.cuda.get_device_properties(0).total_memory`, as published with errors of memory
    [("dgx-h100", 79.1), ("dgx-a100", 79.1), ("h200", 139.7), ("l40s", 44.4)],
)
def test_what_fits_leaves_room_for_context_and_communicators(name: str, torch_sees_gib: float) -> None:
    assert (ws.Hardware.preset(name).memory_bytes or 0) + 1.2 * 2**30 <= torch_sees_gib * 2**30


@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_more_ranks_store_no_more(small: ws.TrainGraph, style: str) -> None:
    """And what is stored in shards over twice the ranks is half of it."""
    kept = [ws.plan(small, f"dp={ranks}", ws.DataParallel(style)).stored_bytes("state") for ranks in (1, 2, 4, 64, 512)]
    assert kept == sorted(kept, reverse=True)
    assert style == "replicate" or kept[0] == pytest.approx(512 * kept[-1], rel=0.01)


def test_experts_on_more_ranks_than_there_are_rest_in_shards_of_another_dim() -> None:
    """Eight experts along 64 and 512 ranks, and beside a pair of ranks of tensor parallelism."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 64, 1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.sum()

    graph = captured(Experts, 4)
    for mesh in ("dp=64", "dp=512", "node=8,gpu=64", "dp=64,tp=8"):
        plan = ws.plan(graph, mesh, ws.DataParallel("fully_shard"))
        local = plan.storage["weight"].local_shape((8, 64, 1024), plan.mesh, plan.mesh.coordinate(0))
        assert prod(local) * plan.mesh.size == 8 * 64 * 1024, (mesh, local)
