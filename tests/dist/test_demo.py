"""`wholestep demo` as a user runs it: fresh, interrupted and resumed, failing, killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "wholestep", "demo"]
LONG = ["--quick", "--no-compare", "--steps", "80"]  # a few seconds, enough to be interrupted


def demo(*options: str, directory: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--dir", str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def start(*options: str, directory: Path) -> subprocess.Popen[str]:
    command = [*COMMAND, "--dir", str(directory), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def steps_seen(directory: Path) -> int:
    """The last step in the event log."""
    log = directory / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((e["step"] for e in map(json.loads, lines) if e["event"] == "step"), default=0)


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Ids of the processes that `pid` started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What LONG ends with when nobody interrupts it."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    done = demo(*LONG, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return result(directory)


@pytest.mark.parametrize(("style", "ranks"), [("fully_shard", 2), ("zero1", 3), ("hybrid", 4)])
def test_compares_four_ways_of_training(style: str, ranks: int, tmp_path: Path) -> None:
    done = demo("--quick", "--style", style, "--ranks", str(ranks), directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in result(tmp_path)["rows"]}
    assert list(rows) == ["wholestep", "one process", "DDP", "FSDP2"]
    ours = rows["wholestep"]
    for place in (0, 1):  # against one process, against DDP
        assert ours["early_difference"][place] < 1e-6
        assert ours["difference"][place] < 1e-6
    assert ours["loss"] == pytest.approx(rows["one process"]["loss"], abs=1e-5)
    assert (ours["rest_bytes"] < 0.8 * rows["DDP"]["rest_bytes"]) or ranks == 1
    in_graph = {kind: total["count"] for kind, total in result(tmp_path)["in_graph"].items()}
    assert ours["collectives"] == {kind: count for kind, count in in_graph.items() if count}
    assert ours["rest_bytes"] == result(tmp_path)["planned_rest_bytes"]
    for name in ("plan.txt", "program.txt", "events.jsonl", "rank0.log", "run.json"):
        assert (tmp_path / name).stat().st_size or name.endswith(".log"), name
    for text in ("capture the step as one graph", "step 6/6 | loss", f"{style} on ", "largest parameter difference"):
        assert text in done.stdout
    assert str(tmp_path / "checkpoint") in done.stdout


def test_fully_shard_rests_like_fsdp2(tmp_path: Path) -> None:
    done = demo("--quick", "--steps", "2", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in result(tmp_path)["rows"]}
    assert rows["wholestep"]["rest_bytes"] == pytest.approx(rows["FSDP2"]["rest_bytes"], rel=0.01)


def test_interrupted_and_resumed_equals_uninterrupted(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    run = start(*LONG, directory=tmp_path)
    wait_until(lambda: steps_seen(tmp_path) >= 3)
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 130, text
    saved = re.search(r"Saved step (\d+) of 80 in ", text)
    assert saved, text
    assert 3 <= int(saved[1]) < 80
    assert f"Continue with: wholestep demo --resume --dir {tmp_path}" in text

    done = demo("--resume", "--no-compare", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {int(saved[1]) + 1}/80 |" in done.stdout
    assert result(tmp_path)["since"] == int(saved[1])
    assert result(tmp_path)["parameters"] == uninterrupted["parameters"]

    again = demo("--resume", directory=tmp_path)
    assert again.returncode == 1
    assert "nothing is left to do: the checkpoint has 80 of 80 steps." in again.stdout
    assert "--resume --steps 160" in again.stdout


def test_resumed_on_another_style_and_number_of_ranks(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    run = start(*LONG, directory=tmp_path)
    wait_until(lambda: steps_seen(tmp_path) >= 3)
    run.send_signal(signal.SIGTERM)  # saves as well
    run.communicate(timeout=60)
    done = demo("--resume", "--style", "replicate", "--ranks", "3", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    after = result(tmp_path)
    assert after["rows"][0]["loss"] == pytest.approx(uninterrupted["rows"][0]["loss"], abs=1e-4)
    assert after["rows"][0]["early_difference"][1] < 1e-6  # DDP started from the same checkpoint


def test_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = start(*LONG, directory=tmp_path)
    wait_until(lambda: steps_seen(tmp_path) >= 1)
    ranks = children(run.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 1, text
    assert "rank 1 failed:\nthe process ended: signal SIGKILL" in text
    assert not any(map(alive, ranks))


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    run = start(*LONG, directory=tmp_path)
    wait_until(lambda: steps_seen(tmp_path) >= 1)
    ranks = children(run.pid)
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(alive, ranks)), seconds=20)


def test_damaged_checkpoint_is_reported_not_waited_for(tmp_path: Path) -> None:
    assert demo("--quick", "--no-compare", "--steps", "1", directory=tmp_path).returncode == 0
    for file in (tmp_path / "checkpoint").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    done = demo("--resume", "--steps", "3", directory=tmp_path)
    assert done.returncode == 1
    assert "rank 0 failed:" in done.stdout or "rank 1 failed:" in done.stdout
    assert "CheckpointError" in done.stdout


def test_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    for _ in range(2):
        done = demo("--quick", "--no-compare", "--steps", "1", directory=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"The files of an earlier run are now in {tmp_path / 'previous'}." in done.stdout
    assert (tmp_path / "previous" / "checkpoint").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--ranks", "5"],
            "--ranks 5 cannot share the batch of 12 rows equally: choose one of 1, 2, 3, 4, 6, 12",
        ),
        (["--ranks", "0"], "--ranks 0 cannot share the batch of 12 rows equally: choose one of 1, 2, 3, 4, 6, 12"),
        (["--steps", "0"], "--steps 0 trains nothing: give at least 1"),
        (
            ["--style", "hybrid", "--ranks", "3"],
            "--style hybrid needs an even number of ranks (2 shard, the others replicate), not 3",
        ),
        (["--resume"], "--resume: {dir} holds no run (no run.json); leave --resume out to start one"),
    ],
)
def test_bad_options_say_what_to_choose(options: list[str], message: str, tmp_path: Path) -> None:
    done = demo(*options, directory=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"wholestep demo: {message.format(dir=tmp_path)}\n"


def test_unknown_style_lists_the_styles(tmp_path: Path) -> None:
    done = demo("--style", "zero9", directory=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "--style" in done.stderr
    for style in ("fully_shard", "replicate", "zero1", "zero2", "default", "hybrid"):
        assert f"'{style}'" in done.stderr


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wholestep", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"wholestep \d+\.\d+\.\d+\S*\n", done.stdout)
