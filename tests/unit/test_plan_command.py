"""`wholestep plan` on models: presets, configuration files, functions of the user's, and the table of templates."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wholestep as ws
from wholestep.cli import app, hf
from wholestep.cli.hf import ModelSpec, build, presets
from wholestep.planner.search_result import Candidate
from wholestep.report.compare import Costs, as_json, compare, costs, show, templates

NEEDS_HF = pytest.mark.skipif(not hf.importlib.util.find_spec("transformers"), reason="needs transformers")

PARAMETERS = {  # as published with each model
    "gpt2": 124_439_808,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
STEP = """
import torch
from torch import nn

def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch["x"]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def four():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        batch = {"x": torch.empty(8, 16)}
    return train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch

def three():
    _, model, optimizer, batch = four()
    return train_step, (model, optimizer), {"batch": batch}

def wrong():
    return train_step, 3
"""


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *args])
    return done.exit_code, done.output


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "own_step.py"
    path.write_text(STEP)
    return str(path)


# -- models by configuration ----------------------------------------------------------------
@NEEDS_HF
@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name: str):
    model = build(ModelSpec(name)).args[0]
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert all(p.is_meta for p in model.parameters())


def test_every_preset_is_tested():
    assert presets() == sorted(PARAMETERS)


@NEEDS_HF
def test_a_configuration_from_a_file(tiny: str):
    target = build(ModelSpec(tiny, batch=2, seq=10, dtype="float32", layers=2, optimizer="sgd"))
    model, optimizer, batch = target.args
    assert len(model.model.layers) == 2
    assert type(optimizer) is torch.optim.SGD
    assert [tokens.shape for tokens in batch["tokens"]] == [(2, 10)]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert build(ModelSpec(str(Path(tiny).parent))).args[2]["tokens"][0].shape == (1, 64)


@NEEDS_HF
def test_more_positions_than_a_configuration_has(tiny: str):
    target = build(ModelSpec(tiny, seq=65))
    assert target.name == f"{tiny} with 65 positions, not 64"
    assert target.args[2]["tokens"][0].shape == (1, 65)
    assert target.args[0].config.max_position_embeddings == 65


@NEEDS_HF
def test_a_plan_by_configuration(tiny: str, tmp_path: Path):
    out = tmp_path / "plan.json"
    code, text = run("--hf", tiny, "--mesh", "dp=4,tp=2", "--json", str(out), "--explain", "lm_head.weight")
    assert code == 0, text
    assert "fully_shard on dp, mean over ranks; tensor parallel on tp; mesh dp=4,tp=2" in text
    assert "model.layers.2.mlp.up_proj.weight" in text
    assert re.search(r"build the step: \d+\.\d+ s \(.*config.json, 32,480 parameters\)", text.replace("\n", " "))
    assert re.search(r"capture the step as one graph: \d+\.\d+ s \([\d,]+ operations\)", text)
    assert re.search(r"plan layouts: \d+\.\d+ s", text)
    assert "lm_head.weight  param 96@tp,dp 32" in text
    assert ws.Plan.from_json(out.read_text()).mesh == ws.Mesh("dp=4,tp=2")


@NEEDS_HF
@pytest.mark.parametrize(
    ("options", "said", "each"),
    [
        ((), ("float32", "bfloat16", "float32"), 16),
        (("--dtype", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"), 8),
        (("--optimizer", "sgd"), ("float32", "bfloat16", "float32"), 12),
        (("--precision", "stored"), ("float32", "float32", "float32"), 16),
    ],
)
def test_a_plan_says_its_precision(tiny: str, tmp_path: Path, options: tuple[str, ...], said: Any, each: int):
    """Bytes by hand: a weight, its gradient, and one or two numbers of state."""
    out = tmp_path / "plan.json"
    code, text = run("--hf", tiny, "--layers", "1", "--mesh", "dp=2", "--json", str(out), *options)
    assert code == 0, text
    plan = ws.Plan.load(out)
    assert plan.precision is not None
    assert (plan.precision.weights, plan.precision.compute, plan.precision.state) == said
    assert plan.precision.bytes_each == pytest.approx(each, rel=0.01)
    expected = f"precision: weights {said[0]}, compute {said[1]}, optimizer state {said[2]}: {each} B a parameter"
    assert expected in text


@NEEDS_HF
@pytest.mark.parametrize("name", ["gpt2", "qwen3-8b", "mixtral-8x7b"])
def test_other_presets_plan(name: str):
    code, text = run("--hf", name, "--layers", "1", "--seq", "8", "--mesh", "dp=4", "--optimizer", "sgd")
    assert code == 0, text
    assert "plan  fully_shard on dp" in text


@NEEDS_HF
@pytest.mark.parametrize("method", ["heads", "ring"])
def test_how_tokens_meet(method: str) -> None:
    model = ["--hf", "llama-3-8b", "--layers", "1", "--seq", "8", "--mesh", "cp=2", "--optimizer", "sgd"]
    code, text = run(*model, "--cp", method)
    assert code == 0, text
    assert f"note: 1 calls of attention along cp by {method}: a rank sends" in text


@NEEDS_HF
def test_experts_stay_on_their_ranks() -> None:
    """Of batches of their own, ranks send all rows: 1.07 GB a layer for 8,192 tokens, there and back, forward and
    backward, where published figures have 3.6 GB of weights in 16 bits, three times. They cross at 28,000 tokens.
    """
    model = ["--hf", "qwen3-30b-a3b", "--layers", "1", "--seq", "8192", "--mesh", "dp=8", "--optimizer", "sgd"]
    code, text = run(*model, "--experts", "rows")
    assert code == 0, text
    assert "experts on dp by rows" in text
    assert "note: experts of 1 of 1 layers stay on their ranks of dp, in 1 of them rows are sent to experts" in text
    prices = re.search(r"a rank sends for each of 1 layers of experts (\S+) GB by weights, (\S+) MB by rows", text)
    assert prices, text
    weights, rows = float(prices[1]) * 8 / 7, float(prices[2]) * 8 / 7e3
    assert weights == pytest.approx((2 + 4) * 128 * 3 * 2048 * 768 / 1e9, rel=0.02), "bfloat16, reduced in float32"
    assert rows == pytest.approx(1.07, rel=0.01)
    assert 8192 * weights / rows == pytest.approx(28_000, rel=0.03)
    code, text = run(*model, "--experts", "rows", "--auto")
    assert (code, "--experts with --auto: needed one of them" in text) == (2, True)


@pytest.mark.parametrize("name", ["four", "three"])
def test_what_a_function_may_return(step: str, name: str):
    code, text = run(f"{step}:{name}", "--mesh", "dp=2", "--style", "zero1")
    assert code == 0, text
    assert "plan  zero1 on dp" in text


# -- the table ------------------------------------------------------------------------------
def graph_of(width: int = 16) -> ws.TrainGraph:
    scope: dict[str, Any] = {}
    exec(STEP, scope)
    train, model, optimizer, batch = scope["four"]()
    return ws.capture(train, model, optimizer, batch)


def names(mesh: str, tensor: Any = None) -> list[str]:
    return [t.name for t in templates(ws.Mesh(mesh), tensor)]


def test_templates_that_apply():
    flat = [
        "replicate on dp",
        "zero1 on dp",
        "zero2 on dp",
        "fully_shard, kept on dp",
        "fully_shard, re-gathered on dp",
    ]
    assert names("dp=2") == flat
    hybrid = [name.replace("on dp", "on dp,tp") for name in [*flat, "hybrid, kept on dp", "hybrid, re-gathered on dp"]]
    assert names("dp=2,tp=2") == hybrid
    tensor = ws.TensorParallel({"0": "colwise", "2": "rowwise"})
    assert names("dp=2,tp=2", tensor) == hybrid + [f"{name} + tensor parallel on tp" for name in flat]
    assert names("tp=2", tensor) == [name.replace("dp", "tp") for name in flat] + ["tensor parallel on tp"]
    with pytest.raises(ws.MeshError, match="mesh dp=2 has no axis 'tp'"):
        names("dp=2", tensor)


def test_rows_are_ranked_and_costs_are_those_of_the_program():
    graph, mesh, told = graph_of(), ws.Mesh("dp=2,tp=2"), list[str]()
    chosen = templates(mesh, ws.TensorParallel({"0": "colwise", "2": "rowwise"}))
    rows = compare(graph, mesh, chosen, watch=told.append)
    assert told == [t.name for t in chosen]
    assert sorted(row.name for row in rows) == sorted(told)
    assert all(row.costs is not None for row in rows)
    assert [row.batch_s for row in rows] == sorted(row.batch_s for row in rows)
    by_name = {row.name: row for row in rows}
    whole = (16 * 32 + 32 + 32 * 16 + 16) * 4
    replicated, sharded = by_name["replicate on dp,tp"], by_name["fully_shard, kept on dp,tp"]
    both = by_name["replicate on dp + tensor parallel on tp"]
    assert (replicated.batches, both.batches) == (4, 2)
    assert replicated.costs is not None
    assert sharded.costs is not None
    assert replicated.costs.rest_bytes == whole
    assert sharded.costs.rest_bytes == whole // 4
    assert replicated.costs.peak_bytes > replicated.costs.rest_bytes
    assert replicated.costs.sent_bytes == 2 * whole  # a ring of two sends 2 (W-1)/W of it, along each of two axes
    assert 2 <= replicated.costs.collectives < 8
    assert replicated.batch_s == replicated.costs.step_s / 4


def test_a_slower_link_costs_more():
    graph, mesh = graph_of(), ws.Mesh("dp=2")
    plan = ws.plan(graph, mesh, ws.DataParallel("replicate"))
    local = ws.partition(graph, plan)
    fast, slow = (costs(local, plan, ws.Hardware.measured(link_us=us)) for us in (1.0, 1000.0))
    assert slow.step_s > fast.step_s
    assert slow.exposed_s > fast.exposed_s
    assert slow.sent_bytes == fast.sent_bytes


def test_a_template_without_a_plan_says_why():
    mesh = ws.Mesh("dp=2,tp=2")
    missing = templates(mesh, ws.PlanError("Sequential has no tensor-parallel plan", "a model with tp_plan"))[-1:]
    unknown = templates(mesh, ws.TensorParallel({"w1": "colwise"}))[-1:]
    rows = compare(graph_of(), mesh, [*missing, *unknown, *templates(mesh)[:1]])
    assert [row.name for row in rows] == [
        "replicate on dp,tp",
        "tensor parallel on tp",
        "fully_shard, re-gathered on dp + tensor parallel on tp",
    ]
    last = show(rows).splitlines()[-2:]
    assert last[0] == (
        "tensor parallel on tp: no plan: Sequential has no tensor-parallel plan; needed: a model with tp_plan"
    )
    assert last[1].startswith(
        "fully_shard, re-gathered on dp + tensor parallel on tp: no plan: the pattern 'w1' of a tensor-parallel plan"
    )
    assert as_json(rows, mesh, "m")["rows"][1] == {
        "template": "tensor parallel on tp",
        "batches": 1,
        "error": "Sequential has no tensor-parallel plan; needed: a model with tp_plan",
    }


def row_of(name: str, batches: int, priced: Costs | None, why: str = "") -> Candidate:
    row = Candidate(name, ws.Mesh("dp=2"), None, batches=batches, why=why)
    return row if priced is None else row.priced(priced)


def test_the_table():
    rows = [
        row_of("replicate on dp", 4, Costs(1_500, 2_000_000, 30, 7, 0.0128, 0.00128)),
        row_of("zero1 on dp", 4, Costs(15, 2_000, 3_000, 11, 40.0, 0.0)),
        row_of("tensor parallel on tp", 1, None, "no plan of its own"),
    ]
    assert show(rows).splitlines() == [
        "template         stored    peak  sent/step  collectives     step  exposed  batches  per batch",
        "replicate on dp  1.5 kB  2.0 MB       30 B            7  12.8 ms      10%        4    3.20 ms",
        "zero1 on dp        15 B  2.0 kB     3.0 kB           11   40.0 s       0%        4     10.0 s",
        "tensor parallel on tp: no plan: no plan of its own",
    ]


@pytest.mark.full
@NEEDS_HF
def test_comparing_by_command(tiny: str, tmp_path: Path):
    out = tmp_path / "table.json"
    code, text = run("--hf", tiny, "--layers", "1", "--mesh", "dp=2,tp=2", "--compare", "--json", str(out))
    assert code == 0, text
    found = json.loads(out.read_text())
    assert found["format"] == "wholestep comparison"
    assert found["mesh"] == "dp=2,tp=2"
    assert len(found["rows"]) == 12
    assert all(row["error"] is None and row["step_s"] > 0 for row in found["rows"])
    assert "[12/12] fully_shard, re-gathered on dp + tensor parallel on tp: " in text
    assert [line.split("  ")[0] for line in text.splitlines() if line.endswith(" s") and " on dp" in line[:30]]


@NEEDS_HF
def test_a_plan_that_regathers_activations(tiny: str):
    code, text = run("--hf", tiny, "--layers", "1", "--mesh", "dp=2,tp=2", "--tp", "sequence", "--tp-regather")
    assert code == 0, text
    assert "tensor parallel on tp, loss parallel, activations re-gathered" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["FILE:wrong"], "returned (function, int): needed (train_step, model, optimizer, batch), or (train_step, "),
        (["FILE:four", "--hf", "gpt2"], "needed one of them"),
        (["FILE:four", "--layers", "2"], "--layers without --hf: the function that returns the step decides that"),
        (["FILE:four", "--compare", "--style", "zero1"], "--style with --compare: it applies to one plan"),
        (["FILE:four", "--compare", "--program"], "--program with --compare"),
        (["FILE:four", "--stop-after", "Bucket"], "--stop-after without --program"),
        (
            ["FILE:four", "--program", "--stop-after", "Join"],
            "--stop-after Join: needed one of SizeBuckets, InBodies, PeelPieces",
        ),
        (["FILE:four", "--compare", "--tp", "0=colwise"], "mesh dp=2 has no axis 'tp'"),
        (["FILE:four", "--mesh", "dp=2,tp=2", "--tp", "model"], "Sequential has no tensor-parallel plan"),
        (["--hf", "llama-9"], "presets are gpt2, llama-3-405b, llama-3-70b, llama-3-8b, mixtral-8x7b"),
        (["--hf", "FILE"], "is not JSON"),
        (["--hf", "CONFIG", "--layers", "4"], "--layers 4: "),
        (["--hf", "EMPTY"], "has no field model_type"),
        (["--hf", "OTHER"], "OTHER"),
        (["--hf", "VISION"], "is not a causal language model of transformers"),
    ],
)
@NEEDS_HF
def test_command_refuses(step: str, tiny: str, tmp_path: Path, args: list[str], message: str):
    files = {"EMPTY": {}, "OTHER": {"model_type": "no_such_model"}, "VISION": {"model_type": "vit"}}
    for name, config in files.items():
        (tmp_path / name).write_text(json.dumps(config))
    paths = {"FILE": step, "CONFIG": tiny} | {name: str(tmp_path / name) for name in files}
    given = [re.sub("|".join(paths), lambda found: paths[found[0]], arg) for arg in args]
    code, text = run(*given)
    assert code == 2, text
    assert message in text


def test_without_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    code, text = run("--hf", "gpt2")
    assert code == 2
    assert "wholestep: --hf needs transformers: pip install 'wholestep[hf]'" in text


# -- choosing ------------------------------------------------------------------------------------
@NEEDS_HF
def test_auto_prints_what_it_considered_and_the_winner(tiny: str, tmp_path: Path):
    out = tmp_path / "plan.json"
    code, text = run(
        "--hf", tiny, "--layers", "1", "--mesh", "dp=4,tp=2", "--auto", "--hardware", "dgx-h100", "--memory", "1GiB",
        "--json", str(out),
    )  # fmt: skip
    assert code == 0, text
    assert re.search(r"candidate +mesh +stored +peak", text)
    assert "tensor parallel on tp" in text
    assert "  chosen by Auto: " in text
    assert "note: Auto chose " in text
    made = ws.Plan.from_json(out.read_text())
    assert made.objective is not None
    assert made.objective.budget_bytes == 1 << 30


@NEEDS_HF
@pytest.mark.full
def test_auto_chooses_the_mesh(tiny: str):
    code, text = run("--hf", tiny, "--layers", "1", "--mesh", "auto=4", "--auto")
    assert code == 0, text
    assert "dp=2,tp=2" in text
    assert "tp=4" in text


def test_compare_for_hardware(step: str, tmp_path: Path):
    out, saved = tmp_path / "table.json", tmp_path / "hardware.json"
    ws.Hardware.preset("dgx-a100").save(saved)
    code, text = run(f"{step}:four", "--mesh", "dp=4", "--compare", "--hardware", str(saved), "--json", str(out))
    assert code == 0, text
    assert json.loads(out.read_text())["hardware"] == "dgx-a100"
    _, plain = run(f"{step}:four", "--mesh", "dp=4", "--compare")
    assert plain != text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--auto", "--compare"], "--compare with --auto"),
        (["--auto", "--style", "zero1"], "--style with --auto"),
        (["--memory", "1GiB"], "--memory without --auto"),
        (["--cp", "ring"], "--cp ring on mesh dp=4: needed an axis cp, or auto=N"),
        (["--auto", "--cp", "auto"], "--cp auto on mesh dp=4: needed an axis cp, or auto=N"),
        (["--batch", "2"], "--batch without --hf"),
        (["--auto", "--hardware", "dgx-h101"], "there is no hardware 'dgx-h101'"),
        (["--auto", "--memory", "1"], "no plan fits: the nearest, "),
        (["--auto", "--memory", "lots"], "--memory='lots'"),
    ],
)
def test_choices_that_cannot_be_made(step: str, options: list[str], said: str):
    code, text = run(f"{step}:four", "--mesh", "dp=4", *options)
    assert code != 0
    assert said in " ".join(text.split())


def test_the_program_is_shown_after_a_pass(step: str):
    texts = [run(f"{step}:four", "--program", *more)[1] for more in ((), ("--stop-after", "Bucket"))]
    assert "join_rows" not in texts[0]
    assert "join_rows" in texts[1], "gradients in a bucket"
