"""`wholestep simulate`: figures, a trace, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import wholestep as ws
from wholestep.cli import app

STEP = """
import torch
from torch import nn

def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def build():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        batch = torch.empty(64, 256)
    return train_step, model, torch.optim.AdamW(model.parameters()), batch
"""


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
        (("--async-tp", "fast"), "--async-tp without tensor parallelism: needed an axis of --tp"),
        (("--tp", "sequence"), "--tp on mesh dp=8: needed an axis tp"),
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
