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


def _of_stages(rank: int, world: int) -> None:
    step = ws.compile(of_stages, parallel=ws.Pipeline(micro_batches=4), mesh="pp=2")
    step.profile(*maker(3, False, 0.0)(), *batches(8, 1)[0])


def test_a_step_with_stages_is_refused() -> None:
    with pytest.raises(RankError, match=r"step\.profile of a Pipeline, whose ranks wait for each other"):
        run_ranks(_of_stages, 2)
