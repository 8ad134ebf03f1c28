"""Jobs that torchrun starts on a GPU. Skipped without one."""

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


def start(ranks: int, style: str, library: str, folder: Path, first: int = 0) -> subprocess.CompletedProcess[str]:
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*launched, str(SCRIPT), style, library, str(folder), str(first), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)


def run(style: str, folder: Path, first: int = 0) -> dict[str, Any]:
    """What the rank printed, once it has ended well."""
    found = start(1, style, "nccl", folder, first)
    assert found.returncode == 0, found.stderr[-4000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


def one_device() -> list[float]:
    """Sums of the parameters after the same steps, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).cuda().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        x, y = batch(number, 0, "cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


def test_a_job_trains_saves_goes_on_and_ends(tmp_path: Path) -> None:
    """Numbers of one device; the job that goes on from a checkpoint has the losses of the one that was not stopped."""
    whole = run("fully_shard", tmp_path)
    assert whole["parameters"] == pytest.approx(one_device(), abs=2e-3)
    resumed = run("fully_shard", tmp_path, first=SAVED_AFTER)
    assert resumed["losses"] == whole["losses"][SAVED_AFTER:]
    assert resumed["parameters"] == whole["parameters"]


def test_gloo_is_refused_on_a_gpu(tmp_path: Path) -> None:
    """It ended the process by a segmentation fault."""
    found = start(2, "replicate", "gloo", tmp_path)
    assert found.returncode == 1
    assert "the process group communicates over gloo there" in found.stderr
