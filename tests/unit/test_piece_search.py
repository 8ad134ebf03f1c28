"""The number of micro-batches that a budget gets: the fastest that fits, with the numbers of one device."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.together import OneDevice, compare
from wholestep.errors import BackendError, BudgetError, PlanError
from wholestep.graph.loop import loop_of
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.strategies import compose
from wholestep.planner.evaluate import piece_counts
from wholestep.planner.piece_search import PieceSearch
from wholestep.planner.search_result import SearchResult, explained
from wholestep.units import parse_bytes

SLOW = ws.Hardware.measured(link_us=2_000.0, link_bytes_per_us=50.0)
FAST = ws.Hardware.measured(link_us=1.0, link_bytes_per_us=1e6)
ROWS, WIDTH = 512, 16
AUTO = ws.MicroBatches("auto")


def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"].masked_fill(batch["x"][:, 0] < 0, -100))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def make() -> tuple[nn.Module, Optimizer]:
    layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())]
    model = nn.Sequential(*layers).double()
    return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


@lru_cache(maxsize=2)
def one_device(rows: int = ROWS) -> OneDevice:
    generator = torch.Generator().manual_seed(3)

    def batch() -> dict[str, Tensor]:
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.randint(0, WIDTH, (rows,), generator=generator)}

    return OneDevice(make, train, [(batch(),) for _ in range(2)])


def graph() -> ws.TrainGraph:
    return one_device().capture.graph


def final(strategies: Any, mesh: str, hardware: ws.Hardware = FAST) -> ws.LocalGraph:
    """The program of a rank after all passes."""
    return ws.run_passes(ws.partition(graph(), ws.plan(graph(), mesh, strategies)), ws.default_passes(hardware))


@lru_cache(maxsize=8)
def peak_of(style: str) -> int:
    return ws.peak_memory(final(data(style), "dp=2")).size_bytes


def data(style: str, again: bool | None = False, kept: int = 1 << 30) -> ws.DataParallel:
    return ws.DataParallel(style, semantics="global", reshard_after_forward=again, keep_gathered_bytes=kept)


@lru_cache(maxsize=8)
def searched(style: str, share: float, hardware: ws.Hardware = FAST, may_regather: bool = True) -> SearchResult:
    asked = PieceSearch(compose([data(style), AUTO]), int(share * peak_of(style)), may_regather)
    return asked.search(graph(), ws.Mesh("dp=2"), hardware=hardware)


def test_the_numbers_that_are_tried() -> None:
    assert piece_counts(12) == [2, 3, 4, 6, 12]
    assert piece_counts(13) == [2, 4, 7, 13]
    for rows in range(1, 200):
        found = piece_counts(rows)
        assert all(len(torch.arange(rows).chunk(n)) == n for n in found), "each is a number of pieces that is made"
        assert all(b <= 2 * a for a, b in zip([1, *found], found, strict=False))
        assert (found or [1])[-1] == rows


@pytest.mark.parametrize("style", ["zero1", pytest.param("fully_shard", marks=pytest.mark.full)])
def test_numbers_and_memory_of_what_is_chosen(style: str) -> None:
    """Numbers are those of one device; bytes are as predicted, while it runs."""
    found = searched(style, 0.5)
    strategies = found.best.strategies
    assert strategies is not None
    assert strategies.pieces > 1
    same = compare(one_device(), "dp=2", strategies)
    assert same.worst < 1e-10, f"{same.where} differs by {same.worst:.1e}"
    with fake_group(2) as group:
        local = ws.run_passes(ws.partition(graph(), found.plan), [Reinplace()])
        predicted, measured = predicted_and_measured(local, group, exchange=False)
    assert abs(predicted.size_bytes / measured - 1) < 0.05
    budget = int(0.5 * peak_of(style))
    local = ws.partition(graph(), found.plan)
    made = ws.run_passes(local, ws.default_passes(FAST, memory_bytes=budget))
    assert ws.peak_memory(made).size_bytes == found.best.needs_bytes <= budget


@pytest.mark.full
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8, 1.1])
@pytest.mark.parametrize("hardware", [SLOW, FAST], ids=["slow", "fast"])
def test_no_number_that_fits_is_faster(hardware: ws.Hardware, share: float) -> None:
    """Each number of pieces, kept or gathered again, planned and simulated by itself."""
    budget, times = int(share * peak_of("fully_shard")), dict[str, float]()
    for pieces in [1, *piece_counts(ROWS // 2)]:
        for again in (False, True):
            local = final([data("fully_shard", again), ws.MicroBatches(pieces)], "dp=2", hardware)
            if ws.peak_memory(local).size_bytes <= budget:
                times[f"{pieces}, {again}"] = ws.simulate(local, hardware).step_us / 1e6
    assert times
    found = searched("fully_shard", share, hardware)
    assert found.best.batch_s <= min(times.values()) * (1 + 1e-9), times
    assert found.best.needs_bytes <= budget


@pytest.mark.full
def test_what_is_gathered_once_and_what_for_each_piece() -> None:
    """A slow link gathers once, and more pieces pay for it; where that does not fit, as much as fits is kept."""
    gathers = {
        name: final(found.best.strategies, "dp=2").collectives()["all_gather"].count
        for name, found in (("once", searched("fully_shard", 0.5, SLOW)), ("forced", searched("zero1", 0.5, SLOW)))
    }
    assert gathers["once"] <= gathers["forced"] + 1
    tight = searched("fully_shard", 0.5, SLOW).rows
    kept = [row for row in tight if "of parameters kept" in row.name]
    assert kept, [row.name for row in tight]


def test_recomputing_wins_where_pieces_are_dear() -> None:
    """Each op takes a long start: what is computed twice are few ops, what runs in pieces are all."""
    late = ws.Hardware.measured(link_us=1.0, link_bytes_per_us=1e6, launch_us=10_000.0)
    found = searched("zero1", 0.8, late)
    assert found.best.pieces == 1
    assert found.best.rematerialized
    assert any(row.pieces > 1 and row.costs is not None for row in found.rows)


def test_the_plan_says_what_was_tried() -> None:
    found = searched("zero1", 0.5)
    notes = explained(found).notes
    notes = notes[:-1] if found.best.rematerialized else notes
    head, *others = notes[-len(found.rows) :]
    assert head.startswith(f'MicroBatches("auto") chose zero1, {found.best.pieces} micro-batches of ')
    assert any(note.startswith("zero1: holds ") and note.endswith(" too much") for note in others)
    assert len(others) == len(found.rows) - 1


@pytest.mark.full
def test_auto_cuts_what_does_not_fit() -> None:
    budget = int(0.5 * peak_of("zero1"))
    auto = ws.Auto(budget, FAST, data=data("replicate"), styles=("zero1", "zero2"), solve=False, micro_batches=AUTO)
    found = auto.search(graph(), "dp=2")
    assert found.best.pieces > 1
    assert found.best.needs_bytes <= budget
    assert any(row.name.startswith("zero2") and row.pieces > 1 for row in found.rows), "shards of gradients accumulate"
    assert found.best.batch_s <= searched("zero1", 0.5).best.batch_s * (1 + 1e-9)
    whole = ws.Auto(4 * peak_of("zero1"), FAST, data=data("replicate"), solve=False, micro_batches=AUTO)
    assert whole.search(graph(), "dp=2").best.pieces == 1, "what fits is not cut"
    four = ws.Auto(hardware=FAST, data=data("replicate"), solve=False, micro_batches=ws.MicroBatches(4))
    assert four.search(graph(), "dp=2").plan.mesh.pieces == 4


@pytest.mark.full
def test_the_budget_that_is_named_is_enough() -> None:
    def search(budget: int) -> SearchResult:
        auto = ws.Auto(budget, FAST, data=data("replicate"), styles=("zero1",), solve=False, micro_batches=AUTO)
        return auto.search(graph(), "dp=2")

    stored = max(row.costs.rest_bytes for row in searched("zero1", 0.5).rows if row.costs is not None)
    with pytest.raises(BudgetError) as caught:
        search(int(1.01 * stored))
    assert "micro-batches on dp=2, needs " in str(caught.value)
    named = str(caught.value).split("memory_bytes='")[1].split("'")[0]
    assert search(parse_bytes(named)).best.pieces > 1


def test_compiled() -> None:
    """The choice of the first call stays, and a batch that it does not serve is refused."""
    budget = int(0.6 * ws.peak_memory(final(ws.DataParallel("replicate"), "dp=1")).size_bytes)
    found: list[list[Tensor]] = []
    step, (model, optimizer) = ws.compile(train, parallel=AUTO, memory_bytes=budget), make()
    for run in (train, step):
        torch.manual_seed(0)
        model, optimizer = make()
        results = [run(model, optimizer, batch) for (batch,) in one_device().batches]
        found.append([*results, *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
    assert step.plan is not None
    assert step.local_graph is not None
    assert ws.peak_memory(step.local_graph).size_bytes <= budget
    assert step.strategies.pieces > 1
    assert [loop.pieces for n in step.local_graph.graph.nodes if (loop := loop_of(n))] == 2 * [step.strategies.pieces]
    assert any(note.startswith('MicroBatches("auto") chose ') for note in step.plan.notes)
    (batch,) = one_device().batches[0]
    with pytest.raises(PlanError, match="the step needs at least"):
        step(model, optimizer, {name: torch.cat(20 * [value]) for name, value in batch.items()})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ws.MicroBatches("many"), PlanError, "MicroBatches(pieces='many')"),  # type: ignore[arg-type]
        (lambda: ws.compile(train, parallel=AUTO), PlanError, 'MicroBatches("auto") without a budget of memory'),
        (lambda: ws.plan(graph(), "dp=1", AUTO), PlanError, 'MicroBatches("auto") without a budget of memory'),
        (lambda: ws.Auto(micro_batches=AUTO), PlanError, "without memory_bytes"),
        (
            lambda: ws.plan(graph(), "pp=2", [ws.Pipeline(), AUTO]),
            PlanError,
            'MicroBatches("auto") with Pipeline',
        ),
        (
            lambda: ws.compile(train, parallel=[ws.TensorParallel("auto"), AUTO], memory_bytes=1000, mesh="tp=2"),
            PlanError,
            'MicroBatches("auto") with TensorParallel("auto")',
        ),
        (
            lambda: ws.compile(train, parallel=AUTO, memory_bytes=1000, backend="inductor"),
            BackendError,
            "backend 'inductor' with MicroBatches('auto')",
        ),
        (
            lambda: ws.compile(train, parallel=ws.Auto(1000, micro_batches=AUTO), backend="inductor"),
            BackendError,
            "backend 'inductor' with MicroBatches('auto')",
        ),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)
