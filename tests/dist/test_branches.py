"""Branches on values on two ranks: all take one, raise what the step raises, or are told that they differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks


def clamped(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    h = model(x)
    if not torch.isfinite(h).all():
        h = h.nan_to_num()
    loss = h.square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    return loss.detach()


def checked(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    torch._assert_async(torch.isfinite(x).all(), "The total")
    if x.max() > 50:
        raise ValueError(f"too large: {x.max().item():.2f} {x.argmax()}")
    return clamped(model, optimizer, x)


def _train(rank: int, world: int, semantics: Any, fn: Any) -> list[str]:
    """Call 1 is not finite on both ranks, call 2 on the second one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(fn, parallel=ws.DataParallel("replicate", semantics=semantics))
    said: list[str] = []
    for call in range(5):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * call + rank))
        if call == 1 or (call == 2 and rank == 1):
            x[0, 0] = float("inf")
        x *= 90 if call == 4 else 1
        before = [p.detach().clone() for p in model.parameters()]
        try:
            step(model, optimizer, x)
            said.append("ran")
        except (RuntimeError, ValueError, ws.CaptureError) as error:
            said.append(str(error).splitlines()[0][:25])
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return said


@pytest.mark.parametrize("semantics", ["per_rank", "global"])
def test_ranks_take_one_branch_or_none(semantics: str) -> None:
    raised = "The total norm of order 2.0 for gradients"[:25]
    second = "ranks, or micro-batches, take"[:25] if semantics == "per_rank" else raised
    for said in run_ranks(_train, 2, semantics, clamped):
        assert said == ["ran", raised, second, "ran", "ran"]


def test_errors_have_the_values_of_their_rank() -> None:
    """What raises alone, and text of the user's error, on ranks with different batches."""
    for rank, said in enumerate(run_ranks(_train, 2, "per_rank", checked)):
        x = 90 * torch.randn(4, 3, generator=torch.Generator().manual_seed(40 + rank))
        expected = f"too large: {x.max():.2f} {x.argmax()}"[:25]
        assert said == ["ran", "The total", "ranks, or micro-batches, take"[:25], "ran", expected]


def signed(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    h = model(x) if x.sum() > 0 else -model(x)
    loss = h.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _differ_at_once(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step, optimizer = ws.compile(signed), torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    for signs in ((1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)):
        try:
            step(model, optimizer, signs[rank] * torch.full((2, 3), 1.0 + rank))
            said.append("ran")
        except ws.CaptureError as error:
            said.append(f"{error.found} {error.where}")
    return said


def test_ranks_that_differ_on_their_batches_in_the_first_call() -> None:
    """They try the same program first, so that all are told the line; later calls run."""
    for first, *later in run_ranks(_differ_at_once, 2):
        assert first.startswith("ranks, or micro-batches, take different branches")
        assert "h = model(x) if x.sum() > 0" in first
        assert later == ["ran", "ran"]
