"""Effects of Python on several ranks, with batches of their own: as DDP has them, one program on all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import wholestep as ws

from .launch import run_ranks

CALLS = 5


class Trainer:
    """A step with a counter, a running average, a scheduler inside, a rate that it changes, and callbacks."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], kind: str) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.model = wrap(self.plain)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        make = {
            "exponential": lambda o: ExponentialLR(o, 0.7),
            "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=9),
        }
        self.scheduler = make[kind](self.optimizer) if kind in make else None
        self.steps, self.average, self.log = 0, 0.0, list[Any]()
        self.last = torch.zeros(())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y) * min(1.0, (self.steps + 1) / 3)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.last.copy_(loss.detach())
        if self.scheduler is not None:
            self.scheduler.step()
        else:
            self.optimizer.param_groups[0]["lr"] *= 0.9
        ws.callback(self.log.append, loss.detach())
        ws.callback(lambda n, rate: self.log.append((n, rate)), self.steps, self.optimizer.param_groups[0]["lr"])
        return loss.detach(), self.steps


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(CALLS)]


def train(rank: int, world: int, kind: str, style: str, schedule: Any = "auto") -> None:
    ddp = Trainer(DistributedDataParallel if dist.is_initialized() else lambda m: m, kind)
    ours = Trainer(lambda m: m, kind)
    step = ws.compile(ours.step, parallel=ws.DataParallel(style), schedule=schedule)
    for x, y in batches(rank):
        expected, count = ddp.step(x, y)
        found, number = step(x, y)
        assert (count, ddp.steps) == (number, ours.steps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.average, ddp.average, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.last, ddp.last, rtol=1e-5, atol=1e-6)
        theirs, own = (o.param_groups[0] for o in (ddp.optimizer, ours.optimizer))
        assert own["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert tuple(own["betas"]) == pytest.approx(tuple(theirs["betas"]), rel=1e-12)
        for one, other in zip(ours.log, ddp.log, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with ws.whole(ours.plain, writeback=False):
        for own, other in zip(ours.plain.parameters(), ddp.plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-4, atol=1e-5)
    assert step.captures <= 5, step.misses


@pytest.mark.crossed
@pytest.mark.parametrize(("world", "style"), [(1, "replicate"), (2, "replicate"), (2, "fully_shard"), (2, "zero1")])
@pytest.mark.parametrize("kind", ["exponential", "one cycle", "by hand"])
def test_effects_are_those_of_ddp(kind: str, style: str, world: int) -> None:
    run_ranks(train, world, kind, style)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.full), "fully_shard"])
def test_effects_while_the_end_of_a_step_is_left_to_the_next(style: str) -> None:
    run_ranks(train, 2, "exponential", style, "across_steps")


def counters_of_their_own(rank: int, world: int) -> None:
    """Ranks count samples of their own: the numbers differ, and the choices by them come at other calls."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0

    def step(x: torch.Tensor) -> Any:
        nonlocal seen
        seen += x.shape[0]
        optimizer.zero_grad()
        loss = model(x).square().mean() * (0.5 if seen > 5 else 1.0)
        loss.backward()
        optimizer.step()
        return loss.detach(), seen

    compiled = ws.compile(step)
    total = 0
    for call in range(4):
        total += 2 + rank
        loss, count = compiled(torch.full((2 + rank, 4), float(rank + call + 1)))
        assert count == total == seen
        assert torch.isfinite(loss)


def test_ranks_may_count_what_is_their_own() -> None:
    run_ranks(counters_of_their_own, 2)


class Grows(nn.Module):
    """Buffers that take another shape and another dtype in the first steps, and an attribute that does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long))
        self.size = torch.zeros(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x) * (1 + self.mean.square().sum() + self.count.sum() + self.size.sum())
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.1 * h.mean(0)
            self.count = 0.9 * self.count + 0.1 * F.one_hot(h.argmax(1), 3).sum(0)
            self.size = self.inner.weight.square().sum().sqrt() / 10
        return h


class Averaging(torch.optim.Optimizer):
    """State begins in bfloat16, and is of float32 from the first step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["mean"] = 0.5 * state["mean"].float() + p.grad
            p.sub_(state["mean"], alpha=0.01)


def other_shapes(rank: int, world: int, style: str, semantics: Any) -> None:
    found: list[Any] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Grows()
        optimizer = Averaging(model.parameters())
        wrap = not compiled and semantics == "per_rank" and world > 1
        called = DistributedDataParallel(model, broadcast_buffers=False) if wrap else model

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = F.mse_loss(called(x), y)  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            return loss.detach()

        step = ws.compile(train_step, parallel=ws.DataParallel(style, semantics=semantics)) if compiled else train_step
        if semantics == "global" and not compiled:
            parts = [batches(r) for r in range(world)]
            data = [tuple(torch.cat(t) for t in zip(*same, strict=True)) for same in zip(*parts, strict=True)]
        else:
            data = batches(rank)
        losses = [step(x, y) for x, y in data]
        with ws.whole(model, writeback=False):
            found.append((losses, [*(p.detach().clone() for p in model.parameters())], *model.buffers(), model.size))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.crossed
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_buffers_and_state_of_another_shape_or_dtype(style: str, semantics: str) -> None:
    run_ranks(other_shapes, 2, style, semantics)
