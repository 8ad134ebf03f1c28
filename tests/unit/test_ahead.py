"""What is computed in a copy of the process is what the process itself would compute."""

import os
import sys

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.planner.ahead import Ahead, usable_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


def test_a_copy_answers_fails_or_is_dropped() -> None:
    assert Ahead(lambda: [os.getpid() == os.getppid(), 3]).result() == [False, 3]
    assert Ahead(lambda: 1 / 0).result() is None
    assert Ahead(lambda: lambda: 3).result() is None, "a function cannot be sent"
    Ahead(lambda: [None for _ in iter(int, 1)]).drop()
    hung = Ahead(lambda: [None for _ in iter(int, 1)])
    assert hung.result(patience_s=0.1) is None
    assert hung.silent
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert usable_cores() >= 1


def test_a_search_on_two_cores_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, their costs and the plan; some hold too much."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(12)]
        model, x = nn.Sequential(*layers), torch.empty(64, 256)
    graph = ws.capture(mean_square, model, torch.optim.AdamW(model.parameters(), fused=True), x)
    begun = list[object]()

    class Noted(Ahead[object]):
        def result(self) -> object:
            begun.append(found := super().result())
            return found

    monkeypatch.setattr("wholestep.planner.search.Ahead", Noted)
    auto = ws.Auto("40MB", ws.Hardware.preset("dgx-h100"), recompute=False)
    one, two = (auto.search(graph, "dp=4,tp=2", cores=cores) for cores in (1, 2))
    assert two.rows == one.rows
    assert {"slower", "peak"} <= {row.status for row in one.rows}
    assert two.plan.to_json() == one.plan.to_json()
    assert any(begun), "else nothing is compared"
