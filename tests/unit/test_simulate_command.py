"""`wholestep simulate`: figures, a trace, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import model_file
from wholestep.cli import app

STEP = model_file("nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)", "64, 256")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(STEP)
    return f"{tmp_path / 'job.py'}:build"


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", *args])
    return done.exit_code, done.output


def test_figures_and_a_trace(model: str, tmp_path: Path) -> None:
    trace, figures = tmp_path / "step.json", tmp_path / "figures.json"
    found: dict[str, float] = {}
    for hardware in ("dgx-h100", "dgx-h100+ethernet-10"):
        code, said = run(
            model, "--mesh", "dp=16", "--hardware", hardware, "--trace", str(trace), "--json", str(figures)
        )
        assert code == 0, said
        assert "axis dp: busy" in said
        assert "peak" in said
        made = json.loads(figures.read_text())
        assert made["busy_us"]["dp"] > 0
        assert 0 < made["mfu"] < 1
        found[hardware] = made["step_us"]
    assert found["dgx-h100"] < found["dgx-h100+ethernet-10"]
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.usual("auto")  # the next test tiles beside "full"
@pytest.mark.parametrize("recompute", ["full", "auto"])
def test_tiles_of_rows_hold_less(recompute: str, tmp_path: Path) -> None:
    figures, peaks = tmp_path / "figures.json", list[int]()
    model = ("--hf", "gpt2", "--layers", "2", "--seq", "16Ki", "--mesh", "cp=2", "--recompute", recompute)
    for more in ([], ["--tile-rows", "16"]):
        code, said = run(*model, *more, "--json", str(figures))
        assert code == 0, said
        peaks.append(json.loads(figures.read_text())["peak_bytes"])
    logits = 16384 // 2 * 50257 * 4
    assert peaks[1] < peaks[0] - 2 * logits


def test_what_layers_save_waits_on_the_host(tmp_path: Path) -> None:
    figures, peaks = tmp_path / "figures.json", list[int]()
    model = (
        "--hf",
        "gpt2",
        "--layers",
        "4",
        "--seq",
        "32768",
        "--mesh",
        "cp=2",
        "--recompute",
        "full",
        "--tile-rows",
        "16",
    )
    for more in ([], ["--offload-saved", "1"]):
        code, said = run(*model, *more, "--json", str(figures))
        assert code == 0, said
        assert ("copies to device: busy" in said) == bool(more)
        peaks.append(json.loads(figures.read_text())["peak_bytes"])
    assert json.loads(figures.read_text())["busy_us"]["to host"] > 0
    assert peaks[1] < peaks[0] - 32768 // 2 * 768 * 2


def test_a_stack_and_measured_kernels(model: str, tmp_path: Path) -> None:
    """A step this small is bound by the host; the product that was measured takes longer."""
    figures, profile = tmp_path / "figures.json", tmp_path / "kernels.json"
    row = {"op": "mm", "shapes": [[512, 64], [64, 256]], "dtype": "float32", "us": 5e4}
    profile.write_text(json.dumps({"kernels": [row]}))
    took: list[float] = []
    for more in ([], ["--stack", "fsdp"], ["--stack", "wholestep", "--profile", str(profile)]):
        code, said = run(model, "--mesh", "dp=8", "--json", str(figures), *more)
        assert code == 0, said
        took.append(json.loads(figures.read_text())["step_us"])
    assert took[0] < took[1] < 5e4 < took[2]
    assert json.loads(figures.read_text())["stack"] == "wholestep"
    assert run(model, "--stack", "pytorch")[0] == 2
    profile.write_text("{}")
    code, said = run(model, "--profile", str(profile))
    assert code == 2
    assert "field kernels is missing" in said


def test_hardware_from_a_file(model: str, tmp_path: Path) -> None:
    ws.Hardware.preset("dgx-a100").save(tmp_path / "mine.json")
    code, said = run(model, "--hardware", str(tmp_path / "mine.json"))
    assert code == 0, said
    assert "A100" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--hardware", "dgx-h1000"), "dgx-h1000"),
        (("--hf", "gpt2"), "needed one of them"),
        (("--mesh", "dp=0"), "dp"),
        (("--mesh", "dp=2,tp=2"), "plan"),
        (("--async-tp",), "--async-tp without tensor parallelism: needed an axis of --tp"),
        (("--tp-regather",), "--tp-regather without tensor parallelism: needed an axis of --tp"),
        (("--tp", "0=colwise"), "mesh dp=8 has no axis 'tp'"),
    ],
)
def test_what_is_refused(model: str, args: tuple[str, ...], message: str) -> None:
    code, said = run(model, *args)
    assert code == 2, said
    assert "wholestep: " in said
    assert message in said


def test_a_backend(model: str, tmp_path: Path) -> None:
    steps: dict[str, float] = {}
    for backend in ("eager", "inductor"):
        figures = tmp_path / f"{backend}.json"
        code, said = run(model, "--backend", backend, "--json", str(figures))
        assert code == 0, said
        found = json.loads(figures.read_text())
        assert found["backend"] == backend
        steps[backend] = found["step_us"]
    assert steps["inductor"] < steps["eager"]
    code, said = run(model, "--backend", "triton")
    assert code == 2
    assert "--backend triton is unknown: give one of eager, inductor" in said


ATTENTION = """
from torch.nn import functional as F

