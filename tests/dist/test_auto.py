"""`Auto` on two ranks: the bits of the template that was chosen, one choice for all, whatever each was told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.steps import sum_from_one as train
from tests.unit.test_tile_rows import LOSSES, make, one_device, step_of, tiles
from wholestep.runtime.step import CompiledStep

FAST = ws.Hardware.measured(link_us=1.0, link_bytes_per_us=1e6)
LATE = ws.Hardware.measured(link_us=50_000.0, link_bytes_per_us=1e6)
LAYERS = 3  # of steps under a budget


def trained(
    rank: int, rows: int = 16, layers: int = 1, calls: int = 4, **options: Any
) -> tuple[CompiledStep, list[Tensor]]:
    """Up to three steps on this rank's own data; then one on a batch of another size."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(layers)]
    model = nn.Sequential(*blocks)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    step = ws.compile(train, **options)
    found: list[Tensor] = []
    for number, size in enumerate((rows, rows, rows, rows + 8)[:calls]):
        x = torch.randn(size, 48, generator=torch.Generator().manual_seed(10 * number + rank))
        found.append(step(model, optimizer, x))
    return step, [whole(p).clone() for p in model.parameters()] + found


def _same_bits(rank: int, world: int, auto: ws.Auto) -> dict[str, Any]:
    schedule = ws.Schedule(FAST)
    step, found = trained(rank, parallel=auto, schedule=schedule)
    chosen = step.strategies
    assert step.plan is not None
    _, expected = trained(rank, parallel=chosen, schedule=schedule)
    return {
        "chosen": step.plan.strategy,
        "notes": step.plan.notes,
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "captures": step.captures,
    }


@pytest.mark.parametrize(
    "styles", [None, *(pytest.param((one,), marks=pytest.mark.full) for one in ("fully_shard", "zero1"))]
)
def test_the_bits_of_the_template(styles: Any) -> None:
    first, second = run_ranks(_same_bits, 2, ws.Auto(styles=styles))
    assert first == second
    assert first["same"]
    assert first["captures"] == 2
    assert any(note.startswith("Auto chose ") for note in first["notes"])
    assert styles is None or first["chosen"].startswith(styles[0])


def _told(rank: int, world: int, first: ws.Hardware, second: ws.Hardware) -> str:
    schedule = ws.Schedule(second if rank else first, bucket_bytes=1 << 10)
    step, _ = trained(rank, rows=256, calls=1, parallel=ws.Auto(), schedule=schedule)
    assert step.plan is not None
    return step.plan.strategy


def test_the_machine_of_the_first_rank_decides() -> None:
    late, too = run_ranks(_told, 2, LATE, FAST)
    assert late == too
    assert late.startswith("replicate")
    fast, too = run_ranks(_told, 2, FAST, LATE)
    assert fast == too
    assert "fully_shard" in fast


def _under(rank: int, world: int, budget: int) -> tuple[int, int, str]:
    schedule = ws.Schedule(FAST)
    step, _ = trained(rank, rows=2048, layers=LAYERS, parallel=ws.Auto(budget), schedule=schedule)
    assert step.local_graph is not None
    assert step.plan is not None
    again = sum("_again" in n.name for n in step.local_graph.graph.nodes)
    return ws.peak_memory(step.local_graph).size_bytes, again, step.plan.strategy


@pytest.mark.full
def test_a_budget_is_kept_by_computing_again() -> None:
    free = run_ranks(_under, 2, 1 << 40)[0]
    assert free[1] == 0
    for peak, again, _ in run_ranks(_under, 2, int(free[0] * 0.9)):
        assert peak <= int(free[0] * 0.9) < free[0]
        assert again > 0


def _tiled(rank: int, world: int, folder: str) -> tuple[int, list[int], str, float]:
    torch.set_default_dtype(torch.float64)
    one, loss_of = one_device("mean", 4, 64), step_of(LOSSES["mean"])
    data = ws.DataParallel(semantics="global")
    auto = ws.Auto(600_000, FAST, data=data, styles=("zero1",), solve=False)
    (model, optimizer), (other, plain), worst = make(), make(), 0.0
    step = ws.compile(loss_of, parallel=auto, schedule=ws.Schedule(FAST), cache=folder)
    for x, y in one.batches:
        loss = step(model, optimizer, x.chunk(world)[rank], y.chunk(world)[rank])
        worst = max(worst, (loss - loss_of(other, plain, x, y)).abs().item())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        worst = max(worst, (whole(a) - b).abs().max().item())
    assert step.local_graph is not None
    assert step.plan is not None
    return ws.peak_memory(step.local_graph).size_bytes, tiles(step.local_graph), str(step.plan.notes), worst


@pytest.mark.full
def test_ranks_tile_alike_where_nothing_else_fits(tmp_path: Path) -> None:
    """A cold start and a warm one, each rank with rows of its own, of which other numbers of labels count."""
    for _ in ("cold", "warm"):
        (peak, of_first, notes, worst), second = run_ranks(_tiled, 2, str(tmp_path))
        assert second[:3] == (peak, of_first, notes)
        assert peak <= 600_000
        assert of_first
        assert min(of_first) > 1
        assert max(worst, second[3]) < 1e-10


def _refused(rank: int, world: int, budget: int) -> str:
    try:
        trained(rank, parallel=ws.Auto(budget), schedule=ws.Schedule(FAST))
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_refuse_alike() -> None:
    first, second = run_ranks(_refused, 2, 10_000)
    assert first == second
    assert first.startswith("BudgetError: no plan fits: the nearest, ")


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


def offline(budget: int | None = None, layers: int = LAYERS, width: int = 48) -> ws.Plan:
    """What `wholestep plan --auto` would write for two ranks: nothing is trained, no rank is started."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(layers)]
        model, x = nn.Sequential(*blocks), torch.empty(2048, width)
    graph = ws.capture(train, model, AdamW(model.parameters(), lr=0.01), x)
    return ws.plan(graph, "dp=2", ws.Auto(budget, FAST))


def _applied(rank: int, world: int, path: str, layers: int = LAYERS) -> Any:
    plan, schedule = ws.Plan.load(path), ws.Schedule(FAST)
    try:
        step, found = trained(rank, rows=2048, layers=layers, parallel=plan, schedule=schedule)
    except ws.PlanError as error:
        return str(error)
    assert step.local_graph is not None
    assert step.plan is not None
    assert plan.strategies is not None
    _, expected = trained(rank, rows=2048, layers=layers, parallel=plan.strategies.parts, schedule=schedule)
    again = sum("_again" in n.name for n in step.local_graph.graph.nodes)
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return ws.peak_memory(step.local_graph).size_bytes, again, same, step.plan.strategy


@pytest.mark.full
def test_a_plan_made_elsewhere_is_applied(tmp_path: Path) -> None:
    """Its strategy and its budget, bit for bit; to other parameters it is not."""
    path = str(tmp_path / "plan.json")
    free = offline()
    assert free.objective is not None
    budget = int(free.objective.peak_bytes * 0.9)
    made = offline(budget)
    assert made.objective is not None
    assert made.objective.rematerialized
    made.save(path)
    for peak, again, same, strategy in run_ranks(_applied, 2, path):
        assert peak <= budget
        assert again > 0
        assert same
        assert strategy == made.strategy
    for said in run_ranks(_applied, 2, path, LAYERS + 1):
        assert said.startswith(f"the plan does not fit this step: {LAYERS}.0.weight: absent in the plan, f32[")
