"""The benchmark of the cost model, on small files made from formulas whose answers are known."""

import csv
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wholestep as ws
from benchmarks.accuracy import collectives, config, gemms, memory, refit, runs, step
from benchmarks.accuracy.read import Case, hardware_of, rows
from benchmarks.accuracy.report import errors, left_out, worst
from wholestep.hardware.calibration import TimeSample, fit_curve
from wholestep.hardware.curves import Curve, Regime, curve_us

MIB = 1 << 20
RUN = {
    "source_id": "made", "hw": "A100 80GB", "n_gpus": "16", "gpus_per_node": "8", "model": "Llama2-7B",
    "n_layers": "32", "d_model": "4096", "n_heads": "32", "n_kv_heads": "32", "d_ff": "11008", "vocab": "32000",
    "seq_len": "4096", "dp_replicate": "", "dp_shard": "16", "tp": "1", "pp": "1", "cp": "", "sharding": "FSDP2",
    "micro_batch": "1", "grad_accum": "1", "global_batch": "16", "dtype": "bf16", "ac": "full", "compile": "no",
    "tokens_per_s_per_gpu": "", "step_time_s": "2.0", "mem_gib": "", "notes": "",
}  # fmt: skip


def run_of(**changed: str) -> config.Run:
    found = config.read(RUN | changed)
    assert isinstance(found, config.Run), found
    return found


def write(path: Path, made: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, list(made[0]))
        out.writeheader()
        out.writerows(made)
    return path


@pytest.mark.parametrize("algorithm", ["ring", "nvls", "pairwise"])
def test_a_curve_is_found_again_from_its_own_times(algorithm: str) -> None:
    """At sizes that were not fitted too."""
    kind = "all_to_all" if algorithm == "pairwise" else "all_reduce"
    true = Curve(kind, algorithm, (Regime(20.0, 1.0, 0.4), Regime(60.0, 1.0, 0.9)), 800e3)
    rates, late = (300e3,), (1.5,)
    made = [
        TimeSample(size, (ranks, 1), curve_us(true, size, (ranks, 1), rates, late))
        for ranks in (2, 4, 8)
        for size in (2.0**i for i in range(12, 31))
    ]
    found = fit_curve(kind, algorithm, made[::2], rates, late)
    wrong = [abs(curve_us(found, s.size_bytes, s.units, rates, late) / s.us - 1) for s in made[1::2]]
    assert sorted(wrong)[len(wrong) // 2] < 0.03
    assert max(wrong) < 0.2


def measured(noise: float = 0.0) -> list[dict[str, str]]:
    """All-gathers of the preset, each some percent off."""
    h100 = ws.Hardware.preset("dgx-h100")
    made = []
    for ranks in (2, 8):
        for power in range(16, 31):
            us = h100.group_us("all_gather", 2.0**power, ranks) * (1 + noise * (-1) ** power)
            made.append({
                "source_id": "made", "device": "H100", "collective": "all_gather", "n_ranks": str(ranks),
                "ranks_per_node": str(ranks), "message_bytes": str(2**power), "time_us": str(us),
            })  # fmt: skip
    return made


def test_collectives_held_out_and_as_shipped() -> None:
    found, left = collectives.read(
        [*measured(0.02), {**measured()[0], "time_us": ""}, {**measured()[0], "device": "TPU"}]
    )
    assert len(found) == 30
    assert [one.reason for one in left] == ["a peak only: no time", "no preset for this device"]
    shipped = collectives.in_sample(found)
    assert all(abs(abs(case.error) - 0.02) < 0.001 for case in shipped)
    for cases in (collectives.by_size(found), collectives.by_ranks(found)):
        large = [abs(case.error) for case in cases if case.group == ">= 64 MiB"]
        assert large
        assert max(large) < 0.3
    assert len(collectives.by_size(found)) == 30


def test_a_fold_does_not_see_what_it_is_tested_on() -> None:
    """Groups of eight take three times as long as groups of two let expect: so wrong is what those predict."""
    made = [row | {"time_us": str(float(row["time_us"]) * (3 if row["n_ranks"] == "8" else 1))} for row in measured()]
    found, _ = collectives.read(made)
    cases = [c for c in collectives.by_ranks(found) if c.group == ">= 64 MiB" and "8 ranks" in c.label]
    assert len(cases) == 5
    assert all(-0.72 < case.error < -0.6 for case in cases)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pp": "2"}, "pipeline parallel"),
        ({"cp": "4"}, "context parallel"),
        ({"dtype": "bf16+float8"}, "8 bit or less"),
        ({"model": "Mixtral-8x7B"}, "experts"),
        ({"micro_batch": "", "global_batch": ""}, "no size of the micro-batch"),
        ({"n_layers": ""}, "no sizes of layers"),
        ({"ac": "of some kind"}, "recompute of an unknown kind"),
        ({"step_time_s": ""}, "neither a time nor bytes"),
    ],
)
def test_what_cannot_be_expressed_is_counted(changed: dict[str, str], reason: str) -> None:
    assert config.read(RUN | changed) == reason
    found, held, left = runs.read([RUN, RUN | changed, RUN | {"hw": "TPU v5"}])
    assert (len(found), len(held)) == (1, 0)
    assert [one.reason for one in left] == [reason, "no preset for this hardware"]
    assert left_out("left", left).rows[0][2] == "1"