class Attention(nn.Linear):
    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (4, 64)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)

def attention():
    model = Attention(256, 256, device="meta", dtype=torch.bfloat16)
    batch = torch.empty(2, 64, 256, device="meta", dtype=torch.bfloat16)
    return train_step, model, torch.optim.AdamW(model.parameters()), batch
"""


def test_attention_has_the_kernels_of_the_hardware(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STEP + ATTENTION)
    ws.Hardware.default().save(tmp_path / "cpu.json")
    for hardware, flash in (("dgx-h100", True), (str(tmp_path / "cpu.json"), False)):
        trace = tmp_path / "step.json"
        code, said = run(f"{tmp_path / 'job.py'}:attention", "--hardware", hardware, "--trace", str(trace))
        assert code == 0, said
        assert ("scaled_dot_product_flash_attention" in trace.read_text()) == flash


DEEP = model_file("*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))", "64, 256")


def test_a_pipeline_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    figures, trace = tmp_path / "figures.json", tmp_path / "step.json"
    code, said = run(
        f"{tmp_path / 'deep.py'}:build", "--mesh", "dp=2,pp=2", "--micro-batches", "4", "--schedule", "gpipe",
        "--json", str(figures), "--trace", str(trace),
    )  # fmt: skip
    assert code == 0, said
    assert "2 stages, gpipe, 4 micro-batches" in said
    assert "bubble" in said
    made = json.loads(figures.read_text())
    stages = made["pipeline"]["stages"]
    assert [one["in_flight"] for one in stages] == [4, 1]
    spent = [one["busy_us"] + one["waited_us"] + one["idle_us"] for one in stages]
    assert spent == pytest.approx([made["step_us"]] * 2)
    assert made["peak_bytes"] == max(one["peak_bytes"] for one in stages)
    lanes = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {"stage 0", "stage 1"}


def test_stages_in_a_v(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    given = ("--mesh", "pp=2", "--micro-batches", "4", "--schedule", "auto", "--placement", "v")
    code, said = run(f"{tmp_path / 'deep.py'}:build", *given)
    assert code == 0, said
    assert "4 stages, 2 on each rank in a V, auto" in said


def test_a_pipeline_of_one_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    code, said = run(f"{tmp_path / 'deep.py'}:build", "--mesh", "pp=2", "--micro-batches", "1")
    assert code == 0, said
    assert "2 stages, 1f1b, 1 micro-batch\n" in said


@pytest.mark.parametrize(("args", "says"), [
    (("--mesh", "dp=4", "--schedule", "1f1b"), "--schedule without an axis pp in --mesh: it has no effect"),
    (("--mesh", "pp=2", "--recompute", "full"), "--recompute full with MODEL and an axis pp"),
])  # fmt: skip
def test_what_a_pipeline_does_not_take(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    code, said = run(f"{tmp_path / 'deep.py'}:build", *args)
    assert code == 2
    assert says in " ".join(said.split())
