"""Rounding at random on gloo: the bits do not depend on where tensors are stored, on the schedule, or on a restart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import mean_square

OTHERS = "replicate", "zero1"
ROUNDED = ws.MixedPrecision(stochastic_rounding=True)


def trained(rank: int, ranks: int, style: Any, schedule: Any, folder: str) -> list[Tensor]:
    """Parameters after four steps; with a folder, the last two are those of a job that was started again."""
    parts = [(0, 2), (2, 4)] if folder else [(0, 4)]
    for first, last in parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 25), nn.GELU(), nn.Linear(25, 7)).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = ws.compile(mean_square, parallel=ws.DataParallel(style), mixed_precision=ROUNDED, schedule=schedule)
        if first:
            ws.load(folder, step)
        for number in range(first, last):
            seed = torch.Generator().manual_seed(10 * number + rank)
            step(model, optimizer, torch.randn(4, 12, generator=seed).bfloat16())
        if folder and not first:
            ws.save(folder, step)
    with ws.whole(model):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("style", ["fully_shard", *(pytest.param(s, marks=pytest.mark.full) for s in OTHERS)])
def test_the_same_bits_in_every_style(style: str, tmp_path: Path) -> None:
    """Two ranks, whose sums have one order. 25 and 7 rows do not divide by 2."""
    plain = run_ranks(trained, 2, "replicate", None, "")
    again = run_ranks(trained, 2, style, "auto", str(tmp_path / "saved"))
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