def test_a_run_is_read_from_its_columns() -> None:
    run = run_of(tokens_per_s_per_gpu="2048", step_time_s="", grad_accum="", global_batch="64", ac="selective op")
    assert (run.style, run.shard, run.replicate, run.accumulate, run.ac) == ("full", 16, 1, 4, "ops")
    assert run.step_s == pytest.approx(4096 * 4 / 2048)
    assert run.parameters == pytest.approx(6.74e9, rel=0.01)
    assert run_of(sharding="HSDP (FSDP)", dp_replicate="2", dp_shard="8").replicate == 2
    assert run_of(sharding="none", tp="8", dp_shard="").style == "replicate"
    assert run_of(n_kv_heads="").kv_heads == 32
    assert run_of(hw="GB200 NVL72").per_node == 72
    assert [run_of(ac="selective", source_id=s).ac for s in ("torchtitan_x", "megatron")] == ["ops", "attention"]


@pytest.mark.parametrize("name", ["Llama-2-7B", "llama2_7b", "Llama 2 7B", "meta-llama-2-7b-hf"])
def test_sizes_of_layers_are_known_by_the_name_of_the_model(name: str) -> None:
    unknown = dict.fromkeys(("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len"), "")
    assert replace(run_of(**unknown, model=name), model="") == replace(run_of(), model="")
    assert config.read(RUN | unknown | {"model": "Llama-2-8B"}) == "no sizes of layers"
    assert run_of(**unknown, model="Llama-3-70B").parameters == pytest.approx(70.6e9, rel=0.01)
    assert run_of(**unknown, model="Llama3.1-405B").parameters == pytest.approx(405.8e9, rel=0.01)


def test_the_micro_batch_is_the_batch_of_all_over_the_ranks() -> None:
    run = run_of(micro_batch="", grad_accum="", global_batch="64", dp_shard="8", tp="2")
    assert (run.micro, run.accumulate) == (8, 1)
    run = run_of(micro_batch="", grad_accum="2", global_batch="64")
    assert (run.micro, run.accumulate) == (2, 2)
    several = {"micro_batch": "", "grad_accum": "", "global_batch": "24"}
    assert config.read(RUN | several) == "no size of the micro-batch"


@pytest.mark.parametrize(
    ("text", "kind", "share"),
    [
        ("default SAC", "ops", 1.0), ("SAC eager", "ops", 1.0), ("selective layer", "full", 0.5), ("none", "none", 1.0),
        ("5 layers checkpointed", "full", 5 / 32), ("8 of 32 layers checkpointed", "full", 8 / 32),
        ("checkpointing 40 layers", "full", 1.0), ("activation checkpointing", "full", 1.0),
    ],
)  # fmt: skip
def test_kinds_of_recompute(text: str, kind: str, share: float) -> None:
    run = run_of(ac=text, source_id="torchtitan_pr")
    assert (run.ac, run.checkpointed) == (kind, share)


