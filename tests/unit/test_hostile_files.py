"""Files made by a stranger: nothing in them runs, nothing hangs, and what is wrong is one of wholestep's own errors.

Each attempt runs in a process of its own, with bounded memory and time.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import multiprocessing
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import wholestep as ws
from tests.hostile import HOSTILE, Gadget
from tests.steps import mean_square as train_step
from wholestep.cli import app

SECONDS = 20.0
MORE_BYTES = 2 << 30  # of memory that an attempt may take beside what the process has
FOLDER = "step-00000002"


def trained(root: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = ws.compile(train_step)
    for _ in range(2):
        step(model, optimizer, torch.randn(6, 4))
        ws.save(root, step, extra={"calls": step.calls}, keep=1)
    return step, model, optimizer


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module, torch.optim.Optimizer, Path]:
    root = tmp_path_factory.mktemp("intact") / "runs"
    return *trained(root), root


def state_of(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), step.calls, torch.get_rng_state()], buffer)
    return buffer.getvalue()


def attempt(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process, or a text that says how it ended."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
        try:
            said = work()
        except BaseException as error:  # noqa: BLE001
            said = f"raw {type(error).__name__}: {error}"
        theirs.send(said[:10_000])

    process = context.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else f"nothing after {SECONDS} s"
    except EOFError:
        process.join()
        return f"ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def outcome(call: Callable[[], object]) -> str:
    """ "loaded", or the first line of the error of wholestep's own that `call` ends in."""
    try:
        call()
    except ws.WholestepError as error:
        return f"refused: {error.found}"
    return "loaded"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_checkpoint(name: str, intact: Any, tmp_path: Path) -> None:
    step, model, optimizer, root = intact
    canary = tmp_path / "canary"
    shutil.copytree(root, tmp_path / "runs", symlinks=True)
    folder = tmp_path / "runs" / FOLDER
    HOSTILE[name](folder, canary)
    before = state_of(step, model, optimizer)

    def into_a_step() -> str:
        said = outcome(lambda: ws.load(folder.parent, step))
        changed = state_of(step, model, optimizer) != before
        return f"{said}, and the state has changed" if changed and said != "loaded" else said

    def into_nothing() -> str:
        return outcome(lambda: ws.load(folder))

    def exported() -> str:
        return outcome(lambda: ws.export(tmp_path / "exported", folder))

    said = [attempt(work) for work in (into_a_step, into_nothing, exported)]
    assert not canary.exists(), said
    wrong = [text for text in said if not text.startswith(("refused: ", "loaded"))]
    wrong += [text for text in said if "has changed" in text]
    assert not wrong


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_checkpoint_at_the_command(name: str, intact: Any, tmp_path: Path) -> None:
    root, canary = intact[-1], tmp_path / "canary"
    shutil.copytree(root, tmp_path / "runs", symlinks=True)
    folder = tmp_path / "runs" / FOLDER
    HOSTILE[name](folder, canary)

    def shown() -> str:
        codes = set[int]()
        for args in ([folder.parent], [folder, "--verify"], [folder, "--compare", root]):
            with contextlib.redirect_stderr(io.StringIO()):
                done = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                return f"raw {args[1:]}: {done.exception!r}"
            codes.add(done.exit_code)
            if "\x1b" in done.output:
                return "raw escape"
        return f"status {sorted(codes)}"

    said = attempt(shown)
    assert not canary.exists()
    assert said.startswith("status "), said


def test_gadgets_do_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """The canary is a good one."""
    for number, call in enumerate((None, exec)):
        canary = tmp_path / str(number)
        pickle.loads(pickle.dumps(Gadget(canary, call) if call else Gadget(canary)))
        assert canary.exists()
