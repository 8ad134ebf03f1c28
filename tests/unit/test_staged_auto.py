"""`Auto` with a pipeline: what it chooses against every plan simulated by itself, what it refuses, and the command."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import wholestep as ws
from tests.unit.test_plan_stages import run
from tests.unit.test_staged_plan import captured
from wholestep.cost.stage_costs import BlockPrices
from wholestep.planner.bounds import lower_bound
from wholestep.planner.search_result import SearchResult, Status
from wholestep.planner.staged_plan import costs_of_staged, staged
from wholestep.runtime.compile_options import CompileOptions, StepOptions

HARDWARE = ws.Hardware.preset("dgx-h100")


@lru_cache(maxsize=2)
def graph(batch: int = 8) -> ws.TrainGraph:
    return captured(batch, 4)


def chosen(mesh: str, asked: ws.Pipeline, **options: Any) -> SearchResult:
    return ws.Auto(hardware=HARDWARE, pipeline=asked, **options).search(graph(), mesh)


@pytest.mark.full
def test_it_chooses_the_fastest_of_what_it_tried() -> None:
    """Beside plans that are made and simulated one by one."""
    asked = ws.Pipeline(micro_batches=2, schedule="1f1b")
    found = chosen("dp=2,pp=2", asked, styles=("replicate", "zero1"))
    again: dict[str, float] = {}
    for style in ("replicate", "zero1"):
        strategies: list[Any] = [ws.DataParallel(style, axis="dp"), asked]
        local = ws.partition(graph(), ws.plan(graph(), "dp=2,pp=2", strategies, hardware=HARDWARE))
        step = staged(local, BlockPrices(HARDWARE, local.mesh), "1f1b")
        again[style] = costs_of_staged(step).step_s / 2  # two ranks have a batch each
    rows = {row.name: row for row in found.rows}
    for style, step_s in again.items():
        assert rows[f"{style} on dp, 1f1b, 2 micro-batches"].batch_s == pytest.approx(step_s)
    assert found.best.batch_s == pytest.approx(min(again.values()))
    assert 0 < rows["replicate on dp, 1f1b, 2 micro-batches"].bound_s <= found.best.batch_s
    stages, alone = (
        lower_bound(ws.partition(graph(), ws.plan(graph(), mesh, how, hardware=HARDWARE)), HARDWARE).computed_us
        for mesh, how in (("pp=4", ws.Pipeline(micro_batches=2)), ("dp=1", ws.DataParallel("replicate")))
    )
    assert stages < alone / 2, "stages share the work"
    assert found.best.status is Status.CHOSEN
    assert [row.status for row in found.rows].count(Status.CHOSEN) == 1
    assert found.plan.strategies is not None
    assert found.plan.strategies.pipeline is not None


@pytest.mark.full
def test_less_memory_takes_rematerialization_and_then_more_micro_batches() -> None:
    free = chosen("pp=2", ws.Pipeline(schedule="1f1b"))
    needs = {row.name: row.needs_bytes for row in free.rows}
    few, more = needs["1f1b, 2 micro-batches"], needs["1f1b, 4 micro-batches"]
    assert more < few
    for bound, name in ((few, free.best.name), (more, free.best.name), (round(0.9 * more), "1f1b, 4 micro-batches")):
        best = chosen("pp=2", ws.Pipeline(schedule="1f1b"), memory_bytes=bound).best
        assert best.name == name
        assert best.needs_bytes <= bound
        assert (best.batch_s > free.best.batch_s) == (bound < few)
    with pytest.raises(ws.PlanError, match=r"no plan fits: the nearest, 1f1b, \d micro-batches on pp=2, needs"):
        chosen("pp=2", ws.Pipeline(schedule="1f1b"), memory_bytes=1 << 16)


@pytest.mark.full
def test_an_open_mesh_has_stages_or_none() -> None:
    found = chosen("auto=4", ws.Pipeline(micro_batches=2), styles=("replicate", "zero1"), solve=False)
    meshes = {str(row.mesh) for row in found.rows}
    assert meshes >= {"dp=4", "dp=2,pp=2", "pp=4"}
    assert {"interleaved, 2 chunks" in row.name for row in found.rows} == {True, False}
    known = [row.batch_s for row in found.rows if row.costs is not None]
    assert found.best.batch_s == min(known)
    assert found.plan.mesh.size == 4 * found.plan.mesh.pieces
    assert "Auto chose" in str(ws.plan(graph(), "auto=4", ws.Auto(hardware=HARDWARE, pipeline=ws.Pipeline(
        micro_batches=2), styles=("zero1",), solve=False)).notes)  # fmt: skip


def test_compile_takes_its_plan_and_not_itself(tmp_path: Path) -> None:
    asked = ws.Auto(hardware=HARDWARE, pipeline=ws.Pipeline(micro_batches=2, schedule="1f1b"), memory_bytes="1GiB")
    with pytest.raises(ws.PlanError, match=r"Auto\(pipeline=...\) in compile"):
        StepOptions.of(CompileOptions(parallel=asked, mesh="pp=2"))
    ws.plan(graph(), "pp=2", asked).save(tmp_path / "plan.json")
    options = StepOptions.of(CompileOptions(parallel=ws.Plan.load(tmp_path / "plan.json")))
    assert options.strategies.pipeline is not None
    assert options.memory_bytes == 1 << 30


def test_what_is_refused() -> None:
    with pytest.raises(ws.WholestepError, match="pp"):
        chosen("dp=2", ws.Pipeline())


def test_the_command(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--mesh", "pp=2", "--auto", "--schedule", "1f1b", "--json", str(tmp_path / "plan.json"))
    assert code == 0, said
    assert "1f1b, 2 micro-batches" in said
    assert "chosen" in said
    assert "stages on pp" in said
    found = ws.Plan.load(tmp_path / "plan.json")
    assert found.strategies is not None
    assert found.strategies.pipeline is not None


@pytest.mark.full
def test_the_command_fits_stages_into_a_memory(tmp_path: Path) -> None:
    def asked(memory: str) -> tuple[int, str]:
        given = ("--micro-batches", "4", "--schedule", "gpipe", "--recompute", "auto", "--memory", memory)
        return run(tmp_path, "--mesh", "pp=2", *given)

    code, said = asked("3.72MB")
    assert code == 0, said
    assert "peak a GPU  3.7 MB of 3.7 MB" in said
    code, said = asked("3MB")
    assert code != 0
    assert "stage 0 needs at least 3.7 MB on a rank" in said
