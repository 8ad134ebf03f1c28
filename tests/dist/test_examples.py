"""The examples as their first lines say: under torchrun, and plainly; some on ranks that are forked to start sooner."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.scripts import output_of

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


# torch's DDP leaves gloo's threads behind. One that drops a tensor while the interpreter ends aborts its process.
DDP_ABORT = "terminate called without an active exception"


def run(name: str, *options: str, ranks: int, timeout: float = 200) -> str:
    """Standard output of an example; ranks=0 runs it without a launcher.

    The example must end well. With `--plain`, torch's DDP may abort a process after the last line.
    """
    launcher = [*TORCHRUN, str(ranks)] if ranks else [sys.executable]
    command = [*launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    aborted = "--plain" in options and DDP_ABORT in done.stderr
    assert done.returncode == 0 or aborted, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)}


def learned(text: str, ranks: int) -> None:
    seen = losses(text)
    assert list(seen) == list(range(1, 11))
    assert seen[10] < 0.3 * seen[1]
    assert f"fully_shard on dp, mean over ranks; mesh dp={ranks}" in text


@pytest.mark.full  # without a launcher: test_gpt_alone, too
def test_mlp_learns_alone() -> None:
    learned(run("mlp.py", "--steps", "10", ranks=0), 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_mlp_learns_and_no_thread_outlives_the_job(tmp_path: Path) -> None:
    """A thread that lets go of a tensor while the interpreter ends would abort the process."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""import atexit, os, sys, time
from pathlib import Path
def gloo(thread):
    try:
        return "gloo" in (thread / "comm").read_text()
    except OSError:  # it has ended
        return False
def count(when, until=0):
    deadline = time.monotonic() + until  # a thread that has been joined is listed for a moment longer
    while (left := sum(map(gloo, Path("/proc/self/task").iterdir()))) and time.monotonic() < deadline:
        pass
    os.write(1, f"\\n{{when}} left {{left}}\\n".encode())  # lines of their own, whatever the other rank has begun
atexit.register(count, "after", until=5)
sys.path.insert(0, {str(EXAMPLES)!r})
import mlp
mlp.main()
sys.stdout.flush()
count("before")
"""
    )
    command = [*TORCHRUN, "2", str(script), "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    learned(done.stdout, 2)
    before, after = (
        [int(n) for n in re.findall(rf"^{when} left (\d+)$", done.stdout, re.MULTILINE)] for when in ("before", "after")
    )
    assert after == [0, 0]
    assert len(before) == 2
    assert min(before) > 0


@pytest.mark.full
def test_styles_of_mlp_agree() -> None:
    replicate, zero1, sharded = (
        losses(run("mlp.py", "--steps", "5", "--style", style, ranks=2))
        for style in ("replicate", "zero1", "fully_shard")
    )
    assert zero1 == pytest.approx(replicate, abs=1e-6)
    assert sharded == pytest.approx(replicate, abs=1e-6)


@pytest.mark.full  # test_quickstart continues a script from its checkpoint, too
def test_gpt_continues_from_its_checkpoint(tmp_path: Path) -> None:
    whole = losses(run("gpt.py", "--steps", "4", ranks=2))
    first = losses(run("gpt.py", "--steps", "2", "--save", str(tmp_path / "saved"), ranks=2))
    text = run("gpt.py", "--steps", "4", "--load", str(tmp_path / "saved"), "--style", "replicate", ranks=2)
    assert list(first) == [1, 2]
    assert list(losses(text)) == [3, 4]
    assert {**first, **losses(text)} == pytest.approx(whole, abs=1e-5)


def test_gpt_alone(tmp_path: Path) -> None:
    text = output_of(EXAMPLES / "gpt.py", ["--steps", "2"], 1, tmp_path)
    assert list(losses(text)) == [1, 2]
    assert "mesh dp=1" in text


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt2", "qwen3", "t5", "vit", "mamba"])
def test_transformers_models_train(model: str) -> None:
    text = run("hf.py", "--model", model, "--steps", "3", ranks=2)
    assert list(losses(text)) == [1, 2, 3]
    assert "mesh dp=2" in text


LINES = re.compile(r"step \d+ .*loss|learning rate|\d+ updates")
LIBRARIES = {"with_accelerate.py": "accelerate", "with_lightning.py": "lightning", "with_trainer.py": "accelerate"}


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "with_accelerate.py" else pytest.mark.full) for n in LIBRARIES]
)
def test_loops_of_libraries(name: str, ranks: int, tmp_path: Path) -> None:
    """Losses, learning rates, counts and evaluations are those of the library itself, which uses DDP on two ranks."""
    pytest.importorskip(LIBRARIES[name])
    numbers, forks = re.compile(r"\d+\.\d+|\d+"), ranks and name == "with_accelerate.py"  # Lightning asks for torchrun
    found, wanted = (
        [[float(n) for n in numbers.findall(line)] for line in text.splitlines() if LINES.match(line)]
        for how in ([], ["--plain"])
        for text in [output_of(EXAMPLES / name, how, ranks, tmp_path) if forks else run(name, *how, ranks=ranks)]
    )
    assert len(wanted) >= 8
    assert [len(line) for line in found] == [len(line) for line in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)


@pytest.mark.full
def test_every_example_says_what_it_takes() -> None:
    there = [name for name, library in LIBRARIES.items() if importlib.util.find_spec(library)]
    for name in ("mlp.py", "gpt.py", "hf.py", *there):
        text = run(name, "--help", ranks=0, timeout=60)
        assert "torchrun --nproc-per-node 2" in text
        assert "--style" in text


@pytest.mark.full
def test_packed_documents_on_ranks_that_share_tokens() -> None:
    """An odd number of tokens."""
    alone = run("long_sequences.py", "--tokens", "301", "--steps", "3", ranks=0)
    shared = run("long_sequences.py", "--tokens", "301", "--steps", "3", ranks=2)
    losses_alone, losses_shared = ([float(n) for n in re.findall(r" loss (\S+) ", text)] for text in (alone, shared))
    assert losses_shared == pytest.approx(losses_alone, rel=1e-5)
    assert len(losses_alone) == 3