def test_part_of_the_layers_made_again_is_between_none_and_all() -> None:
    chosen = [run_of(ac=text) for text in ("none", "5 layers checkpointed", "20 layers checkpointed", "full")]
    seconds = [step.step_s(run, ws.Hardware.preset("dgx-a100")) for run in chosen]
    held = [memory.peak_gib(run) for run in chosen]
    assert seconds == sorted(seconds)
    assert held[:3] == sorted(held[:3], reverse=True)


def test_parts_of_95_gib_are_those_of_96_gb() -> None:
    names = ("H100 SXM (95 GiB)", "H100 94GB", "H100 96 GB", "H100 80GB")
    assert [found.name for name in names if (found := hardware_of(name))] == ["h100-96gb-500w"] * 3 + ["dgx-h100"]


@pytest.mark.parametrize(("held", "reason"), [("74.9", "nearly full"), ("50", "not explained")])
def test_a_nearly_full_memory_is_named_only_where_it_is(held: str, reason: str) -> None:
    """The device has 80 GiB."""
    run = run_of(mem_gib=held, gpu_mem_gb="80", step_time_s="20")
    cases = runs.held_out([runs.Predicted(run, 10.0), runs.Predicted(replace(run, model="other", step_s=10.0), 10.0)])
    assert reason in cases[0].reason


def test_steps_are_slower_where_they_must_be() -> None:
    a100 = ws.Hardware.preset("dgx-a100")

    def seconds(hardware: ws.Hardware = a100, **changed: str) -> float:
        return step.step_s(run_of(**changed), hardware)

    base = seconds()
    flops = 6 * run_of().parameters * 4096
    assert flops * 4 / 3 / 312e12 < base < 3 * flops / 312e12
    assert seconds(ac="none") < seconds(ac="selective op") < base
    assert seconds(micro_batch="4") == pytest.approx(4 * base, rel=0.2)
    assert seconds(ws.Hardware.preset("dgx-a100+ethernet-10")) > 4 * base
    assert seconds(tp="8", dp_shard="2") < base
    assert seconds(grad_accum="4") == pytest.approx(4 * base, rel=0.1)


@pytest.mark.parametrize(
    ("ranks", "compiled", "published"), [(8, "no", 82.4), (8, "yes", 77.0), (128, "no", 67.0), (128, "yes", 62.0)]
)
def test_memory_of_runs_that_torchtitan_published(ranks: int, compiled: str, published: float) -> None:
    """Llama-3.1-8B under FSDP2, two sequences of 8192 a rank, in its benchmarks of December 2024; two causes were found
    by them: gradients on a stream of their own, and what a compiled loss keeps.
    """
    run = run_of(
        n_layers="32", d_model="4096", n_heads="32", n_kv_heads="8", d_ff="14336", vocab="128256", seq_len="8192",
        n_gpus=str(ranks), dp_shard=str(ranks), dp_replicate="", tp="", sharding="FSDP2", micro_batch="2",
        global_batch=str(2 * ranks), ac="selective op", compile=compiled,
    )  # fmt: skip
    assert memory.peak_gib(run) == pytest.approx(published, rel=0.05)


def test_memory_is_what_its_parts_are() -> None:
    run = run_of(ac="full", compile="yes")
    rest = run.parameters * 12 / 16
    made = memory.peak_gib(run) * 2**30
    logits = 4096 * 32000 * 12
    kept = 32 * 4096 * 4096 * 2
    assert rest + logits + kept < made < rest + logits + kept + 6e9
    assert memory.peak_gib(run_of(ac="none")) > memory.peak_gib(run_of(ac="selective op")) > memory.peak_gib(run_of())
    assert memory.peak_gib(run_of(dp_shard="64", n_gpus="64")) < memory.peak_gib(run_of())


