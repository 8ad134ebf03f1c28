"""Streams of a step on two null devices (tools/nullcuda): collectives are waited for before they are read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nullcuda", reason="needs the null CUDA device: make test-nullcuda", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("streams.py")


@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_collectives_are_ordered_with_what_reads_them(style: str, semantics: str) -> None:
    """One sync: the test's own at the end."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    words += [style, semantics]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "NULLCUDA_DEVICES": "2"}
    found = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    lines = re.findall(r"collectives (\d+) syncs (\d+) unordered (.*)", found.stdout)
    assert len(lines) == 2
    for collectives, syncs, unordered in lines:
        assert int(collectives) > 0
        assert (int(syncs), unordered) == (1, "[]")
