"""`wholestep checkpoint`: what is shown, the exit status, and the folders that it writes."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner
from upath import UPath

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep.cli import app


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one step, the second with larger weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    step, root = ws.compile(train_step), tmp_path_factory.mktemp("original") / "runs"
    for number in range(2):
        step(model, optimizer, torch.randn(6, 4))
        ws.save(root, step, extra={"epoch": number, "sched\x1bule": {}})
    return root


@pytest.fixture
def root(tmp_path: Path, original: Path) -> Path:
    """A copy of `original`, which the test may change."""
    return shutil.copytree(original, tmp_path / "runs")


def run(*args: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", done.output)


@pytest.mark.smoke
def test_a_folder_of_checkpoints(root: Path) -> None:
    code, said = run(root)
    assert code == 0, said
    head, newest, older = said.splitlines()
    assert head.split() == ["checkpoint", "number", "saved", "ranks", "mesh", "files", "size", "intact"]
    assert re.fullmatch(r"step-00000002 +2  TIME +1  dp=1 +3 +[\d.]+ kB  by size", newest)
    assert older.startswith("step-00000001")
    code, said = run(root, "--verify", "--json", root / "found.json")
    assert code == 0, said
    assert said.splitlines()[1].endswith("by checksum")
    found = json.loads((root / "found.json").read_text())
    assert [(one["number"], one["fault"]) for one in found] == [(2, None), (1, None)]


def test_an_unfinished_save_is_said(root: Path) -> None:
    (root / "step-00000003").mkdir()
    code, said = run(root)
    assert code == 0
    assert said.splitlines()[3] == "step-00000003 has no manifest.json: its save has not ended"


def test_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("upath")
    model = nn.Linear(3, 2)
    ws.save(UPath("memory://runs/a"), model=model, number=4)
    assert [ws.load(folder, model=model).number for folder in ("memory://runs/a", UPath("memory://runs/a"))] == [4, 4]
    code, said = run("memory://runs/a", "--verify")
    assert code == 0, said
    assert said.splitlines()[1].startswith("step-00000004")
    assert run("memory://runs/a", "--export", "safetensors", "--to", tmp_path / "new")[0] == 0
    assert load_file(tmp_path / "new" / "model.safetensors")["weight"].equal(model.weight)
    code, said = run("memory://runs/a", "--export", "dcp", "--to", "memory://runs/b")
    assert code == 2
    assert "memory://runs/b is on an object store" in said


def test_one_checkpoint(root: Path) -> None:
    code, said = run(root / "step-00000002", "--json", root / "found.json")
    assert code == 0
    lines = said.splitlines()
    assert lines[0] == f"checkpoint 2 in {root / 'step-00000002'}"
    assert lines[1] == "  saved TIME after 2 calls, by 1 rank, mesh dp=1"
    assert lines[2].endswith("intact by size")
    assert lines[4].split() == ["0.weight", "param", "float32", "[7,", "4]", "112", "B", "momentum_buffer", "112", "B"]
    assert lines[-7:] == [
        "  6 parameters, 260 B",
        "  3 buffers, 64 B",
        "  6 tensors of optimizer state, 260 B",
        "  optimizer: SGD, groups of 6 parameters",
        "  random state of 1 rank: torch, python, numpy",
        "  extra: epoch, sched\\x1bule",  # text from the folder cannot steer the terminal
        f"written to {root / 'found.json'}",
    ]
    found = json.loads((root / "found.json").read_text())
    assert found["tensors"]["0.weight"] == {"role": "param", "dtype": "float32", "shape": [7, 4], "bytes": 112}
    assert found["extra"] == ["epoch", "sched\x1bule"]
    assert found["optimizers"]["optimizer"]["kind"] == "SGD"


def test_damage_is_exit_status_1(root: Path) -> None:
    data = root / "step-00000001" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert run(root)[0] == 0, "sizes are as saved"
    code, said = run(root, "--verify")
    assert code == 1
    assert said.splitlines()[2].endswith("is damaged: __0_0.distcp does not match its checksum")
    code, said = run(root / "step-00000001", "--export", "dcp", "--to", root / "new")
    assert code == 2
    assert "does not match its checksum" in said
    assert not (root / "new").exists()
    os.truncate(data, 3)
    code, said = run(root)
    assert code == 1
    assert said.splitlines()[2].endswith("missing or of another size: __0_0.distcp")
    (root / "step-00000001" / "manifest.json").write_text("{")
    code, said = run(root)
    assert code == 1
    assert "manifest.json is cut off or altered" in said
    assert run(root / "step-00000001")[0] == 1


BAD = [
    (["none"], "none does not exist"),
    ([".", "--to", "x"], "--to FOLDER goes with --export FORMAT"),
    ([".", "--export", "dcp"], "--to FOLDER goes with --export FORMAT"),
    ([".", "--export", "onnx", "--to", "x"], "--export onnx: needed safetensors or dcp"),
    ([".", "--export", "dcp", "--to", "x", "--dtype", "int8"], "--dtype int8: needed a floating-point dtype of torch"),
    ([".", "--dtype", "float16"], "--dtype goes with --export FORMAT"),
    ([".", "--export", "dcp", "--to", "."], ". is there already"),
    ([".", "--export", "dcp", "--to", "x", "--json", "y"], "--json says what is found"),
]


@pytest.mark.parametrize(("args", "text"), BAD, ids=lambda given: " ".join(map(str, given))[:30])
def test_bad_input_is_exit_status_2(root: Path, args: list[Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    before = sorted(root.rglob("*"))
    code, said = run(*args)
    assert code == 2
    assert f"wholestep: {text}" in said
    assert sorted(root.rglob("*")) == before
