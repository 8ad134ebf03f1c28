"""ws.export on two ranks: what from_pretrained, safetensors and torch alone read back has the same bits."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.hf_models import entries, loss_of
from wholestep.checkpoint import safetensors_file

NEEDS_HF = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
MODELS = ["gpt2"]
MORE = ["mixtral", "llama", "t5", "bert", "whisper", "mamba", "qwen3", "gemma2", "vit", "clip"]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch) if isinstance(batch, dict) else model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model on every rank."""
    state = model.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def train(model: nn.Module, style: str, batches: list[Any]) -> nn.Module:
    """Style "2-D" shards a dim of the last weight by both axes."""
    mesh, parallel = None, ws.DataParallel("fully_shard", axis="dp") if style == "2-D" else ws.DataParallel(style)
    if style == "2-D":
        mesh, parallel = "dp=2,tp=2", [parallel, ws.TensorParallel({"last": "colwise"}, axis="tp")]
    step = ws.compile(train_step, parallel=parallel, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for batch in batches:
        step(model, optimizer, batch)
    return model


def exports_hf(rank: int, world: int, folder: Path, names: list[str], style: str) -> None:
    for name in names:
        entry = next(entries([name]))
        torch.manual_seed(0)
        untrained = entry.build().state_dict()
        torch.manual_seed(0)
        made = torch.Generator().manual_seed(rank)
        model = train(entry.build(), style, [entry.batch(made) for _ in range(2)])
        expected = whole(model)
        assert not all(torch.equal(untrained[key], expected[key]) for key in expected), "it was trained"
        path = ws.export(folder / name, model)
        again = type(model).from_pretrained(path)
        assert_same(again.state_dict(), expected)
        again.tie_weights()
        assert len(list(again.parameters())) == len(list(model.parameters()))
        small = ws.export(folder / f"{name}-bf16", model, dtype=torch.bfloat16, max_file_bytes=20_000)
        assert len(list(small.glob("model-*-of-*.safetensors"))) > 1
        half = type(model).from_pretrained(small)
        cast = {key: t.bfloat16() if t.is_floating_point() else t for key, t in expected.items()}
        assert_same(half.state_dict(), cast)
        if entry.name == "gpt2":
            assert json.loads((small / "config.json").read_text())["dtype"] == "bfloat16"
            assert model.config.dtype != "bfloat16", "the model's own config stays"


@NEEDS_HF
def test_from_pretrained_reads_the_same_bits(tmp_path: Path) -> None:
    run_ranks(exports_hf, 2, tmp_path, MODELS, "fully_shard")


@NEEDS_HF
@pytest.mark.full
@pytest.mark.parametrize("style", ["fully_shard", "zero1"])
@pytest.mark.parametrize("name", MORE)
def test_from_pretrained_of_more_models(tmp_path: Path, style: str, name: str) -> None:
    run_ranks(exports_hf, 2, tmp_path, [name], style)


class Mixed(nn.Module):
    """Tied weights, buffers, one that is not saved, a scalar, sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Linear(11, 11)
        self.tied = nn.Linear(11, 11)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("once", torch.ones(3), persistent=False)
        self.register_buffer("wide", torch.ones(3, 1).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.last(self.norm(self.first(x)))) * self.scale


def exports_mixed(rank: int, world: int, folder: Path, style: str) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(rank if style != "2-D" else rank // 2)
    batches = [torch.randn(4, 7) for _ in range(2)]
    torch.manual_seed(0)
    model = train(Mixed(), style, batches)
    expected = whole(model)
    sums = [t for t in expected.values() if t.is_floating_point()]
    first = [t.clone() for t in sums]
    for t in first:
        dist.broadcast(t, 0)  # buffers of a rank are its own: those of the first are written
    expected |= dict(zip([k for k, t in expected.items() if t.is_floating_point()], first, strict=True))

    path = ws.export(folder / "plain", model)
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors"]
    found = load_file(path / "model.safetensors")
    once = {key: t for key, t in expected.items() if key != "tied.weight"}
    assert_same({key: found[key] for key in once}, once)
    assert set(found) == set(once)

    ws.export(folder / "dcp", model, "dcp", dtype=torch.float64)
    into = Mixed().double().state_dict()  # a model of torch alone
    dcp.load(into, checkpoint_id=folder / "dcp", no_dist=True)
    assert_same(into, {key: t.double() if t.is_floating_point() else t for key, t in expected.items()})


@pytest.mark.parametrize("style", ["fully_shard", "replicate", pytest.param("2-D", marks=pytest.mark.full)])
def test_torch_alone_reads_the_same_bits(tmp_path: Path, style: str) -> None:
    run_ranks(exports_mixed, 4 if style == "2-D" else 2, tmp_path, style)


def fails(rank: int, world: int, folder: Path) -> list[str]:
    torch.manual_seed(0)
    model = train(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7)), "fully_shard", [torch.randn(4, 7)])
    said: list[str] = []

    def refused(*args: Any, **kwargs: Any) -> None:
        with pytest.raises(ws.CheckpointError) as caught:
            ws.export(*args, **kwargs)
        said.append(str(caught.value).replace(str(folder), "FOLDER"))

    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "mine").touch()
    refused(folder / "full", model)
    refused(folder / "new", model, "onnx")
    fsync = os.fsync

    def disk_full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for form in ("safetensors", "dcp"):
        os.fsync = disk_full if rank == 0 else fsync
        refused(folder / "new", model, form)
        os.fsync = fsync
    write, safetensors_file.write = safetensors_file.write, lambda *_: disk_full(0)  # before any value is gathered
    refused(folder / "new", model)
    safetensors_file.write = write
    with torch.device("meta"):
        refused(folder / "new", nn.Linear(2, 2))
    assert sorted(path.name for path in folder.iterdir()) == ["full"]
    ws.export(folder / "new", model)
    return said


def test_all_ranks_raise_the_same_and_nothing_is_left(tmp_path: Path) -> None:
    one, other = run_ranks(fails, 2, tmp_path)
    assert one == other
    assert one[0] == ("FOLDER/full is there already\n  needed: a new folder, or an empty one\n  next: name another")
    assert one[1] == "export(format='onnx')\n  needed: format of type 'safetensors' | 'dcp'\n  next: correct format="
    assert all("FOLDER/new could not be written: the disk is full" in text for text in one[2:5])
    assert one[5].startswith("'weight' is on 'meta'")
