"""Collectives that carry several tensors without copies, on gloo: bit for bit what each would be by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import clipped
from wholestep.passes.bucket import in_pieces
from wholestep.passes.coalesced import (
    ALIGNED_BYTES,
    coalesce,
    gather_coalesced,
    part_of_coalesced_gather,
    part_of_coalesced_scatter,
    scatter_coalesced,
)

funcol = torch.ops._c10d_functional


def pieces_of(rank: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """Odd sizes, one element, none, odd strides and a view with an offset; the first dim divides by `ranks`."""
    torch.manual_seed(rank)
    found = [torch.randn(3 * ranks, 7), torch.randn(ranks), torch.randn(0, 5), torch.randn(5, 2 * ranks).t()]
    return [piece.to(dtype) for piece in (*found, torch.randn(4 * ranks + 1, 3)[1:])]


def each_alone(rank: int, ranks: int) -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        pieces = pieces_of(rank, ranks, dtype)
        shapes = [tuple(piece.shape) for piece in pieces]
        row = funcol.wait_tensor(gather_coalesced(coalesce(pieces), ranks, group))
        for number, piece in enumerate(pieces):
            got = part_of_coalesced_gather(row, shapes, number, ranks)
            want = funcol.wait_tensor(funcol.all_gather_into_tensor(piece.contiguous(), ranks, group))
            assert torch.equal(got, want)
            assert got.storage_offset() * got.itemsize % ALIGNED_BYTES == 0
            assert got.untyped_storage().data_ptr() == row.untyped_storage().data_ptr(), "a view"
        for op in ("sum", "max") if dtype is torch.int64 else ("sum", "avg", "max", "min"):
            row = funcol.wait_tensor(scatter_coalesced(coalesce(pieces), op, ranks, group))
            for number, piece in enumerate(pieces):
                got = part_of_coalesced_scatter(row, shapes, number, ranks)
                want = funcol.wait_tensor(funcol.reduce_scatter_tensor(piece.contiguous(), op, ranks, group))
                assert torch.equal(got, want)
                assert got.storage_offset() * got.itemsize % ALIGNED_BYTES == 0


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_each_tensor_is_what_it_would_be_alone(ranks: int) -> None:
    run_ranks(each_alone, ranks)


def trained(rank: int, ranks: int, style: Any, width: int, schedule: ws.Schedule | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).double()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = ws.compile(clipped, parallel=ws.DataParallel(style), schedule=schedule)
    for number in range(3):
        x = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))
        step(model, optimizer, x)
    if schedule is not None:
        targets = [node.target for node in step.local_graph.graph.nodes]
        assert coalesce in targets
        assert (in_pieces in targets) == (style == "zero1")
    return [whole(param).detach() for param in model.parameters()]


def whole(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("ranks", "style", "width"), [(2, "fully_shard", 37), (3, "fully_shard", 37), (2, "zero1", 36), (3, "zero1", 36)]
)
def test_on_cpus_they_run_as_buckets(ranks: int, style: str, width: int) -> None:
    """A program for a data sheet of GPUs, on gloo: 37 rows do not divide by 2 or 3."""
    schedule = ws.Schedule(ws.Hardware.preset("dgx-h100"))
    made = (run_ranks(trained, ranks, style, width, one) for one in (schedule, None))
    for ours, plain in zip(*made, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
