"""What is computed in a copy of the process is what the process itself would compute."""

import os
import sys
import time
from threading import Event

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.planner.ahead import PATIENCE_S, Ahead, usable_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")


def _computes() -> str:
    """For more than a second."""
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    return "done"


def test_a_copy_answers_fails_is_dropped_or_given_up() -> None:
    answers, fails, refused = Ahead(os.getppid), Ahead(lambda: 1 / 0), Ahead(lambda: lambda: 3)
    assert answers.result() == os.getpid()
    assert fails.result() is None
    assert refused.result() is None, "a function cannot be sent"
    dropped, hung, slow = Ahead(Event().wait), Ahead(Event().wait), Ahead(_computes)
    dropped.drop()
    assert hung.result(patience_s=0.1) is None
    assert slow.result(patience_s=0.7) == "done", "it is waited for while it computes"
    assert (hung.silent, fails.silent) == (True, False)
    for copy in (answers, fails, refused, dropped, hung, slow):
        with pytest.raises(ChildProcessError):
            os.waitpid(copy.process, os.WNOHANG)
    assert usable_cores() >= 1


@pytest.mark.full
def test_a_search_on_two_cores_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, their costs and the plan; some hold too much."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(12)]
        model, x = nn.Sequential(*layers), torch.empty(64, 256)
    graph = ws.capture(mean_square, model, torch.optim.AdamW(model.parameters(), fused=True), x)
    begun = list[object]()

    class Noted(Ahead[object]):
        def result(self, patience_s: float = PATIENCE_S) -> object:
            begun.append(found := super().result(patience_s))
            return found

    monkeypatch.setattr("wholestep.planner.search.Ahead", Noted)
    auto = ws.Auto("40MB", ws.Hardware.preset("dgx-h100"), recompute=False)
    one, two = (auto.search(graph, "dp=4,tp=2", cores=cores) for cores in (1, 2))
    assert two.rows == one.rows
    assert {"slower", "peak"} <= {row.status for row in one.rows}
    assert two.plan.to_json() == one.plan.to_json()
    assert any(begun), "else nothing is compared"
