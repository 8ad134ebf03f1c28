"""A ring of attention on two null devices: a piece of the keys is on its way while a rank attends to another one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nullcuda", reason="needs the null CUDA device", exc_type=ImportError)
SCRIPT = Path(__file__).with_name("rings.py")
LAYERS, RANKS = 2, 2


def test_messages_run_beside_attention_and_are_waited_for(tmp_path: Path) -> None:
    """Forward and backward of a layer send keys once, beside the kernel of the own piece alone; the host reads nothing.
    The first rank attends to no piece that arrives.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(RANKS), "NULLCUDA_DEVICES": str(RANKS)}
    run = subprocess.run(
        [*words, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for rank, file in enumerate(sorted(tmp_path.iterdir())):
        found = json.loads(file.read_text())
        assert (found["syncs"], found["read_bytes"], found["unordered"]) == (0, 0, 0)
        assert (found["streams"], found["shared"]) == ([1, 1], False)
        each, kernels = 1 + rank, range(2 * LAYERS * (1 + rank))
        assert all(len(row) == len(kernels) for row in found["beside"])
        hidden = [(row, later) for row, later in zip(found["beside"], found["waited_for"], strict=True) if any(row)]
        assert len(hidden) == 2 * LAYERS
        for number, (row, later) in enumerate(hidden):
            assert [k for k in kernels if row[k]] == [each * number]
            assert [k for k in kernels if later[k]] == list(kernels[each * number + 1 :])
