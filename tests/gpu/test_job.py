"""Jobs that torchrun starts on a GPU: NCCL alone, and two ranks that share the GPU over gloo. Skipped without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.job import SAVED_AFTER, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCRIPT, STEPS, LIMIT_S = Path(__file__).with_name("job.py"), 8, 100.0


def run(ranks: int, style: str, library: str, folder: Path, first: int = 0, last: int = STEPS) -> dict[str, Any]:
    """What the first rank printed, once all have ended well."""
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*launched, str(SCRIPT), style, library, str(folder), str(first), str(last)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


def one_device(ranks: int) -> list[float]:
    """Sums of the parameters after the same steps on the batches of all ranks, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).cuda().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        given = [batch(number, rank, "cuda") for rank in range(ranks)]
        x, y = torch.cat([x for x, _ in given]).double(), torch.cat([y for _, y in given])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.parametrize(("ranks", "style", "library"), [(1, "fully_shard", "nccl"), (2, "replicate", "gloo")])
def test_a_job_trains_saves_goes_on_and_ends(ranks: int, style: str, library: str, tmp_path: Path) -> None:
    """Numbers of one device; the job that goes on from a checkpoint has the losses of the one that was not stopped."""
    whole = run(ranks, style, library, tmp_path)
    assert whole["parameters"] == pytest.approx(one_device(ranks), abs=2e-3)
    resumed = run(ranks, style, library, tmp_path, first=SAVED_AFTER)
    assert resumed["losses"] == whole["losses"][SAVED_AFTER:]
    assert resumed["parameters"] == whole["parameters"]
