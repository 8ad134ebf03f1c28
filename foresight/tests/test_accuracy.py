"""The benchmark of the cost model, on small files made from formulas whose answers are known."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import wholestep as ws
from foresight.accuracy import collectives, config, gemms, model, runs, simulated
from foresight.accuracy.__main__ import main, thinned, with_part
from foresight.accuracy.read import Case, data_sheet, hardware_of, number, rows
from foresight.accuracy.report import errors, in_short, left_out, worst
from wholestep.cli import app
from wholestep.graph.meta import is_backward, module_path
from wholestep.hardware.curves import Curve, Regime, curve_us
from wholestep.passes.in_bodies import InBodies
from wholestep.passes.overlap import Overlap
from wholestep.planner.recompute_kinds import passes_of
from wholestep_foresight import Stack
from wholestep_foresight.calibration import TimeSample, fit_curve

MIB = 1 << 20
NEVER_FITTED = Path(__file__).parents[1] / "accuracy" / "never_fitted.csv"
LONG = NEVER_FITTED.with_name("long_sequences.csv")
RUN = {
    "source_id": "made", "hw": "A100 80GB", "n_gpus": "16", "gpus_per_node": "8", "model": "Llama2-7B",
    "n_layers": "32", "d_model": "4096", "n_heads": "32", "n_kv_heads": "32", "d_ff": "11008", "vocab": "32000",
    "seq_len": "4096", "dp_replicate": "", "dp_shard": "16", "tp": "1", "pp": "1", "cp": "", "sharding": "FSDP2",
    "micro_batch": "1", "grad_accum": "1", "global_batch": "16", "dtype": "bf16", "ac": "full", "compile": "no",
    "tokens_per_s_per_gpu": "", "step_time_s": "2.0", "mem_gib": "", "notes": "",
}  # fmt: skip

SMALL = {"n_layers": "16", "d_model": "2048", "n_heads": "16", "n_kv_heads": "16", "d_ff": "5632"}
A100 = ws.Hardware.preset("dgx-a100")


def run_of(**changed: str) -> config.Run:
    found = config.read(RUN | changed)
    assert isinstance(found, config.Run), found
    return found


def parameters(run: config.Run) -> int:
    with torch.device("meta"):
        return sum(one.numel() for one in model.Decoder(run, run.layers).parameters())


def seconds(hardware: ws.Hardware = A100, **changed: str) -> float:
    return simulated.step_s(run_of(**SMALL | changed), hardware)


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
    made: list[dict[str, str]] = []
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
        ({"cp": "4"}, "context parallel"),
        ({"dtype": "mxfp8"}, "8 bit with scales of blocks, or less"),
        ({"model": "Mixtral-8x7B"}, "experts"),
        ({"micro_batch": "", "global_batch": ""}, "no size of the micro-batch"),
        ({"n_layers": ""}, "no sizes of layers"),
        ({"ac": "of some kind"}, "recompute of an unknown kind"),
        ({"step_time_s": ""}, "neither a time nor bytes"),
        ({"pp": "4", "dp_shard": ""}, "a pipeline of one micro-batch"),
    ],
)
def test_what_cannot_be_expressed_is_counted(changed: dict[str, str], reason: str) -> None:
    assert config.read(RUN | changed) == reason
    found, left = runs.read([RUN | changed, RUN | {"hw": "TPU v5"}])
    assert found == []
    assert [one.reason for one in left] == [reason, "no preset for this hardware"]
    assert left_out("left", left).rows[0][2] == "1"


@pytest.mark.parametrize(("cp", "notes"), [("2", "a ring"), ("8", "a ring; not balanced")])
def test_published_runs_whose_ranks_share_sequences(cp: str, notes: str) -> None:
    """Llama-3.1-8B in float8, 32,768 tokens a rank, within a fifth from the data sheet; a balanced ring is faster."""
    (row,) = (row for row in rows(LONG, config.COLUMNS) if (row["cp"], row["notes"]) == (cp, notes))
    run, hardware = config.read(row), hardware_of(row["hw"])
    assert isinstance(run, config.Run)
    assert hardware is not None
    assert (run.cp, run.shard, run.length, run.step_s) == (int(cp), 8 // int(cp), 32768 * int(cp), pytest.approx(
        32768 / float(row["tokens_per_s_per_gpu"])))  # fmt: skip
    predicted = simulated.step_s(run, hardware)
    assert run.step_s is not None
    assert abs(predicted / run.step_s - 1) < 0.2
    if not run.balanced:
        assert simulated.step_s(replace(run, balanced=True), hardware) < 0.7 * predicted


def test_a_host_that_waits_before_each_pass_takes_longer() -> None:
    """It cannot run ahead over the end of a forward, as while the loss is computed: in each micro-batch."""
    old = run_of(**SMALL | {"source_id": "vtrain", "sharding": "DDP", "model": "GPT", "d_ff": "8192", "grad_accum": "4",
                            "n_gpus": "8", "dp_shard": "", "seq_len": "1024"})  # fmt: skip
    assert old.stack.waits
    waits = simulated.step_s(old, A100)
    ahead = simulated.step_s(replace(old, stack=replace(old.stack, waits=False)), A100)
    assert ahead * 1.001 < waits < ahead * 1.5


def test_a_stack_without_overlap_has_none_in_blocks_of_stages() -> None:
    made = passes_of("none", A100, software=Stack.named("megatron-deepspeed-2022"))
    assert not any(isinstance(one, (InBodies, Overlap)) for one in made)
    made = passes_of("none", A100, software=Stack.named("megatron-2022"))
    assert [one.fills for one in made if isinstance(one, (InBodies, Overlap))] == ["own", "own"]


PUBLISHED = f"""
from dataclasses import replace
from pathlib import Path
from foresight.accuracy import config, model
from foresight.accuracy.read import rows

