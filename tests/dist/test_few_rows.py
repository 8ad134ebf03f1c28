"""Stacks of matrices with fewer rows than ranks, as those of experts: shards of another dim, as DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.dist.launch import run_ranks


class _Experts(nn.Module):
    """Stacks with fewer rows than ranks, and a gate."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 6, 8) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 8, 6) * 0.3)
        self.gate = nn.Linear(6, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("bd,edh->beh", x, self.up).tanh()
        return torch.einsum("beh,ehd,be->bd", made, self.down, self.gate(x).softmax(-1))


def train_experts(rank: int, world: int, style: str, name: str, folder: str) -> None:
    """As DDP in float64 with other samples on each rank; saved from shards of dim 1, and read into rows and whole."""
    torch.set_default_dtype(torch.float64)

    def made(wrap: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = wrap(_Experts(1))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(6)]
    theirs, _, eager = made(DistributedDataParallel)
    ours, optimizer, own = made(lambda model: model)
    step = ws.compile(own, model=ours, optimizer=optimizer, parallel=ws.DataParallel(style))
    for x in batches[:4]:
        eager(x), step(x)
    ws.save(folder, step)
    ours, optimizer, own = made(lambda model: model)
    step = ws.compile(own, model=ours, optimizer=optimizer, parallel=ws.DataParallel("replicate"))
    ws.load(folder, step)
    for x in batches[4:]:
        eager(x), step(x)
    with ws.whole(ours, writeback=False):
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("style", "name"), [("fully_shard", "AdamW"), ("zero1", "Adafactor")])
def test_a_stack_with_fewer_rows_than_ranks(style: str, name: str, tmp_path: Path) -> None:
    run_ranks(train_experts, 2, style, name, str(tmp_path / "saved"))
