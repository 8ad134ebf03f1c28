"""The table of starts has a row for each thing that a script does first."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import start


@pytest.mark.full
def test_a_table_of_one_layer() -> None:
    command = [sys.executable, start.__file__, "--layers", "1", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    head, _, *lines = done.stdout.splitlines()
    assert head == "| CPU seconds | 1 layers |"
    rows = {name: float(value) for _, name, value, _ in (map(str.strip, line.split("|")) for line in lines)}
    assert list(rows) == [row for way, names in start.WAYS.items() if way != "aot_eager" for row in names]
    assert Path(start.SOURCE, "wholestep").is_dir()
