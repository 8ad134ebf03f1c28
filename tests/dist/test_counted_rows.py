"""Steps that pick rows by values which the model computes, on two ranks that pick other numbers of rows, beside DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.unit.test_counted_rows import (
    Picks,
    deepseek,
    detection,
    experts_by_name,
    labelled,
    last_row,
    litgpt,
    made,
    mixtral_of_old,
    split_by_counts,
    train,
    train_on_labels,
)
from tests.unit.test_replacements import matched, with_scipy

ROWS = 10


def kinds_of_picked(m: Picks, h: Tensor) -> Tensor:
    """Rows of a batch, whose kinds are counted: a rank may have none."""
    rows = h[h[:, 0] > 0]
    ids = (rows[:, 1].detach() * 4).long().clamp(-5, 5) + 5
    kinds, numbers = torch.unique(ids, return_counts=True)
    bins = torch.bincount(ids, minlength=12)[:, None]
    return (
        m.out(h).square().mean()
        + m.out(h)[h[:, 2].argmax()].sum()
        + (m.words(kinds) * numbers[:, None]).sum()
        + (m.words.weight * bins).sum()
    )


def beside_ddp(rank: int, world: int, style: str) -> None:
    torch.set_default_dtype(torch.float64)
    for body in (litgpt, detection, kinds_of_picked, split_by_counts):
        (ours, optimizer), (plain, other) = made(body)(), made(body)()
        step = ws.compile(train, parallel=ws.DataParallel(style))
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        for call in range(4):
            x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(call * world + rank))
            x = torch.full_like(x, -4.0) if (call, rank) == (2, 1) else x  # one rank picks none, or all
            x = x[:0] if (body, call, rank) == (split_by_counts, 3, 1) else x  # or has no rows
            torch.testing.assert_close(step(ours, optimizer, x), train(ddp, other, x), rtol=1e-12, atol=1e-12)
        assert len(step.programs) == 1 + (body is split_by_counts) * rank
        with ws.whole(ours):
            state: dict[str, Tensor] = {name: value.clone() for name, value in ours.state_dict().items()}
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", ["replicate", "fully_shard", pytest.param("zero2", marks=pytest.mark.full)])
def test_ranks_pick_other_numbers_of_rows(style: str) -> None:
    run_ranks(beside_ddp, 2, style)


def questions_beside_ddp(rank: int, world: int, number: int) -> None:
    """In call 2 no rank picks rows (for an expert); in call 4 the first one alone."""
    torch.set_default_dtype(torch.float64)
    body = (mixtral_of_old, deepseek, last_row, experts_by_name)[number]
    (ours, optimizer), (plain, other) = made(body)(), made(body)()
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard"))
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    for call in range(6):
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(call * world + rank))
        x = torch.full_like(x, -4.0 - rank) if call == 2 else x
        if call == 4:
            with pytest.raises(ws.CaptureError, match="ranks, or micro-batches, take different branches"):
                step(ours, optimizer, x if rank else torch.full_like(x, -4.0))
        else:
            torch.testing.assert_close(step(ours, optimizer, x), train(ddp, other, x), rtol=1e-12, atol=1e-12)
    assert len(step.programs) == 2
    with ws.whole(ours):
        state: dict[str, Tensor] = {name: value.clone() for name, value in ours.state_dict().items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "number", [0, 1, 2, 3], ids=["one expert", "each expert", "raises on no rows", "those that are chosen"]
)
def test_questions_about_the_number_of_rows(number: int) -> None:
    run_ranks(questions_beside_ddp, 2, number)


def labels_of_the_batch(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    (ours, optimizer), (plain, other) = made(lambda m, h: m.out(h))(), made(lambda m, h: m.out(h))()
    step = ws.compile(train_on_labels, parallel=ws.DataParallel("fully_shard"))
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    for call in range(4):
        x, labels = labelled(world * call + rank)
        expected = train_on_labels(ddp, other, x, labels)
        torch.testing.assert_close(step(ours, optimizer, x, labels), expected, rtol=1e-12, atol=1e-12)
    assert len(step.programs) == 1


def test_ranks_have_other_numbers_of_objects() -> None:
    run_ranks(labels_of_the_batch, 2)


def over_the_whole_batch(rank: int, world: int) -> None:
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard", semantics="global"))
    for body in (litgpt, split_by_counts):
        with pytest.raises(ws.PlanError, match=r"the step counts rows while it runs and ranks .*them"):
            step(*made(body)(), torch.randn(ROWS, 8))


def test_rows_that_ranks_would_exchange_are_refused() -> None:
    run_ranks(over_the_whole_batch, 2)


def matched_beside_ddp(rank: int, world: int, style: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        solve, library = with_scipy(monkeypatch)
        ours, plain = nn.Linear(4, 3), nn.Linear(4, 3)
        plain.load_state_dict(ours.state_dict())

        def train_matched(model: nn.Module, optimizer: Any, x: Tensor, boxes: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = matched(solve, library, model, x, boxes)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = ws.compile(train_matched, parallel=ws.DataParallel(style))
        ddp, optimizers = DistributedDataParallel(plain), [torch.optim.AdamW(m.parameters()) for m in (ours, plain)]
        for call in range(4):
            torch.manual_seed(call * world + rank)
            x, boxes = torch.randn(5, 4), torch.randn((call + 2 * rank) % 5 + 1, 3)
            expected = train_matched(ddp, optimizers[1], x, boxes)
            torch.testing.assert_close(step(ours, optimizers[0], x, boxes), expected, rtol=1e-12, atol=1e-12)
        with ws.whole(ours):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_ranks_match_other_numbers_of_boxes(style: str) -> None:
    run_ranks(matched_beside_ddp, 2, style)
