"""Collectives that carry several tensors without copies, on gloo: bit for bit what each would be by itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import clipped
from wholestep.backend.start_coalesced import gather_coalesced, scatter_coalesced
from wholestep.passes.coalesced import (
    ALIGNED_BYTES,
    coalesce,
    part_of_coalesced_gather,
    part_of_coalesced_scatter,
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_tensor_is_what_it_would_be_alone(ranks: int) -> None:
    run_ranks(each_alone, ranks)


def trained(rank: int, ranks: int, schedule: ws.Schedule | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(37, 37) for _ in range(4)]).double()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = ws.compile(clipped, parallel=ws.DataParallel("fully_shard"), schedule=schedule)
    for number in range(3):
        x = torch.randn(4, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))
        step(model, optimizer, x)
    if schedule is not None:
        assert any(node.target is coalesce for node in step.local_graph.graph.nodes)
    return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_cpus_they_run_as_buckets(ranks: int) -> None:
    """A program for a data sheet of GPUs, on gloo: 37 rows do not divide by 2 or 3."""
    schedule = ws.Schedule(ws.Hardware.preset("dgx-h100"))
    for ours, plain in zip(run_ranks(trained, ranks, schedule), run_ranks(trained, ranks, None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
