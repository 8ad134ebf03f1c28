"""A backend from outside the package on two ranks: the bits of `backend="eager"`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.backends import Interpreted, Plain, Splitting
from tests.dist.launch import run_ranks


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _trained(rank: int, backend: Any, style: str, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=False)
    step = ws.compile(train, parallel=ws.DataParallel(style), backend=backend, **options)  # type: ignore[arg-type]
    torch.manual_seed(10 + rank)
    losses = [step(model, optimizer, torch.randn(4, 6)) for _ in range(4)]
    step.flush()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*losses, *(p.detach() for p in whole)]


def _equal(rank: int, world: int, style: str) -> dict[str, bool]:
    small = ws.Schedule(bucket_bytes=200, first_bucket_bytes=100)
    across = ws.Schedule(bucket_bytes=200, first_bucket_bytes=100, across_steps=True)
    expected = _trained(rank, "eager", style, schedule=small)
    made = {
        "interpreted": _trained(rank, Interpreted(), style, schedule=small),
        "plain": _trained(rank, Plain(), style, schedule=small),
        "splitting": _trained(rank, Splitting(), style, schedule=across),
    }
    expected_across = _trained(rank, "eager", style, schedule=across)
    return {
        name: all(
            torch.equal(a, b) for a, b in zip(found, expected_across if name == "splitting" else expected, strict=True)
        )
        for name, found in made.items()
    }


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.full), "fully_shard"])
def test_a_backend_from_outside_computes_what_eager_does(style: str) -> None:
    for found in run_ranks(_equal, 2, style):
        assert found == {"interpreted": True, "plain": True, "splitting": True}
