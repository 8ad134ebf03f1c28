"""`Auto` on two ranks: the bits of the template that was chosen, one choice for all, whoever measured what."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from wholestep.runtime import finish
from wholestep.runtime.step import CompiledStep

FAST = ws.Machine(link_us=1.0, link_bytes_per_us=1e6)
LATE = ws.Machine(link_us=50_000.0, link_bytes_per_us=1e6)


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - 1.0).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(rank: int, rows: int = 16, layers: int = 1, **options: Any) -> tuple[CompiledStep, list[Tensor]]:
    """Three steps on this rank's own data; then one on a batch of another size."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(layers)]
    model = nn.Sequential(*blocks)
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = ws.compile(train, **options)
    found: list[Tensor] = []
    for number, size in enumerate((rows, rows, rows, rows + 8)):
        x = torch.randn(size, 48, generator=torch.Generator().manual_seed(10 * number + rank))
        found.append(step(model, optimizer, x))
    return step, [whole(p).clone() for p in model.parameters()] + found


def _same_bits(rank: int, world: int, auto: ws.Auto) -> dict[str, Any]:
    schedule = ws.Schedule(FAST)
    step, found = trained(rank, parallel=auto, schedule=schedule)
    chosen = step.options.parallel
    assert step.plan is not None
    _, expected = trained(rank, parallel=chosen, schedule=schedule)
    return {
        "chosen": step.plan.strategy,
        "notes": step.plan.notes,
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "captures": step.captures,
    }


@pytest.mark.parametrize("styles", [None, ("fully_shard",), ("zero1",)])
def test_the_bits_of_the_template(styles: Any) -> None:
    first, second = run_ranks(_same_bits, 2, ws.Auto(styles=styles))
    assert first == second
    assert first["same"]
    assert first["captures"] == 2
    assert any(note.startswith("Auto chose ") for note in first["notes"])
    assert styles is None or first["chosen"].startswith(styles[0])


def _measured(rank: int, world: int, first: ws.Machine, second: ws.Machine) -> str:
    finish.measure = lambda world: second if rank else first
    step, _ = trained(rank, rows=256, parallel=ws.Auto())
    assert step.plan is not None
    return step.plan.strategy


def test_what_the_first_rank_measured_decides() -> None:
    late, too = run_ranks(_measured, 2, LATE, FAST)
    assert late == too
    assert late.startswith("replicate")
    fast, too = run_ranks(_measured, 2, FAST, LATE)
    assert fast == too
    assert fast.startswith("fully_shard")


def _under(rank: int, world: int, budget: int) -> tuple[int, int, str]:
    schedule = ws.Schedule(FAST)
    step, _ = trained(rank, rows=2048, layers=6, parallel=ws.Auto(budget), schedule=schedule)
    assert step.local_graph is not None
    assert step.plan is not None
    again = sum("_again" in n.name for n in step.local_graph.graph.nodes)
    return ws.peak_memory(step.local_graph).size_bytes, again, step.plan.strategy


def test_a_budget_is_kept_by_computing_again() -> None:
    free = run_ranks(_under, 2, 1 << 40)[0]
    assert free[1] == 0
    for peak, again, _ in run_ranks(_under, 2, int(free[0] * 0.9)):
        assert peak <= int(free[0] * 0.9) < free[0]
        assert again > 0


def _refused(rank: int, world: int, budget: int) -> str:
    try:
        trained(rank, parallel=ws.Auto(budget), schedule=ws.Schedule(FAST))
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_refuse_alike() -> None:
    first, second = run_ranks(_refused, 2, 10_000)
    assert first == second
    assert first.startswith("PlanError: no plan fits: the nearest, ")


def _one_fails(rank: int, world: int) -> str:
    def broken(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return train(model, optimizer, x) if rank == 0 else torch.tensor(float(train(model, optimizer, x).item()))

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    step = ws.compile(broken, parallel=ws.Auto(), agree_timeout=20.0)
    try:
        step(model, AdamW(model.parameters()), torch.ones(2, 4))
    except ws.WholestepError as error:
        return type(error).__name__
    return ""


def test_a_rank_that_cannot_capture_stops_all() -> None:
    assert run_ranks(_one_fails, 2) == ["RankMismatchError", "CaptureError"]


def _differ(rank: int, world: int) -> str:
    try:
        trained(rank, parallel=ws.Auto(styles=("zero1", "replicate")[: 1 + rank]))
    except ws.WholestepError as error:
        return type(error).__name__
    return ""


def test_ranks_that_ask_for_other_things_are_told() -> None:
    assert run_ranks(_differ, 2) == ["RankMismatchError", "RankMismatchError"]
