"""How a number of GPUs trains a model: what is searched, what is extrapolated, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import wholestep as ws
from wholestep.cli import app, hf, planning
from wholestep.cli.hf import ModelSpec, build
from wholestep.cli.screen import Screen
from wholestep.cli.target import Target
from wholestep.cost.reserved import reserved_bytes
from wholestep.passes.bucket_sizes import smaller_buckets
from wholestep.plan.strategies import compose
from wholestep.planner.bounds import Costs, costs
from wholestep.planner.candidates import Template, TemplateKey
from wholestep.planner.recompute_kinds import passes_of, recomputing
from wholestep.report.figures import Figures
from wholestep_foresight import gpu_command
from wholestep_foresight.gpu_command import sweep_of
from wholestep_foresight.gpu_search import ALL_KINDS, GpuResult, GpuSearch, Setup, first_fits, holding
from wholestep_foresight.setup_estimate import least_bytes
from wholestep_foresight.short_steps import ShortSteps, held_between, repeated

pytestmark = pytest.mark.skipif(not hf.importlib.util.find_spec("transformers"), reason="needs transformers")
H100 = ws.Hardware.preset("dgx-h100")
LAYERS = 10
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def captured(config: str, batch: int, micro_batches: int, layers: int) -> ws.TrainGraph:
    target = build(ModelSpec(config, batch=batch, seq=64, layers=layers, micro_batches=micro_batches))
    return ws.capture(target.step, *target.args)


def run(*args: str, command: str = "gpus") -> tuple[int, str]:
    done = CliRunner().invoke(app, [command, *args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a plan for tensor parallelism: few meshes."""
    path = tmp_path_factory.mktemp("flat") / "config.json"
    config = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def steps(tiny: str) -> ShortSteps:
    return ShortSteps(lambda *given: captured(tiny, *given), LAYERS, H100)


@pytest.mark.full
@pytest.mark.parametrize(("style", "axes"), [("zero1", "dp=8"), ("fully_shard", "dp=8"), ("zero1", "dp=4,tp=2"),
                                             ("fully_shard", "dp=4,tp=2")])  # fmt: skip
def test_micro_batches_are_extrapolated(steps: ShortSteps, tiny: str, style: Any, axes: str) -> None:
    """Three micro-batches, from one and what a second adds to the fewest layers, are nearly what three captured ones
    take, and hold the same.
    """
    mesh, passes = ws.Mesh(axes), passes_of("none", H100)
    tensor = [ws.TensorParallel.of(build(ModelSpec(tiny, layers=2)).args[0])] if "tp" in axes else []
    strategies = compose([ws.DataParallel(style, axis="dp"), *tensor])
    priced = steps.costs(mesh, strategies, 2, 3, "none")
    graph = captured(tiny, 2, 3, LAYERS)
    plan = ws.plan(graph, mesh, strategies, hardware=H100)
    exact = costs(ws.partition(graph, plan), plan, H100, passes)
    assert priced.step_s == pytest.approx(exact.step_s, rel=0.05)
    assert priced.model_s == pytest.approx(exact.model_s, rel=1e-3)
    assert priced.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.02 if style == "zero1" else 0.1)
    assert priced.rest_bytes == exact.rest_bytes


