"""Gradients that outlive a call, and ranks with other numbers of micro-batches, on two ranks against DDP."""

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from tests.dist.compare import difference
from tests.dist.launch import run_ranks
from tests.steps import mse as _train

STYLES = ("replicate", "zero1", "zero2", "fully_shard")
SCHEDULES = ("auto", "across_steps", None)
ALONE = ws.Schedule(bucket_bytes=1, first_bucket_bytes=1, across_steps=True)
TOLERANCE = 1e-6


def _data(rank: int, call: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank))


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


def _never(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
    """Gradients add up for ever."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _to_zero(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
    """They are set to zero and stay."""
    optimizer.zero_grad(set_to_none=False)
    return _never(model, optimizer, x, y, update)


def _sometimes(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
    """They add up over calls, until one that updates."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


STEPS = {"never": _never, "to zero": _to_zero, "sometimes": _sometimes}


def _kept(rank: int, style: str, schedule: Any, name: str) -> dict[str, Any]:
    """Eight calls on uneven batches; what is left in `param.grad` too."""
    (ours, theirs), fn = (_mlp(), _mlp()), STEPS[name]
    wrapped, losses = Ddp(theirs), 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), 0.02, fused=True) for m in (ours, theirs)]
    step = ws.compile(fn, parallel=ws.DataParallel(style), schedule=schedule)  # type: ignore[arg-type]
    for call in range(8):
        batch = _data(rank, call, 4 + rank, 6), _data(rank, call + 50, 4 + rank, 3), call % 3 == 2
        losses = max(losses, difference(step(ours, optimizers[0], *batch), fn(wrapped, optimizers[1], *batch)))
    step.flush()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all((a.grad is None) is (b.grad is None) for a, b in pairs)
    grads = [difference(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    params = max(difference(a, b) for a, b in pairs)
    return {"losses": losses, "params": params, "grads": max(grads, default=0.0), "captures": step.captures}


def _all_kept(rank: int, world: int, style: str, kinds: list[tuple[Any, str]]) -> dict[Any, dict[str, Any]]:
    return {(schedule, name): _kept(rank, style, schedule, name) for schedule, name in kinds}


KINDS = list(product(SCHEDULES, STEPS))
USUAL = [("auto", "sometimes"), ("across_steps", "never"), ("across_steps", "sometimes"), (None, "to zero")]


@pytest.mark.parametrize(
    ("style", "kinds"), [("fully_shard", USUAL), *(pytest.param(s, KINDS, marks=pytest.mark.full) for s in STYLES)]
)
def test_gradients_outlive_a_call(style: str, kinds: list[tuple[Any, str]]) -> None:
    for found in run_ranks(_all_kept, 2, style, kinds):
        assert len(found) == len(kinds)
        for (schedule, name), one in found.items():
            where = f"{name} under schedule={schedule!r}: {one}"
            assert max(one["losses"], one["params"], one["grads"]) < TOLERANCE, where
            assert one["captures"] == 3, where


def _micro(model: nn.Module, optimizer: Optimizer, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """As DDP runs it: ranks tell each other of the last one only."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        alone = isinstance(model, Ddp) and i < len(xs) - 1
        with model.no_sync() if alone else nullcontext():  # type: ignore[operator]
            loss = F.mse_loss(model(x), y) / len(xs)
            loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def _counts(rank: int, style: str, schedule: Any) -> dict[str, Any]:
    (ours, theirs) = _mlp(), _mlp()
    wrapped, losses = Ddp(theirs), 0.0
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    step = ws.compile(_micro, parallel=ws.DataParallel(style), schedule=schedule)  # type: ignore[arg-type]
    for call, count in enumerate([(2, 3, 2, 1, 1), (3, 1, 2, 2, 1)][rank]):
        parts = range(10 * call, 10 * call + count)
        batch = [_data(rank, i, 4 + rank, 6) for i in parts], [_data(rank, i + 500, 4 + rank, 3) for i in parts]
        losses = max(losses, difference(step(ours, optimizers[0], *batch), _micro(wrapped, optimizers[1], *batch)))
    step.flush()
    params = max(difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    return {"losses": losses, "params": params, "captures": step.captures}


def _all_counts(rank: int, world: int, jobs: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [_counts(rank, *job) for job in jobs]


COUNTED = [style for style in STYLES if style != "zero2"]
COUNTED_ON = (*SCHEDULES, ALONE)
ONCE = list(zip((*COUNTED, COUNTED[-1]), COUNTED_ON, strict=True))
OTHERS = [job for job in product(COUNTED, COUNTED_ON) if job not in ONCE]


@pytest.mark.full
@pytest.mark.parametrize("jobs", [ONCE, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["once", "others"])
def test_ranks_may_have_other_numbers_of_micro_batches(jobs: list[tuple[str, Any]]) -> None:
    """Gradients that are products on one rank are sums of products on another: what both reduce is the same."""
    for found in run_ranks(_all_counts, 2, jobs):
        for job, one in zip(jobs, found, strict=True):
            assert max(one["losses"], one["params"]) < TOLERANCE, (job, one)
            assert one["captures"] == 3, job


def _each_reduced(rank: int, world: int) -> str:
    try:
        _counts(rank, "zero2", "auto")
    except ws.RankMismatchError as error:
        return str(error)
    return ""


def test_a_style_that_reduces_every_micro_batch_needs_as_many_on_all_ranks() -> None:
    for text in run_ranks(_each_reduced, 2):
        assert "compiled different programs" in text
        assert "reduce_scatter_tensor" in text


class _Stops(torch.autograd.Function):
    """`x * w`, with a backward that gives `w` no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


class _Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = _mlp(), nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return _Stops.apply(self.body(x), self.scale)


def _no_gradient(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for style in STYLES:
        ours, theirs = _Stopped(), _Stopped()
        theirs.scale.requires_grad_(False)
        wrapped, losses = Ddp(theirs), 0.0
        optimizers = [torch.optim.AdamW(m.parameters(), 0.05, fused=True) for m in (ours, theirs)]
        step = ws.compile(_train, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
        for call in range(4):
            batch = _data(rank, call, 4, 6), _data(rank, call + 50, 4, 3)
            losses = max(losses, difference(step(ours, optimizers[0], *batch), _train(wrapped, optimizers[1], *batch)))
        worst = max(difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        found[style] = (max(losses, worst), ours.scale.grad, len(optimizers[0].state.get(ours.scale, {})))
    return found


def test_a_backward_may_give_no_gradient() -> None:
    """The parameter keeps none, and no optimizer state is made for it."""
    for found in run_ranks(_no_gradient, 2):
        for style, (worst, grad, state) in found.items():
            assert worst < TOLERANCE, style
            assert (grad, state) == (None, 0), style
