"""tools/names.py counts parameters and assigned names, and fails above its share."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "names.py"
EXAMPLE = """
_made = 1

class Box:
    held: int

    def open(self, whole, *, size):
        return [one for one in whole if found(one.given)]
"""
NAMES = ["a.py:2 <module> _made", "a.py:5 Box held", "a.py:7 Box.open whole", "a.py:8 Box.open one"]


def _run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *flags, folder], capture_output=True, text=True, timeout=60)


def test_names_that_are_bound_count_and_those_that_are_read_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(EXAMPLE)
    names = [f"{tmp_path.name}/{name}" for name in NAMES]
    within, over = _run(tmp_path, "--most", "70"), _run(tmp_path, "--brief", "--most", "60")
    assert (within.returncode, over.returncode) == (0, 1)
    share = "4 of 6 bound names say nothing: 66.67 %"
    assert within.stdout.splitlines() == [*names, f"{share}, within the limit of 70 %"]
    assert over.stdout.splitlines() == [*names, f"{share}, TOO MANY, the limit is 60 %"]


def test_brief_prints_no_names_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("made = 1\nsize = made\n")
    run = _run(tmp_path, "--brief", "--most", "50")
    assert (run.returncode, len(run.stdout.splitlines())) == (0, 1)
