"""Saved activations in host memory: the same bits, fewer bytes on the device, and time where the link is slow."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from tests.simulate import Simulation
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.unit.test_recompute import bits, captured, parallel, same
from tests.unit.test_recompute_layers import Block
from tests.unit.test_tile_rows import CLASSES, LOSSES, STRATEGIES, Deep, Llama, make, step_of
from wholestep.partition.host_copies import fetched, kept, kept_on_host
from wholestep.partition.stage_program import stage_program
from wholestep.passes.fit_memory import FitMemory
from wholestep.passes.recompute_layers import RecomputeLayers

H100 = ws.Hardware.preset("dgx-h100")
FULL, ALL = RecomputeLayers("full"), ws.OffloadSaved(1, over_bytes=1)
ROWS, WIDTH, LAYERS = 8192, 64, 9
VALUE = ROWS * WIDTH * 4


def copies(local: ws.LocalGraph) -> int:
    """The number of values that go to the host; each comes back."""
    targets = [node.target for node in local.graph.nodes]
    assert targets.count(kept_on_host) == targets.count(kept) == targets.count(fetched)
    return targets.count(kept)


@pytest.mark.parametrize("case", ["uneven", "reshaped", "micro-batches", "micro-clip"])
def test_the_same_bits(case: str) -> None:
    """Of each model, also with loops of its own, checkpoints and dropout."""
    capture = captured(case, "AdamW-plain")
    plan = ws.plan(capture.graph, "dp=2", parallel("fully_shard", True))
    local = ws.partition(capture.graph, plan)
    changed = ws.run_passes(local, [ALL, *ws.default_passes()])
    assert same(bits(capture, plan, changed, case), bits(capture, plan, local, case))


def three_steps(kind: Callable[[], nn.Module]) -> OneDevice:
    x, y = torch.randint(CLASSES, (2, 3, 4, 38), generator=torch.Generator().manual_seed(0))
    return OneDevice(partial(make, kind), step_of(LOSSES["mean"]), list(zip(x, y, strict=True)))


@pytest.mark.smoke
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("kind", [Deep, Llama])
def test_the_same_bits_beside_recomputation_and_tiles(kind: Callable[[], nn.Module], tiles: int) -> None:
    one = three_steps(kind)
    planned = ws.plan(one.capture.graph, "dp=2", ws.DataParallel("fully_shard"))
    local, tiled = ws.partition(one.capture.graph, planned), () if tiles == 1 else (ws.TileRows(tiles, 1),)
    ended = list[dict[str, Tensor]]()
    for offload in ((), (ALL,)):
        program = ws.run_passes(local, [FULL, *tiled, *offload, *ws.default_passes(H100)])
        assert (copies(program) > 0) == bool(offload)
        simulation = Simulation(one.capture, planned, program)
        simulation.start()
        for x, y in one.batches:
            simulation.step([{"x": x.roll(rank, 1), "y": y.roll(rank, 0)} for rank in range(2)])
        ended.append({name: simulation.whole(name) for name in one.state})
    assert all(torch.equal(ended[1][name], value) for name, value in ended[0].items())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["context", "heads", "both"])
def test_ranks_that_share_sequences(name: str) -> None:
    passes = [FULL, ws.TileRows(3, 1), ALL]
    found = compare(three_steps(Llama), *STRATEGIES[name], edit=lambda local: ws.run_passes(local, passes))
    assert copies(found.local)
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


def test_calls() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    twin = copy.deepcopy(model)
    optimizer, other = (AdamW(each.parameters(), lr=0.01) for each in (model, twin))
    step = ws.compile(mean_square, passes=lambda passes: [FULL, ALL, *passes], progress=None)
    plain = ws.compile(mean_square, progress=None)
    for rows in (6, 6, 9):
        x = torch.randn(rows, 16)
        assert torch.equal(step(model, optimizer, x), plain(twin, other, x))
        assert step.local_graph is not None
        assert copies(step.local_graph) == 2
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@cache
def layers() -> ws.TrainGraph:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))), torch.empty(ROWS, WIDTH)
    return ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), 0.1), x)


@cache
def program(offload: int, hardware: ws.Hardware = H100) -> ws.LocalGraph:
    """Of layers whose values are large beside their parameters."""
    graph = layers()
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate"), hardware=hardware))
    saved = (ws.OffloadSaved(offload, VALUE),) if offload else ()
    return ws.run_passes(local, [FULL, *saved, *ws.default_passes(hardware)])


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_device_holds_what_layers_ahead_have_saved(ahead: int) -> None:
    """The input of the first layer is the batch; the layer that computes reads one of the others."""
    held = [ws.peak_memory(program(offload)).size_bytes for offload in (0, ahead)]
    freed = LAYERS - 2 - ahead
    assert abs(held[0] - held[1] - freed * VALUE) < VALUE, (held, freed * VALUE)
    moved = program(ahead)
    assert copies(moved) == LAYERS - 1 - ahead


def test_a_smaller_budget_is_met() -> None:
    model, x = nn.Sequential(*(Block(16) for _ in range(6))), torch.randn(2048, 16)
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), 0.1), x)
    local, budget = ws.partition(graph, ws.plan(graph, "dp=1")), 2_400_000
    first, *rest = ws.default_passes(memory_bytes=budget)
    with pytest.raises(ws.PlanError, match="the step needs at least"):
        ws.run_passes(local, [first, *rest])
    assert isinstance(first, FitMemory)
    program = ws.run_passes(local, [replace(first, after=(ALL, *rest)), ALL, *rest])
    assert copies(program)
    assert ws.peak_memory(program).size_bytes <= budget


def test_time_where_the_link_is_slow() -> None:
    fast, slow, none = (
        replace(H100, device=replace(H100.device, host_bytes_per_us=rate)) for rate in (1e9, VALUE / 5e3, 1.0)
    )
    without, quick, exposed = program(0), ws.simulate(program(1, fast), fast), ws.simulate(program(1, slow), slow)
    alone = ws.simulate(without, H100)
    assert quick.step_us == pytest.approx(alone.step_us, rel=1e-3)
    assert exposed.step_us > 2 * (LAYERS - 3) * 5e3, "each value takes five milliseconds to go, and to come back"
    assert exposed.exposed_us - alone.exposed_us == pytest.approx(exposed.step_us - alone.step_us, rel=1e-2)
    assert ws.simulate(without, none) == alone
    shown = ws.timeline(program(1, slow), slow)
    assert shown.streams[-2:] == ("to host", "to device")
    assert shown.busy_us("to host") == pytest.approx((LAYERS - 2) * 5e3)
    assert "waiting for collectives and copies" in str(shown)


def test_more_layers_ahead_hide_a_slower_link() -> None:
    us = ws.simulate(program(0), H100).step_us / LAYERS / 4  # of the forward of a layer, or less
    machine = replace(H100, device=replace(H100.device, host_bytes_per_us=VALUE / us))
    times = [ws.simulate(program(ahead, machine), machine).step_us for ahead in (1, 3)]
    assert times[1] <= times[0]


def test_what_is_refused() -> None:
    with pytest.raises(ws.PlanError, match=r"OffloadSaved\(ahead=0\)\n  needed: at least one layer"):
        ws.OffloadSaved(0)
    with pytest.raises(ws.PlanError, match="over_bytes='16 mega'"):
        ws.OffloadSaved(over_bytes="16 mega")
    model, x = nn.Sequential(*(Block(8) for _ in range(4))), torch.ones(8, 8)
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), 0.1), x)
    split: list[tuple[str, Any]] = [
        ("dp=1", ws.MicroBatches(2)),
        ("pp=2", ws.Pipeline(micro_batches=2)),
    ]
    for mesh, strategy in split:
        local = ws.partition(graph, ws.plan(graph, mesh, strategy))
        local = stage_program(local, 0) if mesh == "pp=2" else local
        with pytest.raises(ws.PlanError, match=r"OffloadSaved\(1\) in a step with stages or micro-batches"):
            ws.run_passes(local, [ALL])
    local = ws.partition(graph, ws.plan(graph, "dp=1"))
    with pytest.warns(
        UserWarning, match=r"OffloadSaved\(1\) copies nothing: no more than 1 of the layers saves 16.8 MB"
    ):
        ws.OffloadSaved()(local)
    with pytest.raises(ws.GraphError, match="pass RecomputeLayers must be applied before OffloadSaved"):
        ws.run_passes(local, [ALL, FULL])
