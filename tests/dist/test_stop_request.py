"""A job that is asked to end does so after the same step on all ranks; a step sends nothing for it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import wholestep as ws
from tests.dist.scripts import Ranks, start

LIMIT_S = 60.0

SCRIPT = """
import os, sys, time
import torch
from torch import nn
import wholestep as ws
from wholestep.distributed.stop_request import StopRequest

grace_s, saves_s, collectives = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "collectives"

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def evaluate(model, x):
    return model(x).square().mean()

rank = int(os.environ["RANK"])
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = ws.compile(train_step, timeout="20s", parallel=ws.DataParallel("replicate"))
step(model, optimizer, torch.randn(8, 16))
if not collectives:
    step = ws.compile(evaluate, parallel=ws.DataParallel("replicate"))
stop = StopRequest.install(grace_s)
print("ready", flush=True)
while True:
    step(model, optimizer, torch.randn(8, 16)) if collectives else step(model, torch.randn(8, 16))
    time.sleep(0.005 * (1 + rank))
    if stop.agreed_at(step.calls):
        time.sleep(saves_s)
        stop.finish()
        print("saved after", step.calls, flush=True)
        raise SystemExit(0)
"""


def started(folder: Path, world: int, grace_s: float, saves_s: float = 0.0, steps: str = "collectives") -> Ranks:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ranks = start(script, [str(grace_s), str(saves_s), steps], world, folder)
    for rank in range(world):
        ranks.wait_for_line(rank, "ready")
    return ranks


def ask(ranks: Ranks, *which: int) -> None:
    for rank in which:
        os.kill(ranks.processes[rank].pid or 0, signal.SIGTERM)


@pytest.mark.parametrize(
    ("asked", "world", "steps"),
    [
        pytest.param((1,), 2, "collectives", marks=pytest.mark.full),
        pytest.param((0,), 3, "collectives", marks=pytest.mark.full),
        pytest.param((0, 1, 2), 3, "collectives", marks=pytest.mark.full),
        ((0, 1), 2, "no collectives"),
    ],
)
def test_all_ranks_end_after_the_same_step(asked: tuple[int, ...], world: int, steps: str, tmp_path: Path) -> None:
    with started(tmp_path, world, 30.0, steps=steps) as ranks:
        ask(ranks, *asked)
        everyone = list(range(world))
        assert ranks.wait(everyone, LIMIT_S) == dict.fromkeys(everyone, 0), [ranks.output(rank) for rank in everyone]
        ends = [re.findall(r"saved after (\d+)", ranks.output(rank)) for rank in everyone]
        assert len(ends[0]) == 1
        assert ends == [ends[0]] * world


@pytest.mark.full
def test_a_save_that_takes_longer_than_grace_ends_with_the_reason(tmp_path: Path) -> None:
    with started(tmp_path, 2, 2.0, saves_s=1000.0) as ranks:
        ask(ranks, 1)
        assert ranks.wait([0, 1], LIMIT_S) == {0: 1, 1: 1}
        for rank in (0, 1):
            text = "the job was asked to end (SIGTERM on rank 1), and has not saved within grace=2 s"
            assert text in ranks.output(rank)
            assert "script.py" in ranks.output(rank)


@pytest.mark.full
def test_a_second_signal_ends_a_rank_at_once(tmp_path: Path) -> None:
    with started(tmp_path, 2, 1000.0, saves_s=1000.0) as ranks:
        ask(ranks, 1)
        ranks.wait([1], 3.0)
        ask(ranks, 1)
        assert ranks.wait([1], LIMIT_S) == {1: -signal.SIGTERM}


SAVES = (
    SCRIPT.partition("stop = StopRequest")[0]
    + """
while True:
    step(model, optimizer, torch.randn(8, 16))
    time.sleep(0.005 * (1 + rank))
    ws.save("SAVED", step, every=100_000, wait=False, grace="30s")
    if step.calls == 2:
        print("ready", flush=True)  # from the first save on, a signal is a request
"""
)


def test_a_job_that_is_asked_to_end_saves_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVES.replace("SAVED", str(tmp_path / "saved")))
    with start(script, ["0", "0", "collectives"], 2, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.wait_for_line(rank, "ready")
        ask(ranks, 1)
        assert ranks.wait([0, 1], LIMIT_S) == {0: 0, 1: 0}, [ranks.output(rank) for rank in (0, 1)]
    assert ws.load(tmp_path / "saved").number > 1


CODES = """
import os, runpy
code = 1
try:
    runpy.run_path(SCRIPT, run_name="__main__")
except SystemExit as error:
    code = error.code or 0
finally:
    print(f"rank {os.environ['RANK']} ended with {code}", flush=True)
"""


@pytest.mark.full
def test_torchrun_hands_the_signal_on_and_all_ranks_save_and_end_with_0(tmp_path: Path) -> None:
    """The agent of torchrun sends SIGTERM to its ranks, and SIGKILL after --shutdown-timeout."""
    script, outer, log = tmp_path / "script.py", tmp_path / "outer.py", tmp_path / "log.txt"
    script.write_text(SAVES.replace("SAVED", str(tmp_path / "saved")))
    outer.write_text(CODES.replace("SCRIPT", repr(str(script))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(outer), "0", "0", "collectives"]
    with log.open("wb") as out:
        agent = subprocess.Popen(command, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, stdout=out, stderr=out)
    try:
        end = time.monotonic() + LIMIT_S
        while log.read_text().count("ready") < 2:
            assert agent.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        agent.terminate()
        agent.wait(LIMIT_S)
    finally:
        agent.kill()
    for rank in range(2):
        assert f"rank {rank} ended with 0" in log.read_text(), log.read_text()
    assert ws.load(tmp_path / "saved").number > 1
