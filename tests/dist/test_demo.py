"""`python -m examples.demo` as a user runs it: fresh, interrupted and resumed, failing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch

import wholestep as ws
from examples.demo.corpus import standard_library
from examples.demo.model import GPT, GPTConfig, build
from examples.demo.options import QUICK, parse
from examples.demo.step import new_optimizer
from examples.demo.train import restore

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.demo"]
LONG_STEPS = 120
LONG = ["--quick", "--no-compare", "--steps", str(LONG_STEPS)]  # a few seconds, enough to be interrupted


def demo(*options: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--dir", str(directory), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def started(directory: Path) -> subprocess.Popen[str]:
    """A long run that has taken ten steps."""
    command = [*COMMAND, "--dir", str(directory), *LONG]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    for line in cast(IO[str], run.stdout):
        lines.append(line)
        if line.startswith("step 10/"):
            return run
    raise AssertionError("".join(lines))


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def quick_model() -> GPT:
    """With other weights than those that the runs start from."""
    return build(GPTConfig(QUICK.layers, QUICK.width, QUICK.heads, QUICK.context), seed=1)


def saved_in(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the parameters of the newest checkpoint."""
    model = quick_model()
    number = ws.load(folder, model=model, optimizer=new_optimizer(model)).number
    return number, dict(model.named_parameters())


def children(pid: int) -> list[int]:
    """Ids of the processes that `pid` started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where LONG has run to its end."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    done = demo(*LONG, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.parametrize(
    ("style", "ranks"),
    [
        ("fully_shard", 2),
        pytest.param("zero1", 3, marks=pytest.mark.full),
        pytest.param("hybrid", 4, marks=pytest.mark.full),
    ],
)
def test_compares_four_ways_to_train(style: str, ranks: int, tmp_path: Path) -> None:
    done = demo("--quick", "--style", style, "--ranks", str(ranks), directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(tmp_path)
    ways = {way["name"]: way for way in found["ways"]}
    assert list(ways) == ["one process", "DDP", "FSDP2", "wholestep"]
    ours = ways["wholestep"]
    assert set(ours["differences"]) == {"one process", "DDP"}
    assert max(ours["differences"].values()) < 1e-6
    assert ours["loss"] == pytest.approx(ways["one process"]["loss"], abs=1e-5)
    assert ours["collectives"] == found["collectives_of_program"]
    assert ours["stored_bytes"] == found["bytes_of_plan"] < 0.8 * ways["DDP"]["stored_bytes"]
    if style == "fully_shard":
        assert ours["stored_bytes"] == pytest.approx(ways["FSDP2"]["stored_bytes"], rel=0.01)
    assert (tmp_path / "plan.txt").read_text().startswith(f"plan  {style} on ")
    assert "local_graph" in (tmp_path / "program.txt").read_text()
    for text in ("capture: ", "step 6/6 | loss", f"plan  {style} on ", "largest parameter difference", str(tmp_path)):
        assert text in done.stdout


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Where LONG was interrupted, and after which step."""
    directory = tmp_path_factory.mktemp("interrupted")
    run = started(directory)
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, text
    saved = re.search(rf"Saved step (\d+) of {LONG_STEPS} in {directory}/checkpoint.\n", text)
    assert saved, text
    assert f"Continue with: python -m examples.demo --resume --dir {directory} {' '.join(LONG)}\n" in text
    return directory, int(saved[1])


@pytest.mark.full
def test_interrupted_and_resumed_equals_uninterrupted(
    uninterrupted: Path, interrupted: tuple[Path, int], tmp_path: Path
) -> None:
    copied, step = shutil.copytree(interrupted[0], tmp_path / "copy"), interrupted[1]
    assert 10 <= step < LONG_STEPS
    done = demo("--resume", *LONG, directory=copied)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {step + 1}/{LONG_STEPS} |" in done.stdout
    assert result(copied)["first"] == step
    (number, found), (_, wanted) = (saved_in(folder / "checkpoint") for folder in (copied, uninterrupted))
    assert number == LONG_STEPS
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in found.items())
    again = demo("--resume", *LONG, directory=copied)
    assert again.returncode == 0
    assert f"nothing is left to do: the checkpoint has {LONG_STEPS} steps" in again.stdout


@pytest.mark.full
def test_resumed_on_another_style_and_number_of_ranks(
    uninterrupted: Path, interrupted: tuple[Path, int], tmp_path: Path
) -> None:
    copied = shutil.copytree(interrupted[0], tmp_path / "copy")
    options = ["--quick", "--steps", str(LONG_STEPS), "--resume", "--style", "replicate", "--ranks", "3"]
    done = demo(*options, directory=copied)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = result(copied)["ways"][-1]
    assert ours["loss"] == pytest.approx(result(uninterrupted)["ways"][-1]["loss"], abs=1e-4)
    assert ours["differences"]["DDP"] < 1e-6  # DDP started from the same checkpoint


@pytest.mark.full
def test_checkpoint_of_other_data_is_refused(interrupted: tuple[Path, int]) -> None:
    options = parse(["--quick", "--resume", "--seed", "1", "--dir", str(interrupted[0])])
    model = quick_model()
    with pytest.raises(ValueError, match=r"checkpoint was trained with \{.*'seed': 0\}, this run has \{.*'seed': 1\}"):
        restore(options, standard_library(QUICK.text_bytes), model, new_optimizer(model))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = started(tmp_path)
    ranks = children(run.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 1, text
    assert f"Signal 9 (SIGKILL) received by PID {ranks[1]}" in text
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_the_command(tmp_path: Path) -> None:
    run = started(tmp_path)
    ranks = children(run.pid)
    run.terminate()
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.full
def test_checkpoints_are_moved_aside_by_another_run_and_reported_when_damaged(tmp_path: Path) -> None:
    for steps in ("2", "1"):
        done = demo("--quick", "--no-compare", "--ranks", "1", "--steps", steps, directory=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [saved_in(tmp_path / name)[0] for name in ("previous", "checkpoint")] == [2, 1]
    for file in (tmp_path / "checkpoint").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    done = demo("--quick", "--no-compare", "--resume", "--steps", "3", directory=tmp_path)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "5"], "--ranks 5 cannot share the batch of 12 rows equally: choose one of 1, 2, 3, 4, 6, 12"),
        (["--ranks", "0"], "--ranks 0 cannot share the batch of 12 rows equally: choose one of 1, 2, 3, 4, 6, 12"),
        (["--steps", "0"], "--steps 0 trains nothing: give at least 1"),
        (
            ["--style", "hybrid", "--ranks", "3"],
            "--style hybrid needs an even number of ranks (2 shard, the others replicate), not 3",
        ),
        (["--resume"], "--resume: {dir} holds no checkpoint; leave --resume out to start a run"),
    ],
)
def test_bad_options_say_what_to_choose(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*options, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"python -m examples.demo: error: {message.format(dir=tmp_path)}\n")


def test_a_run_has_room_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parse(["--dir", str(tmp_path / "file" / "run")])
    said = f"error: --dir {tmp_path}/file/run: the folder cannot be made: Not a directory\n"
    assert capsys.readouterr().err.endswith(said)
