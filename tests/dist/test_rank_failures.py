"""One rank dies, leaves, is stopped or hangs: every other rank ends with one error that names it."""

import re
import socket
from pathlib import Path

import pytest

from tests.dist.scripts import start

EXAMPLE = Path(__file__).parents[2] / "examples" / "failures.py"
LIMIT_S = 60.0  # of a test: no time is asserted, but nothing waits for ever

FOUND = {
    "kill": "is gone: its process was killed, or ended",
    "stop": "is stopped: no heartbeat for",
    "raise": "raised ValueError: a batch without labels",
    "exit": "ended its program while other ranks go on",
    "leave": "ended its program while other ranks go on",
    "hang": "does not come: rank",
    "hang in C": "is stopped, or blocked outside of Python, or unreachable: no heartbeat for",
    "hang in the loader": "does not come: rank",
}
HOSTS = "which hosts the store of the job,"  # what is said of a first rank that ends without a word
FOUND_OF_HOST = FOUND | {
    "kill": f"{HOSTS} is gone",
    "stop": f"{HOSTS} is stopped",
}
QUICK = {("stop", 1), ("kill", 0), ("raise", 1)}
FULL = pytest.mark.full


def error_of(output: str) -> list[str]:
    """The lines of the RankFailedError that ended a rank; torch's own text is not before it."""
    found = re.findall(r"^(?:\S+\.)?RankFailedError: .*(?:\n  .*)*", output, re.MULTILINE)
    assert len(found) == 1, output
    before = output.partition(found[0])[0]  # a warning that torch logs about its store is not an error
    assert not re.search(r"^\S*Error: ", before, re.MULTILINE), output
    return found[0].splitlines()


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        pytest.param(how, rank, marks=() if (how, rank) in QUICK else FULL)
        for how in FOUND
        for rank in (0, 1)
    ],
)  # fmt: skip
def test_the_others_name_the_rank_that_failed(how: str, rank: int, tmp_path: Path) -> None:
    with start(EXAMPLE, ["--how", how, "--rank", str(rank), "--timeout", "8s"], 3, tmp_path) as ranks:
        others = [other for other in range(3) if other != rank]
        assert ranks.wait(others, LIMIT_S) == dict.fromkeys(others, 1), [ranks.output(other) for other in others]
        pid = ranks.processes[rank].pid
        for other in others:
            first, *more = error_of(ranks.output(other))
            assert f"RankFailedError: rank {rank} (host {socket.gethostname()}, pid {pid})" in first
            assert (FOUND if rank else FOUND_OF_HOST)[how] in first
            assert more[0].startswith("  last: ")
            assert any(line.startswith("  next: ") for line in more)
        if how.startswith("hang") and how != "hang in C":  # the last line that it ran, and how far it had come
            text = ranks.output(others[0])
            assert "last: between steps, after call 5 of train_step, for" in text
            assert re.search(r"there: \S+failures.py:\d+  time.sleep\(3600\)", text)


SAVES = """
import os, signal, sys, time
import torch
from torch import nn
import wholestep as ws

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = ws.compile(train_step, timeout="8s")
step(model, optimizer, torch.randn(8, 16))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
ws.save("checkpoints", step)
"""


@pytest.mark.full
@pytest.mark.parametrize(("sent", "found"), [("SIGKILL", FOUND["kill"]), ("SIGSTOP", FOUND["stop"])])
def test_a_save_does_not_wait_for_a_rank_that_failed(sent: str, found: str, tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES.replace('"checkpoints"', repr(str(tmp_path / "checkpoints"))))
    with start(script, [sent], 3, tmp_path) as ranks:
        assert ranks.wait([0, 2], LIMIT_S) == {0: 1, 2: 1}, [ranks.output(other) for other in (0, 2)]
        for other in (0, 2):
            first, *_ = error_of(ranks.output(other))
            assert "RankFailedError: rank 1 (host" in first
            assert found in first


STOPS_EARLY = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
import wholestep as ws

def stop_at(place):
    if sys.argv[1] == place and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)

def train_step(model, optimizer, x):
    ws.callback(stop_at, "its first step")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

dist.init_process_group("gloo")
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = ws.compile(train_step, timeout="8s")
stop_at("before its first call")
for _ in range(20):
    step(model, optimizer, torch.randn(8, 16))
    stop_at("after its first call")
