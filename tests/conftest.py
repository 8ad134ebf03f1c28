"""What all tests share: one thread, no network, tiers, golden files, and no process left behind."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("WHOLESTEP_VERIFY", "sizes")  # no repeated traces, but the proof of programs for all sizes
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compile in the test's own process, not in a pool of helpers

import datetime
import gc
import inspect
import logging
import multiprocessing
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
# pytest hands a handler to each logger that does not propagate; with one, torch notes the stack of each fake tensor.
logging.getLogger("torch.__trace").propagate = True
if not torch.cuda.is_available():  # torch.manual_seed formats the stack of each call, for when these devices start
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None

TESTS = Path(__file__).parent
TIERS = ("unit", "golden", "op_db", "dist", "gpu")
MARK = "WHOLESTEP_TEST"
GOLDEN_RATIO = 0.6180339887  # its multiples, without the whole part, spread days evenly over the files


@pytest.fixture
def double() -> Iterator[None]:
    """Tensors are made in float64, from one seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(torch.float32)


def today() -> str:
    """The date that samples follow, in UTC; WHOLESTEP_DAY=2026-01-31 takes another one."""
    return os.environ.get("WHOLESTEP_DAY") or datetime.datetime.now(datetime.UTC).date().isoformat()


def from_another_file_each_day(items: list[pytest.Item], day: str) -> list[pytest.Item]:
    """`items` in their order, beginning with a file that follows from the day and going round."""
    files = list(dict.fromkeys(item.path for item in items))
    if not files:
        return items
    first = int(datetime.date.fromisoformat(day).toordinal() * GOLDEN_RATIO % 1 * len(files))
    place = {path: number for number, path in enumerate(files[first:] + files[:first])}
    return sorted(items, key=lambda item: place[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the golden files with what the tests produce")
    parser.addoption("--all-ops", action="store_true", help="tests/op_db: every op, not those of the day")
    parser.addoption(
        "--minutes", type=float, help="begin no test after so many minutes; each day begins with another file"
    )


class Until:
    """A plugin, so that it holds for tests of every folder: no test begins after `end` of time.monotonic()."""

    def __init__(self, end: float) -> None:
        self.end = end

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip("no time left")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("--minutes")
    if minutes is not None:
        config.pluginmanager.register(Until(time.monotonic() + 60 * minutes))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what torch and the tests are made of is not walked again by each collection


@pytest.fixture(autouse=True, scope="module")
def imports_frozen() -> None:
    """What tests before have imported, or keep, is not walked again either: tens of milliseconds each time."""
    gc.collect()
    gc.freeze()


def covering(rows: Sequence[Mapping[str, int]]) -> set[int]:
    """Positions of a few of `rows` in which every value of every key occurs, in many combinations."""
    uses = Counter({pair: 0 for row in rows for pair in row.items()})
    together: Counter[Any] = Counter()
    chosen: set[int] = set()
    while not all(uses.values()):

        def gain(n: int) -> tuple[int, int, int]:
            counts = [uses[pair] for pair in rows[n].items()]
            return counts.count(0), -sum(counts), -sum(together[two] for two in combinations(rows[n].items(), 2))

        best = max(range(len(rows)), key=gain)
        chosen.add(best)
        uses.update(rows[best].items())
        together.update(combinations(rows[best].items(), 2))
    return chosen


def few(values: Iterable[Any], of: Callable[[Any], Mapping[str, Any]]) -> list[Any]:
    """`values` for `parametrize`, marked `full` but for those that `covering` chooses by what `of` says of each."""
    values = list(values)
    chosen = covering([{key: hash(value) for key, value in of(one).items()} for one in values])
    return [one if n in chosen else pytest.param(one, marks=pytest.mark.full) for n, one in enumerate(values)]


def mark_crosses(items: list[pytest.Item]) -> dict[str, set[str]]:
    """Mark `full` what a test marked `usual` does not name, and what `covering` leaves out of one marked `crossed`.
    Returns the cases that tests marked `usual` name and do not have.
    """
    crosses: dict[str, list[pytest.Function]] = {}
    unknown: dict[str, set[str]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("full"):
            continue
        usual = item.get_closest_marker("usual")
        if usual:
            unknown.setdefault(item.nodeid.partition("[")[0], {*usual.args}).discard(item.callspec.id)
        if usual and item.callspec.id not in usual.args:
            item.add_marker("full")
            continue
        if item.get_closest_marker("crossed"):
            crosses.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cross in crosses.values():
        chosen = covering([{name: id(value) for name, value in one.callspec.params.items()} for one in cross])
        for number, one in enumerate(cross):
            if number not in chosen:
                one.add_marker("full")
    return {test: cases for test, cases in unknown.items() if cases}


def leaves_out_full(config: pytest.Config) -> bool:
    """What is marked `full` runs where `-m` or a whole name asks for it."""
    return "full" not in config.option.markexpr and not any("[" in arg for arg in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """No items are made of a whole test that is left out: they are half of all."""
    marks = getattr(obj, "pytestmark", ()) if inspect.isfunction(obj) else ()
    return [] if leaves_out_full(collector.config) and any(mark.name == "full" for mark in marks) else None


@pytest.hookimpl(tryfirst=True)  # before -m and -k choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, which is its folder; leave out what is marked `full` unless `-m` names it."""
    no_gpu = pytest.mark.skip(reason="no GPU")
    unknown = mark_crosses(items)
    if unknown and not any("[" in arg for arg in config.args):
        raise pytest.UsageError(f"usual(...) names cases that are none: {unknown}")
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "gpu" and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    if leaves_out_full(config):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    if config.getoption("--minutes") is not None:
        items[:] = from_another_file_each_day(items, today())


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


def kill_marked(value: str, after: int = 0) -> list[int]:
    """Kill every process whose environment has `WHOLESTEP_TEST=value`, orphans included, and return their ids. Those up
    to `after` are not looked at.
    """
    mark = f"{MARK}={value}".encode()
    killed: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            if pid > after and pid != os.getpid() and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        except OSError:  # gone by now, or not ours
            continue
    return killed


def newest_pid() -> int:
    """The last one that the system gave to a process or thread; another number each time where there is no /proc."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[-1])
    except OSError:
        return time.monotonic_ns()


@pytest.fixture(autouse=True)
def no_strays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End every process that the test started and left running."""
    before, pid = set(multiprocessing.active_children()), newest_pid()
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield
    newest = newest_pid()
    if newest == pid:
        return
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
        child.join()
    kill_marked(value, after=pid if newest > pid else 0)  # numbers begin anew at some time
