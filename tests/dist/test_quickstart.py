"""The script of docs/quickstart.md on ranks: a job that was stopped goes on from its checkpoint."""

import re
import shutil
from pathlib import Path

import pytest

from tests.dist.scripts import output_of

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    path = tmp_path / "train.py"
    path.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{found[1]}")
    return path


def lines(script: Path, ranks: int) -> list[str]:
    """What a run prints, which must end well."""
    return [line for line in output_of(script, [], ranks, script.parent).splitlines() if line.startswith("step ")]


def test_a_resumed_run_prints_the_same(script: Path) -> None:
    whole = lines(script, ranks=2)
    assert [line.split()[1] for line in whole] == ["20", "40", "60"]
    assert float(whole[-1].split()[-1]) > 0.8
    stop_after(40, script.parent / "checkpoints")
    assert lines(script, ranks=2) == whole[2:]
    stop_after(40, script.parent / "checkpoints")
    (alone,) = lines(script, ranks=1)  # half the batch: other numbers, from the same point
    assert alone.startswith("step 60 ")
    assert float(alone.split()[-1]) > 0.8


def stop_after(step: int, checkpoints: Path) -> None:
    """As if the job had been killed after this step."""
    shutil.rmtree(checkpoints / "step-00000060")
    (checkpoints / "latest").write_text(f"step-{step:08}\n")