def test_one_scalar_for_a_hardware_is_fitted_to_other_models() -> None:
    """Every time is twice the model's, but one model's three times: its own scalar is not used for it."""
    made = []
    for model, factor in (("Llama2-7B", 2.0), ("Llama2-13B", 2.0), ("Llama2-70B", 3.0)):
        predicted = step.step_s(run_of(model=model), ws.Hardware.preset("dgx-a100"))
        made.append(RUN | {"model": model, "step_time_s": str(factor * predicted)})
    found, _, _ = runs.read(made)
    assert runs.fit_scalar(found) == pytest.approx(2)
    by_model = {case.label.split()[0]: case.error for case in runs.held_out(found)}
    assert by_model["Llama2-7B"] in (pytest.approx(0), pytest.approx(0.5))
    assert by_model["Llama2-70B"] == pytest.approx(-1 / 3)
    alone = runs.held_out(found[:1])[0]
    assert alone.error == pytest.approx(-0.5)
    assert alone.reason == "the only model on this hardware: no scalar could be fitted"


def test_products_are_read_by_dtype() -> None:
    h100 = ws.Hardware.preset("dgx-h100")
    row = {"device": "H100 (sm_90)", "b": "2", "m": "512", "n": "256", "k": "1024", "dtype": "bf16xbf16->bf16"}
    cases, left = gemms.read([row | {"time_us": "10"}, row | {"dtype": "int4", "time_us": "10"}, row | {"time_us": ""}])
    assert cases[0].predicted == h100.matmul_us(2, 512, 256, 1024)
    assert [one.reason for one in left] == ["no such dtype", "no time"]


def test_tables() -> None:
    cases = [Case("a", "x", f"row {i}", "g", 10.0, 10.0 + i, "") for i in range(4)]
    table = errors("title", "said", cases, lambda c: (c.source,), ("source",))
    assert table.rows == (("a", "4", "15.0%", "15.0%", "+15.0%", "1", "30.0%"),)
    assert [row[2] for row in worst("w", cases, 2).rows] == ["row 3", "row 2"]


def test_the_command(tmp_path: Path) -> None:
    runs_csv = write(
        tmp_path / "runs.csv", [RUN, RUN | {"model": "Llama2-13B"}, RUN | {"pp": "4"}, RUN | {"mem_gib": "40"}]
    )
    sent_csv = write(tmp_path / "sent.csv", measured(0.02))
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.accuracy", "--runs", str(runs_csv), "--collectives", str(sent_csv)]
    done = subprocess.run([*command, "--table", str(page)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for heading in ("Collectives, by size, held out", "Step times, held out by model", "Memory", "Runs left out"):
        assert f"### {heading}" in text
    assert "| made | pipeline parallel | 1 |" in text
    bad = write(tmp_path / "bad.csv", [{"device": "H100"}])
    failed = subprocess.run([*command[:3], "--gemms", str(bad)], capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1
    assert "has no column b, dtype, k, m, n, time_us" in failed.stderr
    with pytest.raises(SystemExit, match="cannot be read"):
        rows(tmp_path / "none.csv", ())
    assert math.isfinite(len(text))


def test_figures_are_fitted_again_to_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of odd and even place take alike; then one model's times are doubled, and it is off by half."""
    monkeypatch.setattr(refit, "_ROUNDS", 5)
    a100 = ws.Hardware.preset("dgx-a100")
    made = [
        RUN | {"model": f"Llama2-{i}B", "n_layers": str(10 + i), "micro_batch": str(1 + i % 3)} for i in range(1, 9)
    ]
    timed = [row | {"step_time_s": str(step.step_s(run_of(**row), a100))} for row in made]
    found, _, _ = runs.read(timed)
    assert max(abs(case.error) for case in refit.halves(found)) < 0.2
    found[0] = replace(found[0], run=replace(found[0].run, step_s=2 * (found[0].run.step_s or 0)))
    assert min(case.error for case in refit.halves(found)) == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("seed", [4, 12, 19, 20])
def test_times_that_say_nothing_give_a_curve_all_the_same(seed: int) -> None:
    """Six times that are noise: some figures do not matter to the fit, and must stay figures."""
    noise = np.random.default_rng(seed).normal(6, 1.5, 6)
    samples = [TimeSample(4096 << i, (2, 1), float(us)) for i, us in enumerate(np.exp(noise))]
    found = fit_curve("all_gather", "gloo", samples, [1000.0], [10.0])
    figures = [value for one in found.regimes for value in (one.base_us, one.latency, one.rate)]
    assert all(np.isfinite(figures))
    assert min(figures) > 0
    assert max(figures) < 1e30
