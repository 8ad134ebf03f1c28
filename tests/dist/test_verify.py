"""Ranks trace a step again at the same calls: a difference on one is an error of all, and they go on together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dist.launch import run_ranks

LOCK = threading.Lock()


def train(rank: int, world: int, changes: list[int], style: str) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * (2.0 if LOCK.locked() else 1.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    told, out = list[str](), list[Any]()
    compiled = ws.compile(
        step, parallel=ws.DataParallel(style), verify=True, progress=lambda stage, what, seconds: told.append(stage)
    )
    for call in range(1, 10):
        if call == 3 and rank in changes:
            LOCK.acquire()
        try:
            out.append(compiled(torch.full((3 + rank, 4), call + rank + 1.0)).item())
        except ws.WholestepError as error:
            out.append(f"{type(error).__name__}: {error.found}")
    return out, told


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_value_that_changes_on_one_rank_is_an_error_of_all(style: str) -> None:
    first, second = run_ranks(train, 2, [1], style)
    assert first[1].count("trace again") == second[1].count("trace again") == 3, (
        "two traces; the second one ends with the error"
    )
    assert first[0][4].startswith("CaptureError: on rank 1: call 5 of step")
    assert second[0][4].startswith("CaptureError: call 5 of step")
    for out, _ in (first, second):
        assert out[5].startswith("RankMismatchError: "), "the next program is compared, and is another one on each rank"


def test_ranks_go_on_after_a_value_has_changed_on_all_of_them() -> None:
    for out, told in run_ranks(train, 2, [0, 1], "replicate"):
        assert out[4].startswith("CaptureError: call 5 of step")
        assert all(isinstance(loss, float) for loss in out[5:])
        assert told.count("trace again") == 5
