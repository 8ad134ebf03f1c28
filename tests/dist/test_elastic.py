"""examples/elastic.py under torchrun: ranks are lost and come back, and the curve is that of an uninterrupted run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from wholestep.checkpoint import manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
TOLERANCE = 1e-5  # of float32 losses: other numbers of ranks add in another order; 100 steps came to 4e-7
EVERY = 5
WAIT_S = 120.0

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed in /proc")


class Nodes:
    """Agents of torchrun with one rank each, by name; the store that they meet in is the test's."""

    def __init__(self, folder: Path, memory: bool, *options: str, script: Path = EXAMPLE) -> None:
        self.folder, self.memory, self.options, self.script = folder, memory, options, script
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a node."""
        endpoint = f"127.0.0.1:{self.store.port}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--monitor-interval", "0.2", "--shutdown-timeout", "5"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic"]
        command += ["--rdzv-conf", QUICK, "--local-addr", "127.0.0.1", str(self.script), *self.options]
        command += ["--memory", str(self.folder / f"memory-{name}")] if self.memory else []
        alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.agents[name] = subprocess.Popen(command, env=os.environ | alone, stdout=log, stderr=subprocess.STDOUT)

    def lose(self, name: str) -> None:
        """End an agent and its rank, as the loss of a machine does."""
        agent = self.agents.pop(name)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in [agent.pid, *map(int, ranks)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()
        shutil.rmtree(self.folder / f"memory-{name}", ignore_errors=True)

    def said(self) -> str:
        """What all nodes have written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@contextmanager
def nodes(folder: Path, memory: bool, *options: str, script: Path = EXAMPLE) -> Iterator[Nodes]:
    found = Nodes(folder, memory, *options, script=script)
    try:
        yield found
    finally:
        for name in list(found.agents):
            if found.agents[name].poll() is None:
                found.lose(name)


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until(world: int, folder: Path, running: Nodes) -> None:
    """Wait until so many ranks have completed more than a checkpoint's worth of steps, and none is being saved."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = steps(folder)
        trains = len(found) > EVERY and all(line["world"] == world for line in found[-EVERY - 1 :])
        if trains and found[-1]["step"] % EVERY == 1:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {world} ranks train:\n{running.said()[-6000:]}")


@pytest.mark.full
@pytest.mark.parametrize(("style", "memory"), [("fully_shard", False), ("hybrid", True)])
def test_ranks_are_lost_and_come_back(style: str, memory: bool, tmp_path: Path) -> None:
    """4 -> 3 -> 2 -> 4; the first node is among those that are lost. With copies in memory no step is repeated when
    the state is replicated, which it is not on 3 ranks.
    """
    folder = tmp_path / "elastic"
    options = ("--style", style, "--every", str(EVERY))
    given = ("--folder", str(folder), "--steps", "10000", "--pause", "0.1", *options)
    with nodes(tmp_path, memory, *given) as running:
        for name in "abcd":
            running.start(name)
        until(4, folder, running)
        for name, left in (("c", 3), ("a", 2)):
            running.lose(name)
            until(left, folder, running)
        for name in "ef":
            running.start(name)
        until(4, folder, running)
        said = running.said()
    found = steps(folder)
    assert sizes(found) == [4, 3, 2, 4]
    again = {
        (m[1], m[2]): int(m[3]) for m in re.finditer(r"ranks (\d) -> (\d): .*, (-?\d+) steps computed again", said)
    }
    assert again.keys() == {("4", "3"), ("3", "2"), ("2", "4")}, said[-6000:]
    assert not memory or again["4", "3"] <= 1 >= again["2", "4"], again

    check_curve(found, tmp_path, options)


def sizes(found: list[dict[str, Any]]) -> list[int]:
    """Of the job, as they followed each other."""
    of_steps = [line["world"] for line in found]
    return [size for size, before in zip(of_steps, [0, *of_steps], strict=False) if size != before]


def check_curve(found: list[dict[str, Any]], tmp_path: Path, options: tuple[str, ...]) -> None:
    """The losses are those of an uninterrupted run of one process."""
    alone = tmp_path / "alone"
    count = max(line["step"] for line in found) + 1
    command = [sys.executable, str(EXAMPLE), "--folder", str(alone), "--steps", "10000", "--stop", str(count), *options]
    subprocess.run([*command, "--style", "fully_shard"], check=True, capture_output=True, timeout=WAIT_S)
    expected = {line["step"]: line["loss"] for line in steps(alone)}
    assert {line["step"] for line in found} == set(range(count)) == set(expected)
    assert len(set(expected.values())) == count
    for line in found:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=TOLERANCE), line


SLOW = """
import runpy, time
from wholestep.checkpoint import durable

real = durable.ChecksummedFile.close

def close(file):
    time.sleep(0.3)
    real(file)

durable.ChecksummedFile.close = close
runpy.run_path({example!r}, run_name="__main__")
"""


def half_written(folder: Path, running: Nodes) -> Path:
    """Wait until a checkpoint is being written beside an intact one, by two ranks."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = steps(folder)
        intact = {path.name for path in manifest.checkpoints(folder)}
        newest = max(folder.glob("step-*"), default=folder)
        last = found[-1] if found else {"world": 0}
        begun = intact and newest.name > max(intact) and any(newest.iterdir())
        if begun and last["world"] == 2 and last["step"] + 1 == int(newest.name.split("-")[1]):  # not left by a restart
            return newest
        time.sleep(0.01)
    raise AssertionError(f"two ranks save nothing:\n{running.said()[-6000:]}")


@pytest.mark.full
def test_a_kill_inside_a_save_restarts_from_the_checkpoint_before(tmp_path: Path) -> None:
    """2 -> 1 -> 2 -> 1, each time within a save: first the node that came last is lost, then the one that stayed."""
    folder, script = tmp_path / "elastic", tmp_path / "slow.py"
    script.write_text(SLOW.format(example=str(EXAMPLE)))
    options = ("--style", "fully_shard", "--every", str(EVERY))
    given = ("--folder", str(folder), "--steps", "10000", "--pause", "0.02", *options)
    with nodes(tmp_path, False, *given, script=script) as running:
        for name in "ab":
            running.start(name)
        for lost, comes in (("b", "c"), ("a", "")):
            saving = half_written(folder, running)
            running.lose(lost)
            assert not (saving / manifest.NAME).exists()
            before = max(path.name for path in manifest.checkpoints(folder))
            until(1, folder, running)
            found = steps(folder)
            (first,) = [at for at, line in enumerate(found) if line["world"] == 1 != found[at - 1]["world"]][-1:]
            assert found[first]["step"] == int(before.split("-")[1]) == found[first - 1]["step"] + 1 - EVERY
            if comes:
                running.start(comes)
    found = steps(folder)
    assert sizes(found) == [2, 1, 2, 1]
    check_curve(found, tmp_path, options)
