"""benchmarks/gpu without a GPU: its dry run, runners that fail, hang or leave badly, and its command line."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import wholestep as ws
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import runners, worker
from benchmarks.gpu.report import Report
from benchmarks.gpu.workload import SIZES, Setting

TINY = Setting("tiny", SIZES["tiny"], device="cpu")


@pytest.mark.full
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same losses with every runner, processes that end by themselves; a table, and everything in a file."""
    named = "eager,fsdp2,wholestep:eager"
    path = tmp_path / "made" / "gpu.json"
    words = [
        "--device",
        "cpu",
        "--sizes",
        "tiny-llama/default",
        "--rounds",
        "1",
        "--runners",
        named,
        "--json",
        str(path),
    ]
    assert command.main(words) == 0
    found = json.loads(path.read_text())
    assert [row["runner"] for row in found["rows"]] == named.split(",")
    for row in found["rows"]:
        assert not row["error"]
        assert row["loss_gap"] < 0.02, "bfloat16"
        assert len(set(row["losses"])) == worker.EARLY_STEPS
        assert len(row["step_ms"]) == 2, "one turn before kernels are compiled, one after"
        assert min(*row["step_ms"], row["first_step_s"], row["host_ms"], row["exit_s"]) > 0
        assert row["parameters"] == 256 * 64 + 2 * (2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    ours = found["rows"][-1]
    assert min(ours["predicted_ms"], ours["predicted_bytes"]) > 0
    assert min(found["product_flops_per_s"], found["copy_bytes_per_s"]) > 0
    assert capsys.readouterr().out.count("| tiny-llama | default | ") == 3


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_less_memory_is_as_much_as_recomputation_can_save(precision: Any) -> None:
    """Most of what a small model holds is stored between steps, so that no share of its whole peak would do."""
    tiny = Setting("tiny", SIZES["tiny"], device="cpu", precision=precision)
    peaks: list[int] = []
    for built in (runners.wholestep(tiny), runners.with_less_memory(tiny)):
        built.step(*tiny.batch(0))
        local: Any = getattr(built.compiled, "local_graph", None)
        peaks.append(ws.peak_memory(local).size_bytes)
    assert peaks[1] < peaks[0]


def refuses(setting: Setting) -> Any:
    raise RuntimeError("out of memory | all of it\nand more")


def breaks(setting: Setting) -> Any:
    """The steps before the first turn go well."""
    built, calls = runners.torch_runner(setting), iter(range(worker.EARLY_STEPS))

    def counted(x: Any, y: Any) -> Any:
        next(calls)
        return built.step(x, y)

    return runners.Built(counted, built.parameters)


def hangs(setting: Setting) -> Any:
    time.sleep(600)


def dies(setting: Setting) -> Any:
    os._exit(7)


def leaves_badly(setting: Setting) -> Any:
    import atexit

    atexit.register(os._exit, 3)
    return runners.torch_runner(setting)


def serve_mine(connection: Any, setting: Setting, name: str) -> None:
    runners.RUNNERS[name] = runners.Runner(globals()[name])
    torch.set_num_threads(1)
    worker.serve(connection, setting, name)


@pytest.mark.full
def test_a_runner_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first step, later, by death, at its end; the others are measured."""
    names = ["refuses", "breaks", "dies", "leaves_badly"]
    monkeypatch.setattr(worker, "serve", serve_mine)
    monkeypatch.setattr(command, "RUNNERS", dict.fromkeys(names, runners.RUNNERS["eager"]))
    report = Report({}, None)
    command.compare(TINY, names, 1, report, 100.0, time.monotonic() + 1000)
    errors = {row.runner: row.error for row in report.rows}
    assert errors == {
        "refuses": "RuntimeError: out of memory / all of it",
        "breaks": "StopIteration: ",
        "dies": "its process ended with code 7 (early)",
        "leaves_badly": "its process ended with code 3",
    }
    assert "| tiny | fused | dies | its process ended" in command.table(report, [TINY])
    assert report.rows[-1].host_ms


def test_a_runner_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "serve", serve_mine)
    hanging = worker.Worker(TINY, "hangs")
    with pytest.raises(worker.WorkerError, match=r"no answer within 1 s \(early\)"):
        hanging.ask("early", 1.0)
    assert hanging.process.exitcode


def test_no_runner_begins_after_the_deadline() -> None:
    report = Report({}, None)
    command.compare(TINY, ["eager"], 1, report, 8.0, time.monotonic() - 1)
    assert report.rows[0].error == "not run: out of time"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "huge"], "'huge' is unknown: choose among tiny, tiny-llama, small, gpt2, llama1b"),
        (["--sizes", "tiny/quick"], "'tiny/quick' names no implementation of AdamW: write SIZE/ and one of default,"),
        (["--device", "cpu", "--runners", "eager,jax"], "'jax' is unknown: choose among eager, fsdp2,"),
        (["--device", "cuda"], "torch sees no CUDA device here: --device cpu --sizes tiny is a dry run"),
        (["--nullcuda"], "there is no null device: `make test-nullcuda` builds it"),
    ],
)
def test_what_is_unknown(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "NULL_DEVICE", tmp_path / "nullcuda")
    with pytest.raises(SystemExit):
        command.main(words)
    assert said in capsys.readouterr().err


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert worker.idle_us([]) == 0
    assert worker.idle_us([(0, 5), (3, 4), (9, 10), (10, 12)]) == 4
    assert worker.idle_us([(9, 10), (0, 5), (1, 2)]) == 4


def test_sizes_are_what_they_are_called() -> None:
    """GPT-2 has 124 M parameters, Llama-3.2-1B 1.24 G."""
    counts: dict[str, int] = {}
    for name in ("gpt2", "llama1b"):
        model, _ = Setting(name, SIZES[name], device="meta", optimizer="default").build()
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts["gpt2"] == pytest.approx(124.4e6, rel=1e-3)
    assert counts["llama1b"] == pytest.approx(1235.8e6, rel=1e-3)
