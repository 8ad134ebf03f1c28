"""`Auto` under a budget that needs tiles of rows, or saved values on the host: chosen by time, run as priced."""

import copy
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from tests.together import OneDevice, compare
from tests.unit.test_offload_saved import copies
from tests.unit.test_tile_rows import LOSSES, make, one_device, step_of, tiles
from wholestep.errors import BudgetError
from wholestep.planner.recompute_kinds import saving_passes
from wholestep.planner.search_result import SearchResult, Status, explained
from wholestep.runtime import choose_strategy

pytestmark = pytest.mark.usefixtures("double")
FAST = ws.Hardware.measured(link_us=1.0, link_bytes_per_us=1e6)
H100 = ws.Hardware.preset("dgx-h100")
OPTIONS: dict[str, Any] = {"data": ws.DataParallel(semantics="global"), "styles": ("fully_shard",), "solve": False}


def with_link(bytes_per_us: float) -> ws.Hardware:
    """GPUs that copy so fast to their host."""
    return replace(H100, device=replace(H100.device, host_bytes_per_us=bytes_per_us))


def searched(one: OneDevice, hardware: ws.Hardware, share: float, **options: bool) -> SearchResult:
    """Of two ranks under a share of the least peak without a budget."""
    rows = ws.Auto(None, hardware, **OPTIONS).search(one.capture.graph, "dp=2").rows
    budget = int(share * min(row.costs.peak_bytes for row in rows if row.costs))
    return ws.Auto(budget, hardware, **OPTIONS, **options).search(one.capture.graph, "dp=2")


def trained(one: OneDevice, search: SearchResult, hardware: ws.Hardware) -> ws.LocalGraph:
    """The program that was chosen, run on two ranks for three steps, as `compile` makes it. Not its recomputation."""
    best = search.best
    assert best.strategies is not None
    passes = ws.default_passes(hardware, memory_bytes=search.budget_bytes)
    passes = saving_passes(passes, best.saving)
    found = compare(one, "dp=2", best.strategies.parts, edit=lambda local: ws.run_passes(local, passes[:-1]))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"
    program = ws.run_passes(ws.partition(one.capture.graph, search.plan), passes)
    assert best.needs_bytes == ws.peak_memory(program).size_bytes <= (search.budget_bytes or 0)
    assert best.batch_s == pytest.approx(ws.simulate(program, hardware).step_us / 1e6)
    return program


@cache
def layers() -> OneDevice:
    """Of equal layers, whose products are no larger than what they multiply."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(16, 16), nn.Tanh(), nn.GELU())))
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-4)

    return OneDevice(build, _mean_square, [(torch.randn(512, 16),) for _ in range(3)])


def _mean_square(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_tiles_where_nothing_else_fits() -> None:
    one = one_device("mean", 4, 64)
    with pytest.raises(BudgetError, match="no plan fits"):
        searched(one, FAST, 0.6, saves=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = searched(one, FAST, 0.6)
    assert search.best.saving.tiles > 1
    assert not search.best.saving.ahead, "the host of a CPU is no other memory"
    assert set(tiles(trained(one, search, FAST))) == {search.best.saving.tiles}
    assert f"{search.best.saving.tiles} tiles of rows" in str(explained(search))
    assert ws.Plan.from_json(explained(search).to_json()).objective == explained(search).objective


@pytest.mark.usual("1000000000.0")
@pytest.mark.parametrize("bytes_per_us", [1e9, 1.0])
def test_the_host_where_its_link_is_fast(bytes_per_us: float) -> None:
    """And recomputation where it is slow."""
    one, hardware = layers(), with_link(bytes_per_us)
    search = searched(one, hardware, 0.75)
    program = trained(one, search, hardware)
    assert (copies(program) > 0) == bool(search.best.saving.ahead) == (bytes_per_us > 1)
    assert bool(search.best.rematerialized) == (bytes_per_us == 1)
    waiting = [row for row in search.rows if row.saving.ahead]
    assert waiting, "it was tried"
    assert all(row.rank >= search.best.rank for row in waiting)


def test_a_budget_that_is_enough_changes_nothing() -> None:
    search = searched(layers(), H100, 1.0)
    assert not any(str(row.saving) for row in search.rows)
    assert search.best.status is Status.CHOSEN


def test_compiled_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start searches, the second one and one by the plan's file do not: all run the same tiles."""
    one, train = one_device("mean", 4, 64), step_of(LOSSES["mean"])
    auto = replace(ws.Auto("1MB", FAST, **OPTIONS), styles=("replicate",))
    programs, losses = list[str](), list[list[Tensor]]()
    for start in range(4):
        (model, optimizer), options = make(), dict[str, Any](cache=tmp_path, parallel=auto, schedule=ws.Schedule(FAST))
        if start == 3:
            options = {"parallel": ws.Plan.load(tmp_path / "plan.json"), "schedule": ws.Schedule(FAST)}
        step = ws.compile(train, progress=None, **options) if start else train
        losses.append([step(model, optimizer, x, y) for x, y in copy.deepcopy(one.batches)])
        if isinstance(step, ws.CompiledStep):
            assert step.plan is not None
            assert step.local_graph is not None
            assert step.plan.objective is not None
            assert set(tiles(step.local_graph)) == {step.plan.objective.saving.tiles}
            assert ws.peak_memory(step.local_graph).size_bytes <= 1_000_000
            programs.append(str(step.local_graph))
            step.plan.save(tmp_path / "plan.json")
            monkeypatch.setattr(choose_strategy, "_chosen", None)
    assert len({*programs}) == 1
    for found in losses[1:]:
        torch.testing.assert_close(found, losses[0], rtol=0, atol=1e-10)
