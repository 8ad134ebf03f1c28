"""tools/size.py counts code, not comments or docstrings, and fails above its limits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.size import held

TOOL = Path(__file__).resolve().parents[2] / "tools" / "size.py"
EXAMPLE = '''"""Module text
on two lines."""

import os  # counts

# does not count


def f(x):
    """One line."""

    def g():
        return """a
        b"""

    return g
'''


def _run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *flags, folder], capture_output=True, text=True, timeout=60)


def _body(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def test_counts(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(EXAMPLE)
    done = _run(tmp_path / "pkg", "--budget", "99")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "     6  pkg/a.py",
        "     5  pkg/a.py:9 f",
        "     3  pkg/a.py:12 f.g",
        "6 code lines in 1 files, 2 functions",
        "16 lines in all, within the budget of 99",
    ]


def test_the_budget_counts_prose_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Prose."""\n\nx = 1\n')
    (tmp_path / "b.py").write_text("# prose\n")
    assert _run(tmp_path, "--budget", "4").returncode == 0
    done = _run(tmp_path, "--budget", "3")
    assert done.returncode == 1
    assert "4 lines in all, TOO MANY for the budget of 3" in done.stdout


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (_body(60), 0, ""),
        (_body(61), 0, "long (aim below 60)"),
        (_body(81), 1, "TOO LONG (limit 80)"),
        ("x = 1\n" * 400, 0, ""),
        ("x = 1\n" * 401, 0, "long (aim below 400)"),
        ("x = 1\n" * 501, 1, "TOO LONG (limit 500)"),
    ],
)
def test_limits(tmp_path: Path, source: str, status: int, said: str) -> None:
    (tmp_path / "a.py").write_text(source)
    done = _run(tmp_path, "--brief")
    assert done.returncode == status
    assert said in done.stdout
    assert ("long" in done.stdout.lower()) == bool(said)


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    assert _run(tmp_path).returncode == 1


def test_each_room_has_a_budget_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "plan" / "b.py").write_text("x = 1\n" * 3)
    assert held(tmp_path, {"": 1, "plan": 3}, brief=True) == 0
    assert held(tmp_path, {"": 2, "plan": 2}, brief=True) == 1
    assert "     3  plan  TOO LONG (limit 2)" in capsys.readouterr().out.splitlines()
