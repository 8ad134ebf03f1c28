"""Steps under a budget of memory on two ranks: what is predicted is held, numbers are the same, all refuse alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.live_bytes import peak_of
from tests.steps import sum_from_one as train
from wholestep.capture.call_structure import take_apart
from wholestep.runtime.finalize import bound_to_rank
from wholestep.runtime.step import CompiledStep

SCHEDULE = ws.Schedule(ws.Hardware.default())


def make() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 64))
    return model, AdamW(model.parameters(), lr=0.01, fused=True)


def trained(rank: int, rows: int, **options: Any) -> tuple[CompiledStep, nn.Module, Optimizer, list[Tensor], Tensor]:
    """Three steps, on data of this rank's own."""
    model, optimizer = make()
    step = ws.compile(train, **options)
    losses: list[Tensor] = []
    x = torch.empty(0)
    for number in range(3):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        losses.append(step(model, optimizer, x))
    return step, model, optimizer, [whole(p).clone() for p in model.parameters()] + losses, x


def _fitted(rank: int, world: int, style: str, part: float) -> dict[str, Any]:
    options = {"parallel": ws.DataParallel(style), "schedule": SCHEDULE}  # type: ignore[arg-type]
    rows = 256 - 32 * rank
    plain, *_, expected, _ = trained(rank, rows, **options)
    assert plain.local_graph is not None
    assert plain.world is not None
    before = ws.peak_memory(bound_to_rank(plain.local_graph, plain.world))
    rest = before.rest_bytes if rank == 0 else 0
    budget = int(rest + part * (before.size_bytes - rest)) if rank == 0 else 0
    said: list[Any] = [budget]
    torch.distributed.broadcast_object_list(said)
    step, model, optimizer, found, x = trained(rank, rows, memory_bytes=said[0], **options)
    assert step.local_graph is not None
    assert step.world is not None
    inputs = step.programs[-1].gather_inputs(take_apart(((model, optimizer, x), {})).leaves)
    return {
        "budget": said[0], "before": before.size_bytes,
        "predicted": ws.peak_memory(bound_to_rank(step.local_graph, step.world)).size_bytes,
        # gloo may let go of a tensor late, on a busy machine
        "measured": min(peak_of(step.programs[-1].run, inputs) for _ in range(3)),
        "again": sum("_again" in n.name for n in step.local_graph.graph.nodes),
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "style", ["fully_shard", *(pytest.param(one, marks=pytest.mark.full) for one in ("replicate", "zero1"))]
)
def test_a_budget_is_kept(style: str) -> None:
    """Counted while the step runs, by the bytes of live tensors: exactly what was predicted. The same bits."""
    for found in run_ranks(_fitted, 2, style, 0.8, timeout=200):
        assert found["same"]
        assert found["predicted"] <= found["budget"] < found["before"]
        assert found["measured"] == pytest.approx(found["predicted"], rel=0.01)
        assert found["again"] > 0


def _refused(rank: int, world: int, rows: tuple[int, ...], budget: int) -> str:
    try:
        trained(rank, rows[rank], memory_bytes=budget, schedule=SCHEDULE)
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_too_small_a_budget_is_refused_by_all() -> None:
    first, second = run_ranks(_refused, 2, (64, 64), 100_000)
    assert first == second
    assert first.startswith("PlanError: the step needs ")
    assert "needed: at most 100.0 kB" in first


def test_one_rank_that_does_not_fit_stops_all() -> None:
    """The second rank's batch is far larger than the first's, which chooses."""
    first, second = run_ranks(_refused, 2, (16, 4096), 2_000_000)
    assert first.startswith("RankMismatchError: rank 1 could not compile its step: the step needs ")
    assert second.startswith("PlanError: the step needs ")


def _kept(rank: int, world: int, style: str) -> list[set[int]]:
    """Where the memory of collectives lies after each of several steps, on rows of this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    step = ws.compile(train, parallel=ws.DataParallel(style), schedule=SCHEDULE)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    found: list[set[int]] = []
    for number in range(5):
        step(model, optimizer, torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * number + rank)))
        found.append({one.memory.data_ptr() for one in step.options.backend.buffers.buffers})
    return found


@pytest.mark.parametrize("style", ["replicate", pytest.param("zero1", marks=pytest.mark.full), "fully_shard"])
def test_memory_of_collectives_stays(style: str) -> None:
    """Later steps use it again; a collective that lets go of its tensors late may take some more."""
    for found in run_ranks(_kept, 2, style):
        assert found[1] & found[-1]
        assert len(found[-1]) <= 2 * len(found[1])