def run():
    given = rows(Path({str(NEVER_FITTED)!r}), config.COLUMNS)
    made = next(row for row in given if (row["source_id"], row["tp"], row["dp_shard"]) == ("kempnerforge", "4", "2"))
    return replace(config.read(made), layers=8, accumulate=1, sequence=False)

def step():
    return model.build(run(), 8)
"""


@pytest.mark.full
def test_the_command_says_of_a_published_row_what_the_table_says(tmp_path: Path) -> None:
    """Of eight layers and one micro-batch of it, for which the table takes two and three, without sequence parallelism,
    which is no name for `--tp`.
    """
    (tmp_path / "row.py").write_text(PUBLISHED)
    made: dict[str, Any] = {}
    exec(PUBLISHED, made)
    run, out = cast(config.Run, made["run"]()), tmp_path / "step.json"
    hardware = runs.machine(run)
    assert hardware is not None
    hardware.save(tmp_path / "machine.json")
    (tensor,) = (one for one in model.strategies(run) if isinstance(one, ws.TensorParallel))
    assert isinstance(tensor.plan, dict)
    named = [text for name, how in tensor.plan.items() for text in ("--tp", f"{name}={how}")]
    given = ["--mesh", model.mesh(run), "--hardware", str(tmp_path / "machine.json"), "--precision", "bf16"]
    given += ["--stack", run.stack.name, "--json", str(out), *named]
    done = CliRunner().invoke(app, ["simulate", f"{tmp_path / 'row.py'}:step", *given])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["step_us"] / 1e6 == pytest.approx(simulated.step_s(run, hardware), rel=0.003)


@pytest.mark.full
def test_checkpoints_before_torch_2_1_run_a_layer_to_its_end() -> None:
    """Its last product is the only one whose result no backward reads."""
    stops = run_of(**SMALL)
    ends = replace(stops, stack=replace(stops.stack, to_the_end=True))
    more = simulated.step_s(ends, A100) - simulated.step_s(stops, A100)
    added = A100.bytes_us(3 * 2 * 4096 * 2048)  # with the residual
    assert more * 1e6 == pytest.approx(16 * (A100.matmul_us(1, 4096, 2048, 5632) + added), rel=0.01)
    kept = replace(stops, ac="none")
    assert simulated.step_s(replace(kept, stack=ends.stack), A100) == simulated.step_s(kept, A100)


def test_a_run_is_read_from_its_columns() -> None:
    run = run_of(tokens_per_s_per_gpu="2048", step_time_s="", grad_accum="", global_batch="64", ac="selective op")
    assert (run.style, run.shard, run.replicate, run.accumulate, run.ac) == ("full", 16, 1, 4, "ops")
    assert run.step_s == pytest.approx(4096 * 4 / 2048)
    assert parameters(run) == pytest.approx(6.74e9, rel=0.01)
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
    assert parameters(run_of(**unknown | {"seq_len": "2048"}, model="MPT-1b")) == 1_315_950_592  # as llm-foundry prints
    assert parameters(run_of(**unknown, model="Llama-3-70B")) == pytest.approx(70.6e9, rel=0.01)
    assert parameters(run_of(**unknown, model="Llama3.1-405B")) == pytest.approx(405.8e9, rel=0.01)
    assert parameters(run_of(**unknown | {"seq_len": "4096"}, model="Qwen3-32B")) == pytest.approx(32.8e9, rel=0.01)


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


def test_parts_of_95_gib_are_those_of_96_gb() -> None:
    assert [hardware_of(name) for name in ("A100 40GB", "A100 80GB", "A100")] == [
        ws.Hardware.preset("dgx-a100-40gb"), A100, A100
    ]  # fmt: skip
    names = ("H100 SXM (95 GiB)", "H100 94GB", "H100 96 GB", "H100 80GB")
    assert [found.name for name in names if (found := hardware_of(name))] == ["h100-96gb-500w"] * 3 + ["dgx-h100"]


@pytest.mark.parametrize(
    ("said", "per_node", "name", "gbit"),
    [
        ("", 8, "infiniband-200", 200), ("400 Gbit/s a node", 8, "infiniband-50", 50),
        ("100 Gbps node", 4, "infiniband-25", 25), ("400 Gb/s per GPU", 8, "infiniband-400", 400),
        ("A100 with 1600 Gbps node-node interconnect (RoCE)", 8, "roce-200", 200),
        ("some links", 8, "infiniband-200", 200),
    ],
)  # fmt: skip
def test_links_are_those_that_a_source_says(said: str, per_node: int, name: str, gbit: float) -> None:
    found = hardware_of("A100 80GB", said, per_node)
    assert found is not None
    assert found.levels[-1].name == name
    assert found.levels[-1].bytes_per_us == gbit / 8 * 1e3
    assert (found.ranks_per_node, found.levels[0].direct) == (per_node, per_node == 4)
    run = run_of(interconnect=said, gpus_per_node=str(per_node))
    assert runs.machine(run) == found


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"source_id": "vtrain_single"}, "megatron-deepspeed-2022"), ({"source_id": "torchtitan_pr"}, "torchtitan"),
        ({"source_id": "torchtitan_pr", "compile": "yes"}, "torchtitan-compile"),
        ({"source_id": "torchtitan_pr", "compile": "no inductor"}, "torchtitan-simple-fsdp"),
        ({"source_id": "torchtitan_pr", "compile": "regional inductor"}, "torchtitan-graph"),
        ({"ref": "pytorch/torchtitan commit 83c879f18 (PR #165)"}, "torchtrain-2024"),
        ({"ref": "pytorch/torchtitan commit d66b72a6a (PR #1690)"}, "torchtitan-2025"),
        ({"ref": "pytorch/torchtitan commit d66b72a6a (PR #1690)", "compile": "yes"}, "torchtitan-2025-compile"),
        ({"ref": "https://github.com/pytorch/torchtitan/pull/700"}, "torchtitan-2024"),
        ({"source_id": "torchtitan_2024_12", "compile": "yes"}, "torchtitan-2024-compile"),
        ({"source_id": "torchtitan_2024", "ref": "pytorch/torchtitan@1ea476e9f:docs"}, "torchtitan-2024-04"),
        ({"ref": "https://github.com/pytorch/torchtitan/pull/1800"}, "torchtitan"),
        ({"ref": "pytorch/torchtitan commit fca8ab7be (PR #2570)"}, "torchtitan-graph-2026-03"),
        ({"ref": "pytorch/torchtitan commit a364b4b4f (PR #3141)"}, "torchtitan-graph-2026-04"),
        ({"source_id": "torchtitan_pr", "compile": "full inductor + cudagraph"}, "torchtitan-cudagraph"),
        ({"sharding": "FSDP", "compile": "yes"}, "fsdp-compile"), ({"sharding": "DeepSpeed ZeRO-3"}, "deepspeed"),
        ({"stack": "kempnerforge-compile"}, "kempnerforge-compile"),
        ({"stack": "megatron"}, "megatron"), ({"source_id": "nemo_25"}, "megatron"), ({}, "fsdp"),
        ({"ref": "mosaicml/llm-foundry", "dtype": "amp_bf16 (MP mode DEFAULT)"}, "llm-foundry-2023"),
        ({"ref": "mosaicml/llm-foundry", "dtype": "bf16 (MP mode PURE)"}, "llm-foundry-2023-05"),
    ],
)  # fmt: skip
def test_the_stack_follows_from_the_source_or_is_named(row: dict[str, str], name: str) -> None:
    assert run_of(**row).stack == Stack.named(name)


@pytest.mark.parametrize(
    ("text", "value"), [("1,024", 1024.0), ("6100-6300", 6200.0), ("25% of 96", 24.0), ("", None), ("about 3", None)]
)
def test_figures_of_a_cell(text: str, value: float | None) -> None:
    assert number({"x": text}, "x") == value


def test_steps_are_slower_where_they_must_be() -> None:
    base = seconds()
    flops = 6 * parameters(run_of(**SMALL)) * 4096
    assert flops * 4 / 3 / 312e12 < base < 4 * flops / 312e12
    assert seconds(ac="none") < seconds(ac="8 layers checkpointed") < base
    assert seconds(grad_accum="4") == pytest.approx(4 * base, rel=0.2)
    assert seconds(ws.Hardware.preset("dgx-a100+ethernet-10")) > 2 * base
    assert seconds(compile="yes") < base


TP = {"n_gpus": "4", "dp_shard": "", "tp": "4", "sharding": "none", "seq_len": "1024", "ac": "none"}


@pytest.mark.parametrize(
    ("stack", "notes", "again"),
    [("megatron-2022", "sequence parallel", True), ("megatron-2022", "", False), ("fsdp", "sequence parallel", False)],
)
def test_megatron_gathers_the_tokens_that_it_shares_again(stack: str, notes: str, again: bool) -> None:
    run = run_of(**SMALL | TP, stack=stack, notes=notes)
    (found,) = model.strategies(run)
    assert (found.reshard_after_forward, run.sequence) == (again, bool(notes))


def test_heads_that_are_gathered_are_gathered_again_where_they_are_recomputed() -> None:
    """Qwen 3 of torchtitan, whose ranks rotate all heads."""
    row = {"model": "Qwen3-8B", "ac": "full", "ref": "pytorch/torchtitan commit d66b72a6a (PR #1690)"}
    run = run_of(**SMALL | TP | row)
    step, *given = model.build(run, 1)
    graph = ws.capture(step, *given)
    plan = ws.plan(graph, model.mesh(run), model.strategies(run))
    turn = [node for node in graph.graph.nodes if module_path(node) == "layers.0.attention.turn"]
    for again in (False, True):
        turned = [plan.decisions[node.name].given for node in turn if is_backward(node) is again]
        assert turned
        assert not any(layout.shard_axes() for given in turned for layout in given)


@pytest.mark.full
def test_memory_falls_with_recompute() -> None:
    def gib(**changed: str) -> float:
        return simulated.peak_gib(run_of(**SMALL | {"n_layers": "16"} | changed), A100)

    held, kept = gib(), gib(ac="none")
    at_rest = parameters(run_of(**SMALL)) * 12 / 16 / 2**30
    assert at_rest < held < gib(ac="8 layers checkpointed") < kept
    assert held < gib(ac="selective op", source_id="torchtitan_x") < kept


@pytest.mark.full
def test_layers_that_are_not_simulated_follow_from_those_that_are() -> None:
    """A step of two and of three layers says what one of eight takes."""
    run = run_of(**SMALL | {"n_layers": "8"})
    step, *given = model.build(run, 8)
    graph = ws.capture(step, *given, options=ws.CaptureOptions(mixed_precision=simulated.HALF))
    local = ws.partition(graph, ws.plan(graph, "dp=16", model.strategies(run), hardware=A100))
    local = ws.run_passes(local, passes_of("none", A100, software=run.stack))
    whole = ws.simulate(local, A100, software=run.stack).step_us / 1e6
    assert simulated.step_s(run, A100) == pytest.approx(whole, rel=0.1)


@pytest.mark.full
def test_a_pipeline_is_simulated_with_all_stages_and_pieces() -> None:
    """Each further piece takes what the slowest stage takes for one, whatever the number of pieces."""
    row = SMALL | {"n_gpus": "4", "pp": "4", "dp_shard": "", "sharding": "DDP", "seq_len": "1024"}
    run = run_of(**row, grad_accum="8")
    assert (run.stages, run.replicate, runs.kind(run)) == (4, 1, "pipeline, one node")
    few, more = (simulated.staged_step(run_of(**row, grad_accum=str(count)), A100) for count in (8, 16))
    ops = [span for span in few.spans if "piece " in span.name]
    slowest = max(
        sum(span.us for span in ops if span.stream == f"stage {stage}" and span.name.endswith("piece 3"))
        for stage in range(4)
    )
    assert more.step_us - few.step_us == pytest.approx(8 * slowest, rel=0.02)
    assert [one.layers for one in few.stages] == [(4,)] * 4
    assert few.bubble == pytest.approx(3 / (8 + 3), abs=0.08)  # the formula of equal stages


def test_large_sources_are_thinned() -> None:
    given = [RUN | {"source_id": "large", "model": str(i)} for i in range(100)] + [RUN] * 3
    found = thinned(given, 15)
    assert [row["model"] for row in found[:3]] == ["0", "7", "14"]
    assert len(found) == 15 + 3
    assert thinned(given, 0) == given


def test_columns_of_cross_validation() -> None:
    """Source a takes twice what is simulated, b three times but for one row."""
    run = run_of(memory_gib="")

    def one(source: str, step_s: float, made: float) -> runs.Predicted:
        return runs.Predicted(replace(run, source=source, step_s=step_s), made, 10.0)

    found = [one("a", 2.0, 1.0), one("a", 4.0, 2.0), one("a", 6.0, 3.0), one("b", 3.0, 1.0), one("b", 9.0, 3.0)]
    assert [round(case.error, 3) for case in runs.from_the_data_sheet(found)] == [-0.5, -0.5, -0.5, -0.667, -0.667]
    assert [round(case.error, 3) for case in runs.by_other_sources(found)] == [0.5, 0.5, 0.5, -0.333, -0.333]
    assert [case.error for case in runs.after_one_row(found)] == [pytest.approx(0)] * 3
    named = zip(found, "xxxyy", strict=True)
    models = [replace(two, run=replace(two.run, source="c", model=name)) for two, name in named]
    assert [round(case.error, 3) for case in runs.by_other_models(models)] == [0.5, 0.5, 0.5, -0.333, -0.333]
    assert runs.by_other_sources(found[:3]) == []
    assert runs.after_one_row([found[0]]) == []


def two_clocks(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[tuple[int, int]]) -> list[runs.Predicted]:
    """Runs of a source whose device takes 1.2 and whose host 0.8 of what is predicted, of so many layers and widths."""

    def step_s(run: config.Run, _: ws.Hardware, rates: ws.KernelTimes) -> float:
        return run.layers * rates.device + run.width * rates.host

    monkeypatch.setattr(simulated, "step_s", step_s)

    def one(layers: int, width: int) -> runs.Predicted:
        step = 1.2 * layers + 0.8 * width
        run = replace(run_of(), layers=layers, width=width, step_s=step)
        return runs.Predicted(run, layers + width, 0.0, width / (layers + width))

    return [one(*size) for size in sizes]


def test_after_calibration_two_clocks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows say what both take, others are exact."""
    found = two_clocks(monkeypatch, ((40, 0), (80, 0), (90, 1), (10, 60), (20, 60), (20, 80), (50, 50)))
    cases = runs.after_calibration(found)
    assert len(cases) == len(found) - 2
    assert max(abs(case.error) for case in cases) < 1e-3
    assert max(abs(case.error) for case in runs.after_one_row(found)) > 0.1
    assert len(runs.after_calibration(found[:2])) == 1  # the host does not matter, and is not measured


