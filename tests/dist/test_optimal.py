"""Layouts that are solved for, on gloo ranks: against one process, with other data along data-parallel axes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.steps import mean_from_one as train
from tests.tp_models import MLP, Llama, next_token, step_of
from wholestep.plan.data_parallel import PerParameterStorage, StorageOption

TOLERANCE = 1e-10
QUICK_LINK = ws.Hardware.measured(
    flops_per_us=10, memory_bytes_per_us=100, launch_us=0.1, link_us=0.1, link_bytes_per_us=10_000
)


def rows(part: int, step: int, count: int = 6) -> Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(100 * step + part))


def _two_axes(rank: int, world: int) -> dict[str, Any]:
    """Each pair of ranks along tp is given one half of the rows; the sizes change with the third call."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, alone = MLP(hidden=32), MLP(hidden=32)
    alone.load_state_dict(model.state_dict())
    optimizer, other = AdamW(model.parameters(), lr=0.05, fused=True), AdamW(alone.parameters(), lr=0.05, fused=True)
    parallel = [
        ws.DataParallel("fully_shard", axis="dp", semantics="global"),
        ws.TensorParallel("auto", hardware=QUICK_LINK),
    ]
    step, worst = ws.compile(train, parallel=parallel, mesh="dp=2,tp=2"), 0.0
    for number, count in enumerate((6, 6, 8)):
        loss = step(model, optimizer, rows(rank // 2, number, count))
        expected = train(alone, other, torch.cat([rows(part, number, count) for part in range(2)]))
        worst = max(worst, (loss - expected).abs().item())
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert step.plan is not None
    cut = [name for name, layout in step.plan.storage.items() if "tp" in layout.axes and "/" not in name]
    return {"worst": max(worst, *((whole(a) - b).abs().max().item() for a, b in pairs)), "cut": cut}


@pytest.mark.full
def test_two_axes() -> None:
    for found in run_ranks(_two_axes, 4):
        assert found["worst"] < TOLERANCE
        assert "net1.weight" in found["cut"]


def _language_model(rank: int, world: int, auto: bool) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, alone = Llama(layers=1), Llama(layers=1)
    alone.load_state_dict(model.state_dict())
    optimizer, other = (
        AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True),
        AdamW(alone.parameters(), lr=0.05, eps=1e-4, fused=True),
    )
    tensor = ws.TensorParallel("auto", hardware=QUICK_LINK)
    parallel: Any = ws.Auto(hardware=QUICK_LINK, tensor=tensor) if auto else tensor
    step, fn, worst = ws.compile(step_of(next_token), parallel=parallel, mesh="tp=2"), step_of(next_token), 0.0
    for number in range(2):
        made = torch.randint(0, 21, (2, 4, 6), generator=torch.Generator().manual_seed(number))
        worst = max(worst, (step(model, optimizer, *made) - fn(alone, other, *made)).abs().item())
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert step.plan is not None
    return {"worst": max(worst, *((whole(a) - b).abs().max().item() for a, b in pairs)), "strategy": step.plan.strategy}


@pytest.mark.full
@pytest.mark.parametrize("auto", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_language_model(auto: bool) -> None:
    for found in run_ranks(_language_model, 2, auto):
        assert found["worst"] < TOLERANCE
        assert "layouts solved for" in found["strategy"]


STORAGE = {
    "net1.weight": StorageOption("fully_shard", regathers=True),
    "net1.bias": StorageOption("replicate"),
    "net2.weight": StorageOption("zero1"),
    "net2.bias": StorageOption("fully_shard"),
}


def _mixed(rank: int, world: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, alone = MLP(hidden=32), MLP(hidden=32)
    alone.load_state_dict(model.state_dict())
    optimizer, other = AdamW(model.parameters(), lr=0.05, fused=True), AdamW(alone.parameters(), lr=0.05, fused=True)
    step = ws.compile(
        train, parallel=PerParameterStorage(semantics="global", storage=STORAGE, reshard_after_forward=False)
    )
    worst = 0.0
    for number in range(2):
        loss = step(model, optimizer, rows(rank, number))
        expected = train(alone, other, torch.cat([rows(part, number) for part in range(2)]))
        worst = max(worst, (loss - expected).abs().item())
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert step.plan is not None
    worst = max(worst, *((whole(a) - b).abs().max().item() for a, b in pairs))
    return {"worst": worst, "strategy": step.plan.strategy, "again": step.plan.options.regathered}


def test_each_parameter_stored_by_itself() -> None:
    for found in run_ranks(_mixed, 2):
        assert found["worst"] < TOLERANCE
        assert "1 replicate, 1 zero1, 1 fully_shard kept, 1 fully_shard re-gathered" in found["strategy"]
        assert found["again"] == ("net1.weight",)


def _measured(rank: int, world: int) -> dict[str, Any]:
    """Without a machine to solve for, it is the one that the ranks measure; all solve the same problem."""
    torch.manual_seed(0)
    model = MLP(hidden=32)
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    step = ws.compile(train, parallel=ws.TensorParallel("auto"), mesh="tp=2")
    for number in range(2):
        step(model, optimizer, rows(0, number).float())
    (part,) = step.strategies.parts
    assert isinstance(part, ws.TensorParallel)
    return {"hardware": part.hardware, "used": step.schedule.hardware if step.schedule else None}


def test_it_is_solved_for_the_measured_machine() -> None:
    first, second = run_ranks(_measured, 2, measures=True)
    assert first == second
    assert first["hardware"] == first["used"]
    assert first["hardware"] not in (None, ws.Hardware.default())
