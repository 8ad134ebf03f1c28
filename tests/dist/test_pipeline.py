"""What is planned offline is what runs: the program of the public stages is the text of the compiled one."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import mean_square as train

HALF, MIXED = ws.MixedPrecision(torch.bfloat16), ws.MixedPrecision(torch.bfloat16, torch.float32)
PRECISIONS = (None, HALF, MIXED)
OFFLOADS = (None, "cpu")
SCHEDULES = (None, "auto", "across_steps", ws.Schedule(bucket_bytes=2000, first_bucket_bytes=300))
STYLES = ("replicate", "zero1", "zero2", "fully_shard", "hybrid")


def made(rows: int = 6, layers: int = 1) -> tuple[nn.Module, Optimizer, Tensor]:
    torch.manual_seed(0)
    inner = [layer for _ in range(layers) for layer in (nn.Linear(20, 20), nn.GELU())]
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), *inner, nn.Linear(20, 4))
    return model, AdamW(model.parameters(), 0.01), torch.randn(rows, 12)


EVERY = [(given, SCHEDULES) for given in product(PRECISIONS, OFFLOADS)]
USUAL = [((None, None), SCHEDULES[:2]), ((HALF, "cpu"), SCHEDULES[1:3]), ((MIXED, None), SCHEDULES[3:])]


def _texts(rank: int, world: int, style: Any, kinds: Any) -> list[tuple[str, str, str]]:
    """Where the two programs of one style differ, by options: both texts."""
    mesh = "replicate=1,shard=2" if style == "hybrid" else "dp=2"
    parallel, differing = ws.DataParallel(style), list[tuple[str, str, str]]()
    for (precision, offload), schedules in kinds:
        given: dict[str, Any] = {"mixed_precision": precision, "offload": offload}
        graph = ws.capture(train, *made(), options=ws.CaptureOptions(**given))
        local = ws.partition(graph, ws.plan(graph, mesh, parallel))
        for schedule in schedules:
            step = ws.compile(train, parallel=parallel, mesh=mesh, schedule=schedule, **given)
            step(*made())
            offline = ws.run_passes(local, ws.default_passes(schedule=step.schedule))
            assert step.local_graph is not None
            pairs = [(offline, step.local_graph)]
            pairs += zip(offline.across or (), step.local_graph.across or (), strict=True)
            for ours, theirs in pairs:
                if str(ours) != str(theirs):
                    differing.append((f"{precision} {offload} {schedule}", str(ours), str(theirs)))
    return differing


@pytest.mark.parametrize(
    ("style", "kinds"), [("fully_shard", USUAL), *(pytest.param(s, EVERY, marks=pytest.mark.full) for s in STYLES)]
)
def test_the_offline_program_is_the_compiled_one(style: str, kinds: Any) -> None:
    assert run_ranks(_texts, 2, style, kinds)[0] == []


def _budgeted(rank: int, world: int) -> tuple[str, str, str]:
    graph = ws.capture(train, *made(64, 8))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=False)))
    schedule = ws.Schedule(bucket_bytes=500, first_bucket_bytes=500)
    free = ws.run_passes(local, ws.default_passes(schedule=schedule))
    budget = ws.peak_memory(free).size_bytes - 3000
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard"), schedule=schedule, memory_bytes=budget)
    step(*made(64, 8))
    offline = ws.run_passes(local, ws.default_passes(schedule=schedule, memory_bytes=budget))
    return str(free), str(offline), str(step.local_graph)


def test_under_a_budget_too() -> None:
    free, offline, compiled = run_ranks(_budgeted, 2)[0]
    assert offline == compiled
    assert offline != free, "the budget asks for something"
