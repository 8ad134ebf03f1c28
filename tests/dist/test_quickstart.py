"""The script of docs/quickstart.md under torchrun: a job that was stopped goes on from its checkpoint."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    path = tmp_path / "train.py"
    path.write_text(found[1])
    return path


def lines(script: Path, ranks: int) -> list[str]:
    """What a run prints, which must end well."""
    command = [*TORCHRUN, str(ranks), str(script)]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


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
