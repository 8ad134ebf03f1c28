"""Ranks that disagree: an error on every rank, within seconds, that names the difference."""

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_memory import trained


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def attempt(step: Any, *args: Any) -> tuple[str, str]:
    try:
        step(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def different_models(rank: int, world: int) -> list[tuple[str, str]]:
    """Other width on rank 1, another style on rank 1, a missing layer on rank 1."""
    out = []
    for width, style, layers in (
        (4 + rank, "replicate", 1),
        (4, ["zero1", "fully_shard"][rank], 1),
        (4, "zero1", 2 - rank),
    ):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)], nn.Linear(3, width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = ws.compile(train_step, parallel=ws.DataParallel(style))
        out.append(attempt(step, model, optimizer, torch.randn(2 + rank, 3)))
    return out


def test_ranks_that_compiled_different_programs():
    results = run_ranks(different_models, 2, timeout=60)
    for rank, other in ((0, 1), (1, 0)):
        kinds, texts = zip(*results[rank], strict=True)
        assert set(kinds) == {"RankMismatchError"}
        assert all(text.startswith(f"rank {rank} and rank {other} compiled different programs") for text in texts)
    width, style, layers = (text for _, text in results[0])
    assert width.splitlines()[1:3] == [
        "    rank 0: param 1.weight: f32[4 3]",
        "    rank 1: param 1.weight: f32[5 3]",
    ]
    assert style.splitlines()[1:3] == [
        "    rank 0: mesh dp=2; zero1 on dp, mean over ranks",
        "    rank 1: mesh dp=2; fully_shard on dp, mean over ranks",
    ]
    assert layers.splitlines()[1:3] == [
        "    rank 0: param 1.weight: f32[3 3]",
        "    rank 1: param 1.weight: f32[4 3]",
    ]


def one_fails(rank: int, world: int) -> tuple[str, str]:
    def reads(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if rank == 1:
            print(loss.tolist())
        optimizer.step()
        return loss

    model = nn.Linear(3, 3)
    return attempt(ws.compile(reads), model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


def test_a_rank_that_cannot_compile_tells_the_others():
    (kind, text), (other_kind, other_text) = run_ranks(one_fails, 2, timeout=60)
    assert other_kind == "CaptureError"
    assert kind == "RankMismatchError"
    assert text.splitlines()[0] == f"rank 1 could not compile its step: {other_text.splitlines()[0]}"


def one_calls_again(rank: int, world: int) -> tuple[str, str, float]:
    """Rank 1 alone freezes a layer: its program has fewer collectives than the one rank 0 goes on with."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    step = ws.compile(train_step, parallel=ws.DataParallel("replicate"), agree_timeout=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.randn(2, 3))
    start = time.monotonic()
    if rank == 1:
        model[0].requires_grad_(False)
        return *attempt(step, model, optimizer, torch.randn(2, 3)), time.monotonic() - start
    return "", "", 0.0


def test_a_call_that_only_one_rank_makes_ends():
    _, (kind, text, seconds) = run_ranks(one_calls_again, 2, timeout=60)
    assert kind == "RankMismatchError"
    assert text.splitlines()[0] == "ranks [0] compiled no program while rank 1 did, within 3 s"
    assert seconds < 30


def uneven(rank: int, world: int) -> tuple[int, list[str]]:
    """Only rank 1 sees a batch of another size: it captures again alone, and both go on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train_step, parallel=ws.DataParallel("fully_shard"))
    torch.manual_seed(rank)
    for call in range(3):
        step(model, optimizer, torch.randn(2 if rank == 0 or call < 2 else 5, 3))
    return step.captures, step.misses


@pytest.mark.smoke
def test_another_batch_size_on_one_rank_is_no_difference():
    assert run_ranks(uneven, 2, timeout=60) == [
        (1, []),
        (2, ["argument x is a tensor (5, 3) torch.float32, it was (2, 3) torch.float32"]),
    ]


def wrong_mesh(rank: int, world: int) -> list[tuple[str, str]]:
    model = nn.Linear(3, 3)
    args = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3)
    return [attempt(ws.compile(train_step, mesh=mesh), *args) for mesh in ("dp=4", "dp=2,tp=2")]


def test_a_mesh_of_another_size_is_refused_on_every_rank():
    for (kind, text), (_, other) in run_ranks(wrong_mesh, 2, timeout=60):
        assert kind == "MeshError"
        assert text.splitlines()[0] == "mesh dp=4 has 4 ranks, the job has 2"
        assert other.splitlines()[0] == "mesh dp=2,tp=2 has 4 ranks, the job has 2"


def _warned(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained(rank, 4, parallel=ws.DataParallel("replicate"))
    return [Path(w.filename).name for w in found if "semantics='per_rank'" in str(w.message)]


def test_a_summed_loss_is_told_of_once_at_the_line_that_calls_the_step():
    assert run_ranks(_warned, 2) == [["test_memory.py"], []]
