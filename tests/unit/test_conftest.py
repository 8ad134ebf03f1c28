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

pytest_plugins = ["pytester"]

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


def test_a_covering_has_each_value_and_is_small() -> None:
    rows = [{"a": a, "b": b, "c": c} for a in range(7) for b in range(3) for c in range(3)]
    chosen = [rows[n] for n in conftest.covering(rows)]
    assert len(chosen) == 7
    assert {pair for row in chosen for pair in row.items()} == {pair for row in rows for pair in row.items()}
    assert len({(row["b"], row["c"]) for row in chosen}) > 3, "short lists meet in several ways"


CROSSED = """
import pytest

@pytest.mark.crossed
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(3))
def test_of_a_cross(a, b):
    pass

@pytest.mark.usual("two")
@pytest.mark.parametrize("case", ["one", "two"])
def test_of_cases(case):
    pass

@pytest.mark.full
def test_of_a_catalogue():
    pass
"""


@pytest.mark.parametrize(
    ("options", "passed", "left"),
    [
        ([], 6, 11),
        (["-m", "full"], 12, 6),
        (["-m", "full or not full"], 18, 0),
        (["-m", "full", "--minutes", "5"], 12, 6),
        (["-k", "cross"], 5, 12),
    ],
)
def test_what_is_full_runs_where_it_is_named(
    pytester: pytest.Pytester, options: list[str], passed: int, left: int
) -> None:
    pytester.makepyfile(CROSSED)
    marks = ["crossed", "usual", "full", *conftest.TIERS]
    pytester.makeini("[pytest]\nmarkers =\n" + "\n".join(f"    {mark}: x" for mark in marks))
    pytester.runpytest_inprocess(*options, plugins=[conftest]).assert_outcomes(passed=passed, deselected=left)


def test_a_usual_case_that_is_none_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CROSSED.replace('usual("two")', 'usual("three")'))
    result = pytester.runpytest_inprocess(plugins=[conftest])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*names cases that are none: *test_of_cases*three*"])


def test_no_test_begins_without_time(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CROSSED)
    pytester.runpytest_inprocess("--minutes", "0", plugins=[conftest]).assert_outcomes(skipped=6, deselected=11)


def test_no_test_of_another_folder_begins_without_time(pytester: pytest.Pytester) -> None:
    for folder, text in {
        "near/conftest.py": "from tests.conftest import *",
        "far/test_far.py": "def test_of_far(): pass",
    }.items():
        path = pytester.path / folder
        path.parent.mkdir()
        path.write_text(text)
    pytester.runpytest_inprocess("--minutes", "0", "near", "far").assert_outcomes(skipped=1)


def test_days_begin_with_other_files(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    one, other = (conftest.from_another_file_each_day(items, day) for day in ("2026-01-01", "2026-01-02"))
    assert {*one} == {*other} == {*items}
    if len({item.path for item in items}) > 3:
        assert one[0].path != other[0].path