def test_a_model_is_held_out_with_two_clocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has a row that is bound by its device and one by its host; one row of all is measured twice too long,
    which the median of several leaves out.
    """
    found = two_clocks(monkeypatch, [(40 + i, i) if i < 7 else (10, 60 + i) for i in range(14)])
    models = [replace(one, run=replace(one.run, model=str(i % 7))) for i, one in enumerate(found)]
    long = models[3]
    models[3] = replace(long, run=replace(long.run, step_s=2 * (long.run.step_s or 0.0)))
    cases = runs.by_other_models(models)
    assert len(cases) == len(models)
    assert max(abs(case.error) for case in cases if case.label != runs.label(long.run)) < 0.02
    assert runs.by_other_models(found) == []  # of one model


def test_rows_that_calibrate_are_chosen_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are left out are the same, whatever was measured."""
    found = two_clocks(monkeypatch, ((40, 0), (80, 0), (90, 1), (10, 60), (20, 60), (20, 80), (50, 50)))
    other = [replace(one, run=replace(one.run, step_s=1.0 + i)) for i, one in enumerate(reversed(found))]
    labels = [sorted(case.label for case in runs.after_calibration(rows)) for rows in (found, other)]
    assert labels[0] == labels[1]


@pytest.mark.parametrize(("held", "reason"), [("74.9", "nearly full"), ("50", "not explained")])
def test_a_nearly_full_memory_is_named_only_where_it_is(held: str, reason: str) -> None:
    """The device has 80 GiB."""
    run = run_of(mem_gib=held, gpu_mem_gb="80", step_time_s="20")
    assert reason in runs.case(runs.Predicted(run, 10.0, 1.0), 1.0).reason


