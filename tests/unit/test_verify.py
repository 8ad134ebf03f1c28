"""What a step reads from anywhere is right in each call, or found by call 8: a trace is repeated and compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.places import PLACES
from wholestep.runtime import repeated_capture

CALLS = 9


NAMES = [name if n % 32 == 0 else pytest.param(name, marks=pytest.mark.full) for n, name in enumerate(PLACES)]


@pytest.mark.parametrize("name", NAMES)
def test_no_place_that_a_step_reads_is_silently_stale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("A_VALUE", raising=False)
    backends = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(backends, "__allow_nonbracketed_mutation_flag", True)  # torch.testing clears it for ever
    read, put, undo = PLACES[name].functions(tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) * read()).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled, x = ws.compile(step, verify=True), torch.ones(2, 2)
    values, wrong, outcome = list[float](), list[int](), "right"
    try:
        for call in range(CALLS):
            values.append(float(read()))
            expected = (model(x) * values[-1]).sum().item()
            if compiled(x).item() != pytest.approx(expected, rel=1e-5):
                wrong.append(call)
            put(2.0 + call)
    except ws.CaptureError:
        outcome = "refused" if call == 0 else "found"
    finally:
        undo()
    if outcome == "right":
        assert len(set(values)) > 1, "the place keeps its value"
        assert wrong == []
    assert outcome == PLACES[name].outcome


@pytest.mark.parametrize(("most_s", "calls"), [(60.0, [2, 5, 8, 17]), (-1.0, [2, 8, 17])])
def test_a_slow_trace_leaves_out_call_five(monkeypatch: pytest.MonkeyPatch, most_s: float, calls: list[int]) -> None:
    monkeypatch.delenv("WHOLESTEP_VERIFY")
    monkeypatch.setattr(repeated_capture, "_QUICK_S", most_s)
    monkeypatch.setattr(repeated_capture, "TUNING", SimpleNamespace(verify_share=1e6))
    model, traced, capture_again = nn.Linear(2, 1), list[int](), repeated_capture.capture_again

    def note(*args: Any) -> Any:
        traced.append(compiled.calls + 1)
        return capture_again(*args)

    monkeypatch.setattr(repeated_capture, "capture_again", note)
    compiled = ws.compile(lambda x: model(x).sum().detach(), model=model)
    for _ in range(18):
        compiled(torch.ones(2, 2))
    assert traced == calls