"""


@pytest.mark.full
@pytest.mark.parametrize("place", ["before its first call", "its first step", "after its first call"])
def test_a_first_rank_that_is_stopped_early_is_named(place: str, tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text(STOPS_EARLY)
    with start(script, [place], 3, tmp_path) as ranks:
        assert ranks.wait([1, 2], LIMIT_S) == {1: 1, 2: 1}, [ranks.output(other) for other in (1, 2)]
        for other in (1, 2):
            first, *more = error_of(ranks.output(other))
            assert re.search(
                r"RankFailedError: rank 0 \(host [^)]+\), (which|or the launcher that) hosts the store", first
            )
            assert re.search(r"(is stopped|does not answer): no answer for \d+ s", first)
            assert more[0].startswith("  last: ")


APART = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
import wholestep as ws
from tests.steps import mean_square

how, folder = sys.argv[1:]
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = ws.compile(mean_square, timeout="8s", parallel=ws.DataParallel("fully_shard"))
step(model, optimizer, torch.randn(8, 16))
other = ws.compile(mean_square, timeout="8s", parallel=ws.DataParallel("fully_shard"))
if how == "call 2 of mean_square":
    twin = nn.Linear(16, 4)
    others = torch.optim.SGD(twin.parameters(), lr=0.01)
    other(twin, others, torch.randn(8, 16))
if os.environ["RANK"] == "0":
    if how == "torch's all_reduce":
        dist.all_reduce(torch.ones(8, 4))
    elif how == "torch's wait_tensor":
        [p.full_tensor() for p in model.parameters()]
    elif how == "call 2 of mean_square":
        other(twin, others, torch.randn(8, 16))
    elif how == "save":
        ws.save(folder + "/checkpoints", step)
    elif how == "load":
        ws.load(folder + "/checkpoints", step)
    else:
        ws.export(folder + "/exported", model)
for _ in range(3):
    step(model, optimizer, torch.randn(8, 16))
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("save", marks=FULL), pytest.param("load", marks=FULL), pytest.param("export", marks=FULL),
        pytest.param("torch's all_reduce", marks=FULL), "torch's wait_tensor", "call 2 of mean_square",
    ],
)  # fmt: skip
def test_ranks_that_wait_at_different_points_are_named(how: str, tmp_path: Path) -> None:
    """A collective of another step, or of the script, is never taken for one of the step, however alike they are."""
    script = tmp_path / "apart.py"
    script.write_text(APART)
    with start(script, [how, str(tmp_path)], 3, tmp_path) as ranks:
        assert ranks.wait([0, 1, 2], LIMIT_S) == dict.fromkeys(range(3), 1), [ranks.output(rank) for rank in range(3)]
        for rank in range(3):
            text = "".join(ranks.output(rank).partition("RankFailedError: ")[1:])
            assert text.startswith("RankFailedError: ranks wait for each other at different points\n")
            waits = rf"(between steps, after call \d of mean_square, waiting at |in ){re.escape(how)}\b"
            assert re.search(rf"\n  rank 0: {waits}", text)
            assert re.search(r"\n  ranks 1, 2: (in call 2 of mean_square|between steps).*, waiting at ", text)
            assert len(re.findall(r"\n  there: \S+apart.py:\d+  ", text)) == 2


NEVER_COMES = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
import wholestep as ws
from tests.steps import mean_square

dist.init_process_group("gloo")
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = ws.compile(mean_square, timeout="4s", agree_timeout="3s")
if os.environ["RANK"] == "0":
    dist.barrier() if sys.argv[1] == "waits" else time.sleep(3600)
step(model, optimizer, torch.randn(8, 16))
"""


@pytest.mark.parametrize("how", ["sleeps", pytest.param("waits", marks=FULL)])
def test_a_rank_that_does_not_come_to_the_first_call_is_named_with_its_line(how: str, tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text(NEVER_COMES.replace(*(('"3s"', '"30s"') if how == "waits" else ('"4s"', '"20s"'))))
    with start(script, [how], 2, tmp_path) as ranks:
        assert ranks.wait([1], LIMIT_S) == {1: 1}, ranks.output(1)
        if how == "waits":
            assert "RankFailedError: ranks wait for each other at different points\n" in ranks.output(1)
            assert "\n  rank 0: before the first step, waiting at torch's barrier, for " in ranks.output(1)
        else:
            assert "RankMismatchError: the first call of a step: ranks [0] did not come within 3 s" in ranks.output(1)
            assert re.search(r"\n  rank 0: before the first step, for \d s", ranks.output(1))
        assert re.search(r"\n  there: \S+never.py:14  dist.barrier\(\) if ", ranks.output(1))
