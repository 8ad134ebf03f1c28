"""One rank compiles for all, and a second start compiles nothing: bitwise the same steps."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.dist.test_errors import attempt, train_step

STYLES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel": ws.DataParallel("replicate")},
    "zero1": {"parallel": ws.DataParallel("zero1"), "schedule": "across_steps"},
    "fully_shard": {"parallel": ws.DataParallel("fully_shard")},
    "global": {"parallel": ws.DataParallel("fully_shard", semantics="global")},
}


def train(rank: int, world: int, folder: str, rows: tuple[int, int] = (3, 3)) -> dict[str, Any]:
    """Three steps in each style: what happened, the parameters after them, the program."""
    found: dict[str, Any] = {}
    case = CASES["tokens"]
    for style, options in STYLES.items():
        model = case.build(torch.float32)
        optimizer = OPTIMIZERS["AdamW-fused"].make(model.parameters())
        step = ws.compile(case.step, cache=folder, **options)
        for i in range(3):
            batch = {k: v[: rows[rank]] for k, v in case.batches(10 * i + rank, torch.float32).items()}
            loss = step(model, optimizer, batch)
        step.flush()
        assert step.plan is not None
        params = [whole(p).tolist() for p in model.parameters()]
        text = str(step.local_graph), str(step.train_graph), step.plan.explain("qkv.weight"), str(step.plan)
        found[style] = step.cache_log, step.captures, loss.item(), params, text
    return found


def test_the_first_rank_compiles_for_all_and_a_second_start_for_none(tmp_path: Path) -> None:
    without = run_ranks(train, 2, "", timeout=120)
    cold = run_ranks(train, 2, str(tmp_path), timeout=120)
    warm = run_ranks(train, 2, str(tmp_path), timeout=120)
    for style in STYLES:
        assert [rank[style][1] for rank in cold] == [1, 0], style
        assert cold[1][style][0] == ["from rank 0"]
        assert [rank[style][1] for rank in warm] == [0, 0], style
        assert [rank[style][0] for rank in warm] == [["hit"], ["from rank 0"]]
        for before, made, again in zip(without, cold, warm, strict=True):
            assert made[style][2:] == again[style][2:], style
            assert before[style][3] == again[style][3], style
    assert cold[0]["replicate"][2] != cold[1]["replicate"][2], "ranks have different batches"


def test_a_rank_with_another_batch_compiles_its_own(tmp_path: Path) -> None:
    cold = run_ranks(train, 2, str(tmp_path), (3, 2), timeout=120)
    warm = run_ranks(train, 2, str(tmp_path), (3, 2), timeout=120)
    alone = run_ranks(train, 2, "", (3, 2), timeout=120)
    for style in ("replicate", "zero1", "fully_shard"):
        assert [rank[style][1] for rank in cold] == [1, 1], style
        assert [rank[style][0] for rank in warm] == [["hit"], ["hit"]], style
        assert [rank[style][1] for rank in warm] == [0, 0]
        assert all(a[style][3] == b[style][3] == c[style][3] for a, b, c in zip(cold, warm, alone, strict=True))
    assert [rank["global"][1] for rank in cold] == [1, 0], "with one batch of 5 rows, both have one program"


def first_fails(rank: int, world: int, folder: str) -> tuple[str, str]:
    def reads(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if loss > 1:
            print("large")
        optimizer.step()
        return loss

    model = nn.Linear(3, 3)
    step = ws.compile(reads, cache=folder, agree_timeout=30)
    return attempt(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


def test_a_first_rank_that_cannot_compile_is_an_error_on_all(tmp_path: Path) -> None:
    (kind, text), (other_kind, other_text) = run_ranks(first_fails, 2, str(tmp_path), timeout=60)
    assert kind == "CaptureError"
    assert other_kind == "RankMismatchError"
    assert other_text.splitlines()[0] == f"rank 0 could not compile its step: {text.splitlines()[0]}"


def first_is_absent(rank: int, world: int, folder: str) -> tuple[str, str]:
    if rank == 0:
        return "", ""
    model = nn.Linear(3, 3)
    step = ws.compile(train_step, cache=folder, agree_timeout=2)
    return attempt(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


def mixed(rank: int, world: int, folder: str) -> tuple[str, str]:
    """The cache is on for the first rank only; the measurement, which all take part in, is not reached."""
    model = nn.Linear(3, 3)
    step = ws.compile(train_step, cache=folder if rank == 0 else "", agree_timeout=5)
    return attempt(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


def test_ranks_of_which_one_has_a_cache(tmp_path: Path) -> None:
    for _ in range(2):
        found = run_ranks(mixed, 2, str(tmp_path), timeout=60)
        assert [kind for kind, _ in found] == ["RankMismatchError"] * 2
        assert "compile cache on" in found[0][1]


def scaled(rank: int, world: int, folder: str) -> tuple[str, list[str]]:
    """A helper reads a global that differs between ranks, which the key does not hold."""
    globals()["SCALE"] = 1.0 + rank
    model = nn.Linear(3, 3)
    torch.manual_seed(0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = _scaled(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = ws.compile(step, cache=folder)
    _, text = attempt(compiled, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
    return text, compiled.cache_log


SCALE = 0.0


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def test_a_global_that_differs_between_ranks_is_seen(tmp_path: Path) -> None:
    for rank, (text, log) in enumerate(run_ranks(scaled, 2, str(tmp_path), timeout=60)):
        assert f"rank {rank}:   %mul = aten.mul.Tensor(%addmm, {1.0 + rank})" in text
        assert log[0].startswith("miss")


def test_a_first_rank_that_never_comes_is_an_error(tmp_path: Path) -> None:
    _, (kind, text) = run_ranks(first_is_absent, 2, str(tmp_path), timeout=60)
    assert kind == "RankMismatchError"
    assert text.splitlines()[0] == "rank 0 gave no program within 2 s, which it compiles for all ranks (cache=)"
