"""What steps with experts ask of two null devices: reads of the host, launches, collectives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nullcuda", reason="needs the null CUDA device", exc_type=ImportError)
SCRIPT = Path(__file__).with_name("experts.py")
LAYERS, RANKS = 2, 2


def test_the_host_reads_once_a_layer_or_never(tmp_path: Path) -> None:
    """How many rows go to each rank, and come from it. Without reads, all is one launch of a CUDA graph."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(RANKS), "NULLCUDA_DEVICES": str(RANKS)}
    run = subprocess.run(
        [*words, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for file in sorted(tmp_path.iterdir()):
        found = json.loads(file.read_text())
        reads = {name: (counts["syncs"], counts["d2h_bytes"]) for name, counts in found.items()}
        assert reads.pop("rows counted") == (LAYERS, LAYERS * 2 * RANKS * 8)
        assert {*reads.values()} == {(0, 0)}
        assert len({counts["blas"] for name, counts in found.items() if "recorded" not in name}) == 1
        assert found["rows"]["collectives"] == found["rows counted"]["collectives"]
        assert found["rows"]["launches"] <= found["rows counted"]["launches"] + 8 * LAYERS
        assert found["rows counted"]["launches"] <= found["weights"]["launches"] + 36 * LAYERS
        recorded = found["rows recorded"]
        assert (recorded["graphs"], recorded["launches"], recorded["collectives"]) == (1, 0, 0)
