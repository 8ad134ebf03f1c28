"""What all tests share: one thread, no network, golden files, and no process left behind."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compile in the test's own process, not in a pool of helpers

import multiprocessing
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

TESTS = Path(__file__).parent
TIERS = ("unit", "golden", "op_db", "dist", "gpu")
MARK = "WHOLESTEP_TEST"


@pytest.fixture
def double() -> Iterator[None]:
    """Tensors are made in float64, from one seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the golden files with what the tests produce")
    parser.addoption("--all-ops", action="store_true", help="tests/op_db: every op, not those of the day")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, which is its folder; slow tests run where `-m` names them."""
    no_gpu = pytest.mark.skip(reason="no GPU")
    slow = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "gpu" and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(slow)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is literally what tests/golden/<name>.txt holds; `--accept` rewrites that file."""
    folder = TESTS / "golden"

    def check(name: str, text: str) -> None:
        file = folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--accept"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{file.relative_to(TESTS.parent)} is missing: read the text, then run pytest --accept"
        assert text == file.read_text(), f"{file.relative_to(TESTS.parent)} differs: if right, run pytest --accept"

    return check


def kill_marked(value: str) -> list[int]:
    """Kill every process whose environment has `WHOLESTEP_TEST=value`, orphans included, and return their ids."""
    mark = f"{MARK}={value}".encode()
    killed: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environ.parent.name)
        try:
            if pid != os.getpid() and mark in environ.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        except OSError:  # gone by now, or not ours
            continue
    return killed


@pytest.fixture(autouse=True)
def no_strays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End every process that the test started and left running."""
    before = set(multiprocessing.active_children())
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
        child.join()
    kill_marked(value)
