"""The commands that foresight adds to `wholestep`, and the names of stacks in its own."""

import json
import re
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import model_file
from tests.unit.test_command_start import run as started
from tests.unit.test_figures import MODES, SMALL, STEP, run
from wholestep_foresight import Stack, stack

DEEP = model_file(", ".join(["nn.Linear(1024, 1024), nn.GELU()"] * 8), "2048, 1024")


@pytest.mark.parametrize("command", ["gpus", "sizes", "calibrate"])
def test_help_needs_no_torch(command: str) -> None:
    said, torch = started(command, "--help")
    assert "wholestep" in said
    assert torch == "no torch"


def test_what_the_core_has_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match=r"wholestep_foresight has, pip install 'wholestep\[foresight\]'"):
        _ = ws.Stack
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    spec = find_spec("wholestep.cli")
    assert spec is not None
    assert spec.loader is not None
    alone: Any = module_from_spec(spec)
    spec.loader.exec_module(alone)
    for command in ("gpus", "sizes", "calibrate"):
        done = CliRunner().invoke(alone.app, [command, "--hf", "gpt2"])
        assert done.exit_code == 2
        assert f"{command} is a command of wholestep-foresight: pip install 'wholestep[foresight]'" in done.output


def test_a_stack_that_is_unknown_is_refused() -> None:
    code, text = run("simulate", STEP, "--stack", "pytorch")
    assert code == 2
    assert "there is no stack 'pytorch'" in text


@pytest.mark.usual("simulate", "plan")
@pytest.mark.parametrize("mode", MODES)
def test_the_host_of_other_software_is_waited_for(mode: str, tmp_path: Path) -> None:
    """That of `fsdp` starts ops one by one, for which a step this small waits."""
    (tmp_path / "job.py").write_text(SMALL)
    took: list[float] = []
    for options in ([], ["--stack", "fsdp"]):
        code, said = run(*MODES[mode], f"{tmp_path / 'job.py'}:build", "--hardware", "dgx-h100", *options)
        assert code == 0, said
        found = re.search(r"  step +([0-9.]+) (us|ms) on 8 GPUs", said)
        assert found is not None, said
        took.append(float(found[1]) * (1 if found[2] == "us" else 1000))
    assert took[0] < took[1]


@pytest.mark.usual("simulate", "plan")
@pytest.mark.parametrize("mode", MODES)
def test_all_of_them_have_the_order_of_other_software(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Software with the same kernels that overlaps nothing waits longer for what travels."""
    own = Stack.named("wholestep")
    monkeypatch.setattr(stack, "STACKS", (own, replace(own, name="in-turn", overlaps=False)))
    (tmp_path / "job.py").write_text(DEEP)
    took: list[float] = []
    for name in ("wholestep", "in-turn"):
        code, said = run(*MODES[mode], f"{tmp_path / 'job.py'}:build", "--hardware", "dgx-h100", "--stack", name)
        assert code == 0, said
        found = re.search(r"  exposed +([0-9.]+) (us|ms) of communication", said)
        assert found is not None, said
        took.append(float(found[1]) * (1 if found[2] == "us" else 1000))
    assert took[1] > 1.5 * took[0]


def test_a_calibration_is_not_measured_for_nothing(tmp_path: Path) -> None:
    code, said = run("calibrate", "--out", str(tmp_path))
    assert code == 2
    assert f"--out {tmp_path} is a folder" in said


# -- several sizes -------------------------------------------------------------------------
FLAT = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}


@pytest.fixture
def flat(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    return str(tmp_path / "config.json")


def test_several_sizes_are_what_each_is_alone(flat: str, tmp_path: Path) -> None:
    shared = "--hf", flat, "--mesh", "dp=4", "--json", str(tmp_path / "sizes.json")
    code, said = run("sizes", *shared, "--batches", "2", "--seqs", "16,64")
    assert code == 0, said
    rows = json.loads((tmp_path / "sizes.json").read_text())["sizes"]
    assert run("simulate", *shared, "--batch", "2", "--seq", "64")[0] == 0
    alone = json.loads((tmp_path / "sizes.json").read_text())
    assert {key: alone[key] for key in rows[1] if key in alone} == {k: v for k, v in rows[1].items() if k in alone}
    assert len({row["peak_bytes"] for row in rows}) == len(rows)
    assert [line.split()[:2] for line in said.splitlines() if line.strip().startswith("2 ")] == [
        ["2", "16"],
        ["2", "64"],
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--seqs", "16,x"), "--seqs 16,x: needed numbers of at least 2"),
        (("--batches", "auto"), "--batches auto: needed numbers of at least 1"),
        (("--batch", "2"), "--batch: give --batches"),
        (("--mesh", "dp=2,pp=2"), "an axis pp: `wholestep simulate` takes a pipeline, for one size"),
    ],
)
def test_sizes_that_are_refused(flat: str, args: tuple[str, ...], message: str) -> None:
    code, said = run("sizes", "--hf", flat, "--mesh", "dp=4", *args)
    assert code == 2
    assert message.replace("CONFIG", flat) in said
