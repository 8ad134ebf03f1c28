"""benchmarks/gpu.py without a GPU: its dry run, rows of runners that fail, and what it makes of a profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same losses with every runner; a table, and everything in a file."""
    runners = "eager,wholestep:eager,wholestep:cudagraphs"
    words = ["--device", "cpu", "--sizes", "tiny", "--runners", runners, "--rounds", "1", "--json"]
    with pytest.warns(UserWarning, match="'tokens.weight' is on cpu"):
        assert gpu.main([*words, str(tmp_path / "made" / "gpu.json")]) == 0
    found = json.loads((tmp_path / "made" / "gpu.json").read_text())
    assert [row["runner"] for row in found["rows"]] == runners.split(",")
    for row in found["rows"]:
        assert not row["error"]
        assert row["loss_gap"] < 0.02, "bfloat16"
        assert len(row["losses"]) == 1 + 4 + gpu.UNTIMED_STEPS + gpu.TURN_STEPS
        assert row["losses"] != [row["losses"][0]] * len(row["losses"])
        assert (
            min(row["step_ms"], row["first_step_s"], row["tokens_per_s"], row["product_share"], row["copy_share"]) > 0
        )
        assert row["parameters"] == 256 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 4 * 64) + 2 * 64
    assert min(found["product_flops_per_s"], found["copy_bytes_per_s"]) > 0
    out = capsys.readouterr().out
    assert out.count("| tiny | ") == 3
    assert "bfloat16 product" in out


def test_a_runner_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """While it is built, or later; the others are measured."""

    def refuses(setting: gpu.Setting) -> Any:
        raise RuntimeError("out of memory | all of it\nand more")

    def breaks(setting: gpu.Setting) -> Any:
        step, model = gpu.torch_runner(setting)
        calls = iter(range(7))

        def counted(x: Any, y: Any) -> Any:
            next(calls)
            return step(x, y)

        return counted, model

    monkeypatch.setattr(gpu, "RUNNERS", {"a": refuses, "b": breaks, "c": gpu.torch_runner})
    assert gpu.main(["--device", "cpu", "--sizes", "tiny", "--runners", "a,b,c", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "| tiny | a | RuntimeError: out of memory / all of it |" in out
    assert "| tiny | b | StopIteration:  |" in out
    assert "0e+00" in next(line for line in out.splitlines() if line.startswith("| tiny | c |"))
    assert gpu.main(["--device", "cpu", "--sizes", "tiny", "--runners", "a", "--rounds", "1"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "huge"], "'huge' is unknown: choose among tiny, small, medium, large"),
        (["--device", "cpu", "--runners", "eager,jax"], "'jax' is unknown: choose among eager, compile:model,"),
        (["--device", "cuda"], "torch sees no CUDA device here: --device cpu --sizes tiny is a dry run"),
    ],
)
def test_what_is_unknown(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert said in capsys.readouterr().err


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert gpu.idle_us([]) == 0
    assert gpu.idle_us([(0, 5), (3, 4), (9, 10), (10, 12)]) == 4
    assert gpu.idle_us([(9, 10), (0, 5), (1, 2)]) == 4


def test_sizes_are_what_they_are_called() -> None:
    """Weights of the layers and the embedding, in millions."""
    millions = {n: (12 * s.layers * s.width**2 + s.vocabulary * s.width) / 1e6 for n, s in gpu.SIZES.items()}
    assert [round(millions[name]) for name in ("small", "medium", "large")] == [36, 336, 1275]
