"""A run that is ended and resumed computes the same bits as one that was not, whatever its scheduler moves."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

import wholestep as ws
from tests.steps import clipped as train_step

CALLS = 20


class ByHand(LRScheduler):
    """Moves betas too, of which nothing in the groups tells."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9 - 0.01 * self.last_epoch, 0.999)
        return [group["lr"] * 0.99 for group in self.optimizer.param_groups]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "AdamW groups": lambda params: AdamW(
        [{"params": (params := list(params))[:1], "weight_decay": 0.0}, {"params": params[1:]}], lr=0.01
    ),
}
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=CALLS + 1),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "ByHand": ByHand,
}


class Run:
    """A model with an optimizer, a scheduler and a step of its own."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.step = ws.compile(train_step)

    def train(self, first: int, last: int) -> list[float]:
        losses: list[float] = []
        for call in range(first, last):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(call))
            losses.append(float(self.step(self.model, self.optimizer, x)))
            self.scheduler.step()
        return losses

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({k: getattr(self, k).state_dict() for k in ("model", "optimizer", "scheduler")})

    def load(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            getattr(self, name).load_state_dict(state)


@pytest.mark.smoke
@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("after", [1, 7])
def test_from_state_dicts(optimizer: str, scheduler: str, after: int) -> None:
    straight, killed, resumed = (Run(optimizer, scheduler) for _ in range(3))
    expected = straight.train(0, CALLS)
    before = killed.train(0, after)
    resumed.load(killed.state_dict())
    assert before + resumed.train(after, CALLS) == expected
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True))
    assert len(set(expected)) == CALLS


@pytest.mark.crossed
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("called", [False, True])
def test_from_a_checkpoint(scheduler: str, called: bool, tmp_path: Path) -> None:
    straight, killed, resumed = (Run("AdamW", scheduler) for _ in range(3))
    expected = straight.train(0, CALLS)
    before = killed.train(0, 7)
    ws.save(tmp_path, killed.step, extra={"scheduler": killed.scheduler.state_dict()})
    if called:
        resumed.train(0, 1)
    found = ws.load(tmp_path, resumed.step)
    resumed.scheduler.load_state_dict(found.extra["scheduler"])
    assert before + resumed.train(7, CALLS) == expected


def test_from_a_checkpoint_of_a_model_and_an_optimizer(tmp_path: Path) -> None:
    straight, killed, resumed = (Run("AdamW", "ByHand") for _ in range(3))
    expected = straight.train(0, CALLS)
    before = killed.train(0, 7)
    given = {"model": killed.model, "optimizer": killed.optimizer, "number": 7}
    ws.save(tmp_path, **given, extra={"scheduler": killed.scheduler.state_dict()})
    found = ws.load(tmp_path, model=resumed.model, optimizer=resumed.optimizer)
    resumed.scheduler.load_state_dict(found.extra["scheduler"])
    assert before + resumed.train(7, CALLS) == expected
