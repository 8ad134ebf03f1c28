"""ws.export of a checkpoint folder and of a plain model, and the files of the safetensors format."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

import wholestep as ws
from tests.hf_models import entries
from tests.steps import mean_square as train_step
from wholestep.checkpoint import safetensors_file
from wholestep.checkpoint.lease import Owner


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    step = ws.compile(train_step)
    for _ in range(2):
        step(model, optimizer, torch.randn(6, 4))
        ws.save(tmp_path / "checkpoints", step)
    return model, tmp_path / "checkpoints"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.smoke
def test_of_a_checkpoint(saved: Any, tmp_path: Path) -> None:
    model, folder = saved
    path = ws.export(tmp_path / "exported", folder)
    assert path == tmp_path / "exported"
    assert [file.name for file in path.iterdir()] == ["model.safetensors"]
    assert_same(load_file(path / "model.safetensors"), model.state_dict())
    older = ws.export(tmp_path / "older", folder / "step-00000001", dtype=torch.float16, max_file_bytes="150B")
    index = json.loads((older / "model.safetensors.index.json").read_text())
    assert {file.name for file in older.glob("model-*")} == set(index["weight_map"].values())
    found = {name: load_file(older / file)[name] for name, file in index["weight_map"].items()}
    assert {name: t.dtype for name, t in found.items()} == {
        name: torch.float16 if t.is_floating_point() else t.dtype for name, t in model.state_dict().items()
    }
    assert not torch.equal(found["0.weight"], model[0].weight.half())


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_of_a_checkpoint_as_dcp(saved: Any, tmp_path: Path, dtype: torch.dtype | None) -> None:
    model, folder = saved
    ws.export(tmp_path / "exported", folder, "dcp", dtype=dtype)
    assert sorted(file.name for file in (tmp_path / "exported").iterdir()) == [".metadata", "__0_0.distcp"]
    into = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).to(dtype).state_dict()
    dcp.load(into, checkpoint_id=tmp_path / "exported", no_dist=True)
    expected = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    assert_same(into, expected)


def test_a_damaged_checkpoint_is_not_exported(saved: Any, tmp_path: Path) -> None:
    (saved[1] / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ws.CheckpointError, match=r"is damaged: __0_0.distcp has 0 bytes"):
        ws.export(tmp_path / "exported", saved[1])
    assert not (tmp_path / "exported").exists()
    with pytest.raises(ws.CheckpointError, match="does not exist"):
        ws.export(tmp_path / "exported", tmp_path / "none")


TENSORS = {
    str(dtype).removeprefix("torch."): torch.arange(12).view(3, 4).to(dtype) for dtype in safetensors_file.DTYPES
}
TENSORS |= {
    "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "expanded": torch.ones(3, 1).expand(3, 4),
    "transposed": torch.arange(6.0).view(2, 3).T, "\u00e9 \"quoted\"": torch.ones(1, dtype=torch.uint8),
}  # fmt: skip


def test_every_dtype_and_form_is_read_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors_file.write(path, TENSORS, (TENSORS[name] for name in safetensors_file.order(TENSORS)))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert (
            found[name]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        )


def test_files_hold_no_more_than_they_may() -> None:
    sizes = {"a": 10, "b": 60, "c": 40, "d": 1, "e": 200, "f": 1}
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    files = safetensors_file.split(tensors, 100)
    assert list(files.values()) == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    assert list(files) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert safetensors_file.split(tensors, 1000) == {"model.safetensors": list(sizes)}


class Odd(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
        self._extra = extra

    def get_extra_state(self) -> Any:
        return self._extra


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    def refused(model: nn.Module, **options: Any) -> str:
        with pytest.raises(ws.WholestepError) as caught:
            ws.export(tmp_path / "x", model, **options)
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    assert refused(Odd({"a": 1})).startswith("_extra_state of the model's state_dict() is a dict\n")
    assert refused(Odd(torch.ones(1))) == (
        "odd is complex128, which safetensors does not have\n"
        "  needed: floating-point numbers, integers or bool\n"
        '  next: export with format="dcp"'
    )
    assert refused(nn.Linear(1, 1), max_file_bytes="many").startswith("max_file_bytes='many'\n")
    ws.export(tmp_path / "x", Odd(torch.ones(1)), "dcp")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_without_a_step(tmp_path: Path, name: str) -> None:
    """Untied, and tied below another name; no step has placed it."""
    pytest.importorskip("transformers")
    model = next(entries([name])).build()
    before = model.config.to_dict()
    found = type(model).from_pretrained(ws.export(tmp_path / "x", model))
    assert_same(found.state_dict(), model.state_dict())
    assert model.config.to_dict() == before
    assert found.config.architectures == [type(model).__name__]


def test_what_a_killed_export_leaves_is_removed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    """Another export of the same name may still be at work in a process that lives, or on another host."""
    code = (
        "import os, sys, torch, wholestep as ws\n"
        "from wholestep.checkpoint import export\n"
        "export._publish = lambda *_: os.kill(os.getpid(), 9)\n"
        "ws.export(sys.argv[1], torch.nn.Linear(2, 2))\n"
    )
    target = tmp_path / "out[1]"
    ended = subprocess.run([sys.executable, "-c", code, str(target)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    at_work = tmp_path / ".out[1]-000000000000.tmp"
    at_work.mkdir()
    at_work.with_suffix(".json").write_bytes(Owner.this_process().to_json())
    unknown = tmp_path / ".out[1]-111111111111.tmp"
    unknown.mkdir()
    ws.export(target, nn.Linear(2, 2))
    kept = {at_work.name, at_work.with_suffix(".json").name, unknown.name, target.name}
    assert {path.name for path in tmp_path.iterdir()} == kept
