"""What holds for every plan and price, whatever the hardware, the ranks and the sizes: prices of collectives among each
other, what a style may hold whole, and what a plan says that a device has.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.graph import meta
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import collective_kind
from wholestep.hardware.hardware import Hardware

SIZES = [1 << n for n in range(0, 37, 2)]
RANKS = [2**n for n in range(1, 13)]
LINKS = ("infiniband-100", "ethernet-10", "efa-400", "infiniband-400:rail/2", "infiniband-400:fat-tree/4")
HARDWARE = [*ws.Hardware.presets(), *(f"dgx-h100+{link}" for link in LINKS)]


def groups(hardware: Hardware) -> list[tuple[int, int | None]]:
    """Numbers of ranks, and how many of them are on a node: contiguous, and one of each node."""
    return [
        (ranks, per_node) for ranks in RANKS for per_node in (None, 1) if per_node is None or hardware.ranks_per_node
    ]


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
            grows = all(a <= b * (1 + 1e-9) for a, b in zip(times, times[1:], strict=False))
            assert grows, (kind, size, dict(zip(ranks, times, strict=True)))


def linears(layers: int, width: int) -> ws.TrainGraph:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        x = torch.empty(4096, width)
    precision = ws.MixedPrecision(torch.bfloat16, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return ws.capture(step, model, optimizer, x, options=ws.CaptureOptions(mixed_precision=precision))


@pytest.fixture(scope="module")
def small() -> ws.TrainGraph:
    return linears(3, 512)


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
