"""The comparison with peers as a user runs it: small, unshaped, and killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.network import may_shape
from benchmarks.peers.results import read as read_scenes
from benchmarks.peers.results import rows

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.peers"]
SMALL = ["run", "--config", "XS", "--rate", "none", "--patience", "0"]


def children(pid: int) -> list[int]:
    """Ids of the processes that `pid` started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(found: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"wspeers{pid}-")]


@pytest.mark.full
def test_pipelines_train_alike(tmp_path: Path) -> None:
    """Torch's and ours lose what one process loses; ours are simulated, and tensors of both are counted."""
    options = ["--peers", "one pipe:1f1b stages:1f1b", "--rounds", "1", "--steps", "2", "--dir", str(tmp_path)]
    process = subprocess.Popen([*COMMAND, *SMALL, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, said
    (scene,) = read_scenes(tmp_path)
    floor, one, theirs, ours = rows(scene)
    for row in (theirs, ours):
        assert row.loss_gap is not None
        assert row.loss_gap < 1e-5
        assert row.rest_bytes < 0.8 * one.rest_bytes, "a rank has some of the layers"
        assert row.rest_bytes < row.tensor_bytes < one.tensor_bytes
    assert theirs.simulated_ms == theirs.simulated_to_step == 0
    assert ours.simulated_to_floor == ours.simulated_ms / floor.simulated_ms
    assert one.simulated_to_floor > floor.simulated_to_floor == 1
    assert ours.simulated_to_step > 0


@pytest.mark.full
def test_ranks_that_share_tokens_train_alike(tmp_path: Path) -> None:
    options = ["--peers", "long", "--rounds", "1", "--steps", "2", "--dir", str(tmp_path)]
    process = subprocess.Popen([*COMMAND, *SMALL, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, said
    (scene,) = read_scenes(tmp_path)
    _, _, *sharing = rows(scene)
    assert len(sharing) == 6
    for row in sharing:
        assert row.loss_gap is not None
        assert row.loss_gap < 1e-5, row.peer
        assert (row.simulated_ms > 0) == row.peer.startswith("context"), row.peer


@pytest.mark.full
def test_peers_train_alike_and_are_counted(tmp_path: Path) -> None:
    peers = "ddp wholestep:zero1 wire:parts,late"
    options = ["--peers", peers, "--rounds", "1", "--steps", "2", "--dir", str(tmp_path)]
    process = subprocess.Popen([*COMMAND, *SMALL, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, said
    (scene,) = read_scenes(tmp_path)
    raw = json.loads((tmp_path / "XS-none-w2.json").read_text())
    assert set(raw) == {"config", "rate", "world", "shaped", "peers"}
    assert set(raw["peers"]["ddp"]["turns"][0]) == {
        "step_ms", "cpu_ms", "sent_bytes", "others", "speed_ms", "floor_ms", "floor_update_ms", "floor_others",
        "calling_ms", "packets_ms", "simulated_ms",
    }  # fmt: skip
    floor, ddp, zero1, wire = rows(scene)
    assert [floor.peer, ddp.peer, zero1.peer, wire.peer] == ["floor", "ddp", "wholestep:zero1", "wire:parts,late"]
    size = scene.peers["ddp"].parameter_bytes
    assert ddp.least_bytes == zero1.least_bytes == size
    for row in (ddp, zero1):
        assert row.loss_gap is not None
        assert row.loss_gap < 1e-5
        assert row.sent_bytes >= size
        assert row.collectives
        assert row.step_ms > 0
        assert row.cpu_ms > row.calling_ms > 0
    assert wire.least_bytes == size
    assert wire.loss_gap is None
    assert wire.sent_bytes >= size
    assert set(wire.collectives) == {"alltoall_base", "allgather"}
    assert ddp.rest_bytes == pytest.approx(3 * size, rel=0.01)
    assert zero1.rest_bytes == pytest.approx(2 * size, rel=0.01)
    losses = scene.peers["ddp"].losses
    assert len(losses) == 1 + 4 + 3
    assert losses[-1] < losses[0]
    assert scene.peers["floor"].turns[0].floor_update_ms > 0
    if scene.shaped:
        assert floor.sent_bytes < 0.01 * size  # what idle peers tell their store
        assert ddp.sent_bytes < 1.5 * size
        assert namespaces(process.pid) == []


@pytest.mark.full
def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    options = ["--peers", "ddp", "--rounds", "1000", "--dir", str(tmp_path)]
    process = subprocess.Popen(
        [*COMMAND, *SMALL, *options], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    ranks = wait_for(lambda: (found := children(process.pid)) and len(found) == 4 and found)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(alive(rank) for rank in ranks))  # one that still imports torch notices afterwards
    if may_shape():
        assert namespaces(process.pid)
        subprocess.run([*COMMAND, "clean"], cwd=ROOT, check=True, capture_output=True)
        assert namespaces(process.pid) == []
