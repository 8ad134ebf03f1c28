"""A step of two ranks, measured node by node beside its prediction: nothing about what it trains changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import RankError, run_ranks
from tests.dist.test_memory import make, train
from tests.stage_models import batches, maker
from tests.stage_models import train as of_stages


def _profiled(rank: int, world: int, folder: str) -> dict[str, Any]:
    model, optimizer = make()
    twin, other = make()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard"))
    plain = ws.compile(train, parallel=ws.DataParallel("fully_shard"))
    found = step.profile(model, optimizer, x, repeat=3)
    for _ in range(5):
        plain(twin, other, x)
    if rank == 0:
        found.save(f"{folder}/step.json")
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return {
        "same": all(torch.equal(whole(a), whole(b)) for a, b in pairs),
        "streams": [made.streams for made in (found.predicted, found.measured)],
        "sent": [sum(span.stream == "dp" for span in made.spans) for made in (found.predicted, found.measured)],
        "collectives": sum(one.count for one in step.local_graph.collectives().values()),  # type: ignore[union-attr]
        "hardware": step.schedule is not None,
    }  # fmt: skip


def test_a_profile_on_two_ranks(tmp_path: Path):
    for found in run_ranks(_profiled, 2, str(tmp_path)):
        assert found["same"]
        assert found["hardware"]
        assert found["streams"] == [("compute", "wait", "dp")] * 2
        assert found["sent"] == [found["collectives"]] * 2
    names = [
        e["args"]["name"]
        for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    ]
    assert "predicted" in names
    assert "measured" in names


def _across(rank: int, world: int) -> None:
    model, optimizer = make()
    step = ws.compile(train, parallel=ws.DataParallel("replicate"), schedule="across_steps")
    step.profile(model, optimizer, torch.ones(8, 64))


def test_a_step_that_ends_in_the_next_one_is_refused():
    with pytest.raises(RankError, match="has no timeline of its own"):
        run_ranks(_across, 2)


def _of_stages(rank: int, world: int, mesh: str, folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, optimizer = maker(3, False, 0.0)()
    parallel: list[Any] = [ws.Pipeline(micro_batches=4, schedule="zero_bubble")]
    if "dp" in mesh:
        parallel.append(ws.DataParallel("zero1", axis="dp", semantics="global", inputs="global"))
    step = ws.compile(of_stages, parallel=parallel, mesh=mesh)
    data = batches(8, 1)[0]
    found = step.profile(model, optimizer, *data, repeat=2)
    if rank == 0:
        found.save(f"{folder}/stages.json")
    assert step.plan is not None
    graph = ws.capture(of_stages, *maker(3, False, 0.0)(), *data)
    plan = ws.plan(graph, mesh, parallel)
    ws.report(f"{folder}/page{rank}.html", plan, graph, measured=found.measured)
    spans = [
        {(one.stream, one.op) for one in made.spans if one.name.endswith(tuple(f"of piece {n}" for n in range(4)))}
        for made in (found.predicted, found.measured)
    ]
    ends = max(one.start_us + one.us for one in found.measured.spans)
    busy = [found.measured.busy_us(stream) for stream in found.measured.streams]
    took = found.measured.simulated
    return {
        "spans": spans, "streams": [made.streams for made in (found.predicted, found.measured)], "text": str(found),
        "within": 0 < ends <= took.step_us, "idle": took.exposed_us / took.step_us,
        "busy": [us / took.step_us for us in busy], "page": Path(f"{folder}/page{rank}.html").read_text(),
    }  # fmt: skip


@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("dp=2,pp=2", marks=pytest.mark.full)])
def test_a_profile_of_stages(mesh: str, tmp_path: Path) -> None:
    """All ranks have the same picture: each block of each stage for every piece, measured as simulated."""
    ranks = run_ranks(_of_stages, 4 if "," in mesh else 2, mesh, str(tmp_path))
    for found in ranks:
        assert found["text"] == ranks[0]["text"]
        assert found["streams"] == [("stage 0", "stage 1")] * 2
        predicted, measured = found["spans"]
        assert predicted == measured
        assert {stream for stream, _ in measured} == {"stage 0", "stage 1"}
        assert found["within"]
        assert abs(sum(found["busy"]) / 2 + found["idle"] - 1) < 1e-9
        assert all(0 < share < 1 for share in found["busy"])
        assert "stage 0: backward" in found["text"]
        assert "stage 1, measured" in found["page"]
    names = [e["args"]["name"] for e in json.loads((tmp_path / "stages.json").read_text())["traceEvents"]
             if e["ph"] == "M" and "name" in e["args"]]  # fmt: skip
    assert names.count("stage 0") == names.count("stage 1") == 2
    assert {"predicted", "measured"} <= set(names)
