"""The line on a terminal that says what a long first call is doing: when it is there, and that it goes."""

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.runtime import progress

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))  # pytest puts its own in place of sys.stderr
    monkeypatch.setattr(progress, "_QUIET_S", 0.05)
    monkeypatch.setattr(progress, "_REWRITE_S", 0.05)
    monkeypatch.delenv("WHOLESTEP_PROGRESS", raising=False)
    return found


def called(seconds: float = 0.4, fails: bool = False, **options: Any) -> None:
    def slow(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        loss = model(x).square().mean()
        if fails:
            raise RuntimeError("no")
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(3, 3)
    step, optimizer = ws.compile(slow, **options), torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, torch.randn(2, 3))


def test_it_is_rewritten_and_gone_at_the_end(terminal: Terminal) -> None:
    called()
    text = terminal.getvalue()
    assert "\n" not in text
    lines = text.split(ERASE)
    assert lines[0] == lines[-1] == ""
    line = re.compile(r"wholestep compiles slow: ([a-z]+, )?\d+ s")  # between two stages it names none
    assert all(line.fullmatch(one) for one in lines[1:-1]), lines
    assert sum("capture" in line for line in lines) > 2


def test_it_is_gone_where_an_error_ends_the_call(terminal: Terminal) -> None:
    with pytest.raises(ws.CaptureError, match="no"):
        called(fails=True)
    assert "capture" in terminal.getvalue()
    assert terminal.getvalue().endswith(ERASE)


def test_nothing_is_shown_of_what_is_quick(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 60.0)
    called(0.0)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("off", ["option", "variable", "no terminal", "another rank", "own"])
def test_it_is_off(off: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    options: dict[str, Any] = {}
    if off == "variable":
        monkeypatch.setenv("WHOLESTEP_PROGRESS", "0")
    elif off == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif off == "another rank":
        monkeypatch.setattr(progress, "job", lambda: (1, 2))
    else:
        options["progress"] = None if off == "option" else lambda stage, what, seconds: told.append(stage)
    called(**options)
    assert terminal.getvalue() == ""
    assert ("capture" in told) is (off == "own")


def test_a_terminal_that_goes_away_does_no_harm(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(text: str) -> int:
        raise OSError("gone")

    monkeypatch.setattr(terminal, "write", gone)
    called()


def test_a_narrow_terminal_gets_one_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    called()
    assert all(len(line) < 12 for line in terminal.getvalue().split(ERASE))
