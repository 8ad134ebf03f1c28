"""The shared fixtures do what they promise."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import conftest

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_tier_mark(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("unit")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conftest, "TESTS", tmp_path / "tests")
    return tmp_path / "tests" / "golden"


@pytest.fixture
def accept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda on: monkeypatch.setattr(request.config.option, "accept", on)


def test_golden(folder: Path, accept: Callable[[bool], None], golden: Callable[[str, str], None]) -> None:
    accept(False)
    with pytest.raises(AssertionError, match=r"tests/golden/a/b\.txt is missing"):
        golden("a/b", "one\ntwo")
    accept(True)
    golden("a/b", "one\ntwo")
    assert (folder / "a" / "b.txt").read_text() == "one\ntwo\n"
    accept(False)
    golden("a/b", "one\ntwo\n")
    with pytest.raises(AssertionError, match=r"tests/golden/a/b\.txt differs"):
        golden("a/b", "one\nTwo")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_marked_processes_are_killed() -> None:
    stray = subprocess.Popen(SLEEPER)
    other = subprocess.Popen(SLEEPER, env={})
    assert conftest.kill_marked(os.environ[conftest.MARK]) == [stray.pid]
    assert stray.wait(timeout=10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_orphans_are_killed() -> None:
    parent = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    command = [sys.executable, "-c", parent, *SLEEPER]
    orphan = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout)
    assert conftest.kill_marked(os.environ[conftest.MARK]) == [orphan]