def test_products_are_read_by_dtype() -> None:
    h100 = ws.Hardware.preset("dgx-h100")
    row = {"device": "H100 (sm_90)", "b": "2", "m": "512", "n": "256", "k": "1024", "dtype": "bf16xbf16->bf16"}
    cases, left = gemms.read([row | {"time_us": "10"}, row | {"dtype": "int4", "time_us": "10"}, row | {"time_us": ""}])
    burst = replace(h100, device=replace(data_sheet(h100), sustained=1.0))
    assert cases[0].predicted == burst.matmul_us(2, 512, 256, 1024) < h100.matmul_us(2, 512, 256, 1024)
    assert [one.reason for one in left] == ["no such dtype", "no time"]


def test_a_part_of_the_page_is_written_anew_and_the_others_stay() -> None:
    page = with_part("begin\n\n## own\n\nmeasured\n", "runs", "first")
    assert page == "begin\n\n## runs\n\nfirst\n## own\n\nmeasured\n"
    assert with_part(page, "runs", "second") == page.replace("first", "second")
    assert with_part(page, "", "anew\n") == page.replace("begin\n\n", "anew\n\n")
    assert with_part("", "", "text") == "text"


def test_tables() -> None:
    cases = [Case("a", "x", f"row {i}", "g", 10.0, 10.0 + i, "") for i in range(4)]
    table = errors("title", "said", cases, lambda c: (c.source,), ("source",))
    assert table.rows == (("a", "4", "15.0%", "15.0%", "+15.0%", "1", "30.0%"),)
    short = in_short("s", "said", {"first": cases, "then": cases[1:]}, lambda c: (c.source,), ("source",))
    assert short.columns == ("source", "rows", "first", "then")
    assert short.rows == (("a", "4", "15.0%, +15.0%", "20.0%, +20.0%"),)
    two = in_short("s", "said", {"first": cases, "then": []}, lambda c: (c.label,), ("row",))
    assert two.rows[-1] == ("all", "4", "15.0%, +15.0%", "")
    assert [row[2] for row in worst("w", cases, 2).rows] == ["row 3", "row 2"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_csv = write(
        tmp_path / "runs.csv",
        [RUN | SMALL, RUN | SMALL | {"source_id": "other"}, RUN | {"pp": "4"}],
    )
    sent_csv = write(tmp_path / "sent.csv", measured(0.02))
    page = tmp_path / "page.md"
    given = ["--runs", str(runs_csv), "--collectives", str(sent_csv), "--table", str(page)]
    monkeypatch.setattr(sys, "argv", ["accuracy", *given])
    main()
    text = page.read_text()
    for heading in ("Collectives, by size, held out", "Step times, from the data sheet", "Memory", "Runs left out"):
        assert f"### {heading}" in text
    assert "| made | a pipeline of one micro-batch | 1 |" in text
    bad = write(tmp_path / "bad.csv", [{"device": "H100"}])
    monkeypatch.setattr(sys, "argv", ["accuracy", "--gemms", str(bad)])
    with pytest.raises(SystemExit, match="has no column b, dtype, k, m, n, time_us"):
        main()
    with pytest.raises(SystemExit, match="cannot be read"):
        rows(tmp_path / "none.csv", ())
    assert math.isfinite(len(text))


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