def test_gradients_that_add_up_are_counted_as_they_are(tiny: str) -> None:
    """Of norms they are whole on each rank, of all that tp shards, parts."""
    graph, model = captured(tiny, 2, 2, 2), build(ModelSpec(tiny, layers=2)).args[0]
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    whole = {"dp=8": sum(sizes.values()), "dp=4,tp=2": norms + (sum(sizes.values()) - norms) // 2}
    for axes, expected in whole.items():
        tensor = [ws.TensorParallel.of(model)] if "tp" in axes else []
        plan = ws.plan(graph, axes, [ws.DataParallel("zero1", axis="dp"), *tensor], hardware=H100)
        assert 0 <= held_between(ws.partition(graph, plan)) - expected <= 16, "and the loss"


def simulated(steps: ShortSteps) -> int:
    return sum(len(made.kind_costs) for made in steps.planned.values())


@pytest.mark.full
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_no_schedule_holds_less_than_is_sure(tiny: str, style: Any) -> None:
    """Of each kind of recomputation, with the same buckets as are simulated and with smaller ones."""
    graph, mesh = captured(tiny, 4, 1, 4), ws.Mesh("dp=8")
    plan = ws.plan(graph, mesh, ws.DataParallel(style), hardware=H100)
    local = ws.partition(graph, plan)
    for kind in ALL_KINDS:
        least = least_bytes(ws.run_passes(local, recomputing(kind)))
        peaks = [
            ws.peak_memory(ws.run_passes(local, (*recomputing(kind), *passes))).size_bytes
            for passes in smaller_buckets(ws.default_passes(H100))
        ]
        assert 0.3 * min(peaks) < least <= min(peaks), (kind, least, peaks)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_search(steps: ShortSteps, tiny: str) -> None:
    tensor = ws.TensorParallel.of(build(ModelSpec(tiny, layers=2)).args[0])
    search = GpuSearch(steps, H100, 1 << 30, tensor, 1_000_000)
    found = search.run(16, 32)
    times = [one.costs.step_s for one in found.best if one.costs]
    assert times == sorted(times)
    assert len(times) >= 5
    for setup in (*found.best, *found.lost):
        split = search.estimate.split(setup.mesh)
        assert setup.batch * setup.micro_batches * 16 // split == 32, "all setups train on the same batch"
    assert all(one.costs.peak_bytes <= 1 << 30 for one in found.best if one.costs)
    assert all(one.why for one in found.lost)
    before = simulated(steps)
    assert [one.costs for one in search.run(16, 32).best] == [one.costs for one in found.best]
    assert simulated(steps) == before, "nothing is simulated twice"
    least = min(one.costs.peak_bytes for one in found.best if one.costs)
    tight = GpuSearch(steps, H100, int(least * 0.8), tensor, 1_000_000).run(16, 32)
    assert all(one.costs.peak_bytes <= least * 0.8 for one in tight.best if one.costs)
    assert any("too much" in one.why for one in tight.lost)
    wide = GpuSearch(steps, H100, 1 << 30, tensor, 2 << 30).run(16, 32)
    kept = [one for one in (*wide.best, *wide.lost) if one.template.key and one.template.key.regathers is False]
    whole = [one for one in kept if search.estimate.split(one.mesh) == 1]
    assert whole
    assert all("with its parameters gathered" in one.why for one in whole), "2 GiB are not tried in 1"
    with pytest.raises(ws.BudgetError, match="nothing fits on 16 GPUs"):
        GpuSearch(steps, H100, 1 << 18, tensor, 1_000_000).run(16, 32)  # less than a 16th of the state
    with pytest.raises(ws.PlanError, match="7 sequences on 16 GPUs: no mesh has a number of data-parallel ranks"):
        GpuSearch(steps, H100, 1 << 30, None, 1_000_000).run(16, 7)


def setup_of(step_s: float, micro_batches: int = 1, batch: int = 2) -> Setup:
    template = Template("zero1", (ws.DataParallel("zero1", axis="dp"),), TemplateKey("zero1", None, ("dp",)))
    return Setup(ws.Mesh("dp=8"), template, batch, micro_batches, "none", costs=Costs(10, 80, 5, 2, step_s, 0.1))


class Reserving(GpuSearch):
    """Reserves as many bytes as `needs` says for the seconds of a step; with full recomputation 50, in 0.15 s more."""

    def __init__(self, needs: dict[float, int]) -> None:
        self.needs = needs

    def reserved(self, setup: Setup) -> int | None:
        return self.needs[setup.costs.step_s] if setup.costs and setup.recompute == "none" else 50

    def heavier(self, setup: Setup) -> list[Setup]:
        assert setup.costs is None
        return [replace(setup, recompute="full", why="", costs=Costs(10, 40, 5, 2, 1.15, 0.1))]


def test_the_first_fits_the_device() -> None:
    fast, slow = setup_of(1.0), setup_of(1.1)
    cases = ({1.0: 100}, [1.0, 1.1]), ({1.0: 101, 1.1: 90}, [1.1, 1.15]), ({1.0: 101, 1.1: 101}, [1.15])
    for needs, times in cases:
        search = Reserving(needs)
        found = first_fits(GpuResult((fast, slow), (), 100), search)
        assert [one.costs.step_s for one in found.best if one.costs][: len(times)] == times
        assert found.best[0].costs is not None
        assert found.best[0].costs.reserved_bytes == search.reserved(found.best[0])
        assert (found.best[0].costs.reserved_bytes or 0) <= 100
        over = sum(size > 100 for size in needs.values())
        assert [one.why for one in found.lost] == ["makes torch's allocator reserve 101 B, 1 B too much"] * over
    none = Reserving({1.0: 101})
    none.heavier = lambda setup: [replace(setup, why="holds too much")]
    assert first_fits(GpuResult((fast,), (), 100), none).best == ()


@pytest.mark.full
def test_what_a_setup_reserves(steps: ShortSteps, tiny: str) -> None:
    """As the program of all layers; more where gradients of micro-batches are there besides, as in a loop of three."""
    search, setup = GpuSearch(steps, H100, 1 << 30, None, 1_000_000), setup_of(1.0)
    graph = captured(tiny, 2, 1, LAYERS)
    plan = ws.plan(graph, setup.mesh, setup.strategies, hardware=H100)
    local = ws.run_passes(ws.partition(graph, plan), ws.default_passes(H100))
    alone = search.reserved(setup)
    assert alone == reserved_bytes(local, H100)
    several = search.reserved(replace(setup, micro_batches=3, batch=1))
    graph = captured(tiny, 1, 3, LAYERS)
    loop = ws.partition(graph, ws.plan(graph, setup.mesh, setup.strategies, hardware=H100))
    exact = reserved_bytes(ws.run_passes(loop, ws.default_passes(H100)), H100)
    assert several == pytest.approx(exact, rel=0.1), "as the step that a user writes with three"
    assert GpuSearch(steps, ws.Hardware.default(), 1 << 30, None, 1_000_000).reserved(setup) is None


def test_all_layers_are_captured_where_one_differs(tiny: str) -> None:
    model, made = build(ModelSpec(tiny)).args[0], list[int]()

    def capture(batch: int, micro_batches: int, layers: int) -> ws.TrainGraph:
        made.append(layers)
        return captured(tiny, batch, micro_batches, layers)

    ShortSteps(capture, LAYERS, H100, model=model).step(1)
    model.model.layers[LAYERS - 2].self_attn.sliding_window = 16
    ShortSteps(capture, LAYERS, H100, model=model).step(1)
    assert made == [4, 4, LAYERS]


@pytest.mark.full
@pytest.mark.parametrize(
    ("micro_batches", "refused"),
    [pytest.param(1, False, marks=pytest.mark.full), pytest.param(3, False, marks=pytest.mark.full), (1, True)],
)
def test_few_layers_stand_for_all_on_the_command_line(micro_batches: int, refused: bool, tiny: str) -> None:
    """To the letter; all are captured where transformers has no model of few."""
    target, asked = build(ModelSpec(tiny, seq=64, micro_batches=micro_batches)), list[int]()

    def with_layers(count: int) -> Target:
        asked.append(count)
        if refused:
            raise ws.PlanError("4 layers", "all", "give all")
        return build(ModelSpec(tiny, layers=count))

    options = ws.CaptureOptions(kernels="cuda")
    captured = ws.capture(target.step, *target.args, options=options)
    asks = SimpleNamespace(capture_options=lambda *_: options)
    request: Any = SimpleNamespace(target=replace(target, with_layers=with_layers), hardware=H100, options=asks)
    assert str(planning.captured(Screen(Console(stderr=True)), request)) == str(captured)
    assert asked == [4]


@pytest.mark.full
@pytest.mark.parametrize("sequences", [8, 16])
def test_the_command(sequences: int, flat: str, tmp_path: Path) -> None:
    """Setups as text and as JSON, and a command that plans the first."""
    out = tmp_path / "search.json"
    code, said = run(
        "8", "--hf", flat, "--global-batch", str(sequences), "--seq", "64", "--style", "zero1",
        "--tokens", "1B", "--price", "2/h", "--json", str(out),
    )  # fmt: skip
    assert code == 0, said
    made = json.loads(out.read_text())
    texts = (
        "tokens/s/GPU",
        "the first: zero1 on",
        "by torch's allocator",
        "why the others lost",
        "GPU hours",
        "to plan it",
    )
    for text in texts:
        assert text in said
    assert made["format"] == "wholestep search"
    assert made["setups"][0]["figures"]["step_tokens"] == sequences * 64
    command = next(line for line in said.splitlines() if line.startswith("to plan it")).split("wholestep plan ")[1]
    code, said = run(*command.split(), command="plan")
    assert code == 0, said


def test_what_is_printed_of_pipelines() -> None:
    """Columns and stages of a pipeline, and why others lost: the nearest of each kind."""

    def setup(mesh: str, step_s: float, order: str = "", idle_s: float = 0.0) -> Setup:
        key = TemplateKey("zero1", None, ("dp",))
        spent = Costs(10, 100, 5, 2, step_s, 0.1, 0.4, idle_s=idle_s)
        template = Template(order, (ws.DataParallel("zero1", axis="dp"),), key)
        return Setup(ws.Mesh(mesh), template, 1, 8, "full", costs=spent, order=order, chunks=2 if order else 1)

    best = (
        setup("dp=2,pp=4", 1.0, "interleaved", 0.1),
        setup("dp=8", 1.5),
        setup("dp=4,pp=2", 1.2, "interleaved", 0.3),
    )
    figures = [Figures(one.costs, H100, 8, 64.0) for one in best if one.costs]
    rows = [gpu_command.head_of(True), *(gpu_command.cells_of(*row, True) for row in zip(best, figures, strict=True))]
    assert dict(zip(*rows[:2], strict=True)) == {
        "mesh": "dp=2,pp=4", "style": "zero1", "schedule": "interleaved", "stages": "8 (2 a rank)",
        "micro-batches": "8 x 1", "recompute": "full", "step": "1.00 s", "tokens/s/GPU": "8", "MFU": "40.0%",
        "exposed": "10%", "bubble": "10%", "peak": "100 B",
    }  # fmt: skip
    assert [row[3] for row in rows[1:]] == ["8 (2 a rank)", "-", "4 (2 a rank)"]
    assert gpu_command.slower_than_first(best) == [
        "zero1 on dp=8, 8 x 1, recompute full: 1.50 s, 50.0% more: computes longer",
        "zero1, interleaved, 2 chunks on dp=4,pp=2, 8 x 1, recompute full: 1.20 s, 20.0% more: waits for other stages "
        "longer",
    ]  # fmt: skip
    lost = [holding(setup("dp=8", 1.0), 100 + size, 100, "holds {}") for size in range(12, 0, -1)]
    said = gpu_command.losers_of([*lost, replace(best[1], why="no plan: x"), replace(best[2], why="slow")])
    assert said[:2] == ["1 slower by an estimate or a bound", f"  {best[2]}: slow"]
    assert said[2:4] == ["12 over the memory, the nearest", f"  {lost[-1]}: holds 101 B, 1 B too much"]
    assert said[-2:] == ["1 without a plan", f"  {best[1]}: no plan: x"]


@pytest.mark.full
def test_a_sweep(flat: str, tmp_path: Path) -> None:
    html, out = tmp_path / "sweep.html", tmp_path / "sweep.json"
    code, said = run(
        "--hf", flat, "--sweep", "gpus=2,3,8", "--global-batch", "8", "--seq", "64", "--style", "zero1",
        "--html", str(html), "--json", str(out),
    )  # fmt: skip
    assert code == 0, said
    points = json.loads(out.read_text())["points"]
    assert [one["value"] for one in points] == [2, 3, 8]
    assert points[1]["setup"] is None, "3 ranks do not divide 8 sequences"
    rates = [one["figures"]["tokens_per_s"] for one in points if one["figures"]]
    assert rates == pytest.approx(sorted(rates), rel=0.01), "two ranks or eight, launches bound so small a model"
    page = html.read_text()
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http-equiv", "")
    captures = re.findall(r"capture \d+ layers, \d+ x \d+ sequences of \d+", said)
    assert captures
    assert len(captures) == len(set(captures)), "three numbers of GPUs share their captures"


@pytest.mark.parametrize(
    ("text", "values"),
    [("gpus=8,16,...,128", (8, 16, 32, 64, 128)), ("seq=1024", (1024,)), ("batch=3,9,...,80", (3, 9, 27, 80))],
)
def test_values_of_a_sweep(text: str, values: tuple[int, ...]) -> None:
    found = sweep_of(text)
    assert (found.over, found.values) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text",
    ["gpus", "gpus=", "gpus=a", "gpus=0", "dtype=1", "gpus=8,...", "gpus=8,...,16", "gpus=16,8,...,64", "gpus=8,8"],
)
def test_what_is_no_sweep(text: str) -> None:
    with pytest.raises(ws.PlanError, match="--sweep '"):
        sweep_of(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["8"], "no --global-batch: needed the sequences in a step"),
        (["--global-batch", "8"], "no number of GPUs: needed one, or --sweep gpus=8,16,32"),
        (["--sweep", "gpus=8,16"], "no --global-batch: needed the sequences in a step"),
        (["8", "--global-batch", "8", "--batch", "2"], "--batch: the search chooses that"),
        (["8", "--global-batch", "8", "--cp", "ring"], "--cp: the search has none; `wholestep simulate` takes it"),
        (["8", "--global-batch", "8", "--offload-saved", "1"], "--offload-saved: the search has none;"),
        (["8", "--global-batch", "8", "--semantics", "global"], "--semantics global: only per_rank"),
        (["8", "--global-batch", "8", "--html", "x.html"], "--html without --sweep"),
        (["7", "--global-batch", "3", "--seq", "64"], "no setup of 7 GPUs can be planned"),
        (["--sweep", "gpus=x", "--global-batch", "8"], "--sweep 'gpus=x'"),
    ],
)
def test_what_is_refused(tiny: str, options: list[str], said: str) -> None:
    code, text = run("--hf", tiny, *options)
    assert code == 2
    assert said in text


def test_a_function_has_one_batch() -> None:
    code, text = run("8", "--global-batch", "8")
    assert code == 2
    assert "no --hf: a step with other batches and micro-batches has to be built" in text


def test_costs_grow_evenly() -> None:
    one = Costs(10, 100, 5, 2, 1.0, 0.5, 0.4, 0.1, 0.2, {"a": 60, "b": 40})
    few = Costs(10, 30, 2, 1, 0.3, 0.2, 0.1, 0.0, 0.1, {"a": 20, "b": 10})
    more = Costs(10, 45, 3, 2, 0.5, 0.3, 0.2, 0.1, 0.2, {"a": 30, "c": 15})
    four = repeated(one, few, more, 4, 15)
    assert (four.peak_bytes, four.sent_bytes, four.collectives, four.rest_bytes) == (115, 8, 5, 10)
    assert (four.step_s, four.exposed_s, four.model_s) == pytest.approx((1.6, 0.8, 0.7))
    assert four.by_kind == {"a": 60, "b": 40, "gradient": 15}
