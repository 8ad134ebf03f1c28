"""Ranks that hold programs of other sizes let go of other ones, and none waits for another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.dist.compare import difference
from wholestep import _torch
from wholestep.runtime import consistency

from .launch import run_ranks

SECONDS = 20.0  # a rank that waits for another that does not compile fails after as long


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = torch.zeros(())
    for x in batches:
        part = F.mse_loss(model(x), x)
        (part / len(batches)).backward()
        loss = loss + part.detach()
    optimizer.step()
    return loss


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def data(rank: int, call: int, rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1000 * rank + call))


def own_sizes(rank: int, world: int, calls: int, **options: Any) -> dict[str, Any]:
    """Each rank meets sizes of its own in an order of its own, and holds two programs; DDP gets the same batches."""
    (ours, optimizer), (theirs, their_optimizer) = made(), made()
    wrapped = DistributedDataParallel(theirs)
    step = ws.compile(train_step, max_programs=2, dynamic=False, agree_timeout=SECONDS, **options)
    worst = 0.0
    for call in range(calls):
        x = data(rank, call, 1 + call % 3 if rank else 1 + call // 2 % 5)
        worst = max(worst, difference(step(ours, optimizer, x), train_step(wrapped, their_optimizer, x)))
    step.flush()
    return {"worst": worst, "captures": step.captures, "programs": len(step.programs)}


def of_twelve_calls(rank: int, world: int, style: Any, options: dict[str, Any]) -> dict[str, Any]:
    return own_sizes(rank, world, 12, parallel=ws.DataParallel(style), **options)


@pytest.mark.parametrize(
    ("style", "options"),
    [
        pytest.param("fully_shard", {}, marks=pytest.mark.full),
        ("zero1", {"schedule": "across_steps"}),
        ("fully_shard", {"memory_bytes": "1MiB"}),
    ],
)
def test_no_rank_waits_for_one_that_kept_its_program(style: str, options: dict[str, Any]) -> None:
    for rank, one in enumerate(run_ranks(of_twelve_calls, 2, style, options)):
        assert one["worst"] < 1e-5
        assert one["programs"] == 2
        assert one["captures"] == (12 if rank else 6)


def other_kinds(rank: int, world: int, rounds: int) -> tuple[float, list[int]]:
    """Ranks remember two comparisons, and meet four kinds of calls with collectives of their own. The differences from
    DDP, and the number of keys in the store after each round.
    """
    consistency.TUNING = replace(consistency.TUNING, kept_comparisons=2)
    (ours, optimizer), (theirs, their_optimizer) = made(), made()
    wrapped = DistributedDataParallel(theirs)
    step = ws.compile(
        train_step, max_programs=3 + rank, dynamic=False, agree_timeout=SECONDS, parallel=ws.DataParallel("zero2")
    )
    worst, keys, store = 0.0, list[int](), _torch.default_store()
    for round_ in range(rounds):
        for call, parts in enumerate((1, 2, 1, 3, 4, 1, 2)):
            batches = [data(rank, 10 * round_ + call + i, 2 + (rank * (call + i)) % 3) for i in range(parts)]
            loss = step(ours, optimizer, *batches)
            worst = max(worst, difference(loss, train_step(wrapped, their_optimizer, *batches)))
        keys.append(store.num_keys())
    return worst, keys


@pytest.mark.full
def test_ranks_forget_comparisons_together() -> None:
    for worst, keys in run_ranks(other_kinds, 2, 4):
        assert worst < 1e-5
        assert max(keys[1:]) <= keys[0] + 2, keys


@pytest.mark.full
def test_three_ranks_with_many_sizes() -> None:
    for one in run_ranks(own_sizes, 3, 60, timeout=300):
        assert one["worst"] < 1e-5
        assert one["programs"] == 2


def groups_of_their_own(rank: int, world: int, style: Any) -> tuple[float, int]:
    """Parameters are in groups, as state is made first; then the first rank alone meets another size."""
    torch.manual_seed(0)
    pairs = [(made()[0], DistributedDataParallel), (made()[0], lambda model: model)]
    (theirs, optimizer), (ours, own) = [
        (wrap(model), torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() == d]} for d in (2, 1)]))
        for model, wrap in pairs
    ]
    step = ws.compile(train_step, agree_timeout=SECONDS, parallel=ws.DataParallel(style))
    worst = 0.0
    for call, rows in enumerate((6, 6 if rank else 4, 6)):
        x = data(rank, call, rows)
        worst = max(worst, difference(step(ours, own, x), train_step(theirs, optimizer, x)))
    return worst, step.captures


def test_the_order_of_state_does_not_depend_on_who_made_it() -> None:
    for style in ("replicate", "fully_shard"):
        for rank, (worst, captures) in enumerate(run_ranks(groups_of_their_own, 2, style)):
            assert worst < 1e-5
            assert captures == (1 if rank else 2)
