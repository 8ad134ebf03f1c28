"""On two ranks a step sees the parameters that the user made, also after they are spread over the ranks."""

from typing import Any

import pytest
import torch

import wholestep as ws

from ..identities import RULES, AllRules
from .launch import run_ranks


def batch(rank: int, call: int) -> torch.Tensor:
    rows = 4 if call < 3 else 2  # another size is another capture
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * call + rank), dtype=torch.float64)


class InSteps(AllRules):
    def between(self, call: int) -> None: ...


def train(rank: int, world: int, style: str) -> Any:
    spread, alone = InSteps(), InSteps()
    step = ws.compile(spread.step, parallel=ws.DataParallel(style), schedule=None, progress=None)
    for call in range(5):
        found = step(batch(rank, call))
        losses = [alone_loss(alone, batch(one, call)) for one in range(world)]
        update(alone, [batch(one, call) for one in range(world)])
        torch.testing.assert_close(found, losses[rank], rtol=1e-9, atol=1e-12)
    assert spread.noted == [alone.answers(False)] * 5
    with ws.whole(spread.model, writeback=False):
        for one, other in zip(spread.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-9, atol=1e-12)
    return len(step.programs)


def alone_loss(alone: AllRules, x: torch.Tensor) -> torch.Tensor:
    return alone.forward(x).square().mean().detach()


def update(alone: AllRules, batches: list[torch.Tensor]) -> None:
    """The step of one device, with the mean of the gradients of all batches."""
    alone.optimizer.zero_grad()
    answers = alone.answers(False)
    sum(alone.forward(x).square().mean() / len(batches) for x in batches).backward()
    for number, param in enumerate(alone.model.parameters()):
        param.grad.mul_(sum(row[number] for row in answers.values()) / len(RULES))
    alone.optimizer.step()


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_step_sees_its_own_parameters(style: str) -> None:
    assert max(run_ranks(train, 2, style)) >= 2
