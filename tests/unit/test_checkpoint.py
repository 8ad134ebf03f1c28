"""ws.save and ws.load in a world of one: exact continuation, damage found in time, crashes at any point."""

import contextlib
import copy
import json
import os
import random
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02, device="cpu"), amsgrad=True),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
}


def make(optimizer: str = "adamw", width: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.4), nn.Linear(width, 2))
    for tensor in model.parameters():
        nn.init.uniform_(tensor)
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[1].parameters(), *model[3].parameters()], "lr": 0.03},
    ]
    return model, OPTIMIZERS[optimizer](groups)


def train(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer, calls: int) -> list[float]:
    """Data and dropout come from torch's generator."""
    return [step(model, optimizer, torch.randn(6, 4)).item() for _ in range(calls)]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), torch.get_rng_state().tolist()])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer, Path]:
    """A step called twice and saved after each call."""
    model, optimizer = make()
    step = ws.compile(train_step)
    for _ in range(2):
        train(step, model, optimizer, 1)
        ws.save(tmp_path, step, extra={"calls": step.calls})
    return step, model, optimizer, tmp_path


# -- continuing ----------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("into", ["step", "called step", "model", "step on meta"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_continues_exactly(optimizer: str, into: str, tmp_path: Path) -> None:
    model, made = make(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.7)
    step = ws.compile(train_step)
    train(step, model, made, 3)
    schedule.step()
    ws.save(tmp_path, step, extra={"schedule": schedule.state_dict()})
    expected = train(step, model, made, 3)

    with torch.device("meta" if into == "step on meta" else "cpu"):
        again, other = make(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.7)
    second = ws.compile(train_step)
    if into == "called step":
        train(second, again, other, 4)
    given = {"model": again, "optimizer": other} if into == "model" else {"step": second}
    found = ws.load(tmp_path, **given)
    schedule.load_state_dict(found.extra["schedule"])
    assert train(second, again, other, 3) == expected
    assert same(state_of(model, made), state_of(again, other))
    assert second.calls == (3 if into == "model" else 6)
    assert other.param_groups[0]["initial_lr"] == made.param_groups[0]["initial_lr"]
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor) == (optimizer == "adam tensor lr")


@pytest.mark.usual("adam tensor lr")
@pytest.mark.parametrize("optimizer", ["adamw", "adam tensor lr"])
def test_a_number_that_is_set_after_the_load_stays(optimizer: str, tmp_path: Path) -> None:
    """Loops that set the learning rate before each call; what they do not set comes from the checkpoint."""

    def loop(step: Any, model: nn.Module, made: torch.optim.Optimizer, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            for group in made.param_groups:
                rate = 0.03 / (number + 1)
                group["lr"] = torch.tensor(rate) if optimizer == "adam tensor lr" else rate
                group["weight_decay"] = 0.01 * (1 + number % 3)  # also what it was when the optimizer was made
            losses += train(step, model, made, 1)
        return losses

    model, made = make(optimizer)
    made.param_groups[0]["betas"] = (0.5, 0.6)
    step = ws.compile(train_step)
    loop(step, model, made, range(3))
    ws.save(tmp_path, step)
    expected = loop(step, model, made, range(3, 6))
    again, other = make(optimizer)
    second = ws.compile(train_step)
    ws.load(tmp_path, second)
    assert loop(second, again, other, range(3, 6)) == expected
    assert same(state_of(model, made), state_of(again, other))
    assert other.param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.smoke
def test_untrained_checkpoint_resets_a_called_step(tmp_path: Path) -> None:
    model, optimizer = make()
    ws.save(tmp_path, model=model, optimizer=optimizer, number=0)
    step = ws.compile(train_step)
    first = train(step, model, optimizer, 3)
    ws.load(tmp_path, step)
    assert train(step, model, optimizer, 3) == first


def test_every_option_comes_back_but_the_choice_of_kernels(tmp_path: Path) -> None:
    model, optimizer = make()
    optimizer.param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.3, foreach=True)
    ws.save(tmp_path, model=model, optimizer=optimizer, number=1)
    again, other = make()
    step = ws.compile(train_step)
    ws.load(tmp_path, step)
    train(step, again, other, 1)
    group = other.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["foreach"]) == ((0.5, 0.6), 0.3, None)
    assert len(step.misses) == 1  # the first capture had baked in what the options were before


def test_all_generators_come_back(trained: Any) -> None:
    step, _, _, root = trained
    ws.save(root, step)
    drawn = torch.rand(3).tolist(), random.random(), float(np.random.rand())
    ws.load(root, step)
    assert (torch.rand(3).tolist(), random.random(), float(np.random.rand())) == drawn


def gan_step(makes: nn.Module, judges: nn.Module, one: Any, two: Any, x: torch.Tensor) -> torch.Tensor:
    two.zero_grad()
    judged = judges(makes(x).detach()).mean() - judges(x).mean()
    judged.backward()
    two.step()
    one.zero_grad()
    loss = -judges(makes(x)).mean()
    loss.backward()
    one.step()
    return loss.detach()


def test_several_models_and_optimizers_go_by_name(tmp_path: Path) -> None:
    def both() -> dict[str, Any]:
        makes, judges = nn.Linear(3, 3), nn.Linear(3, 1)
        one, two = torch.optim.Adam(makes.parameters()), torch.optim.SGD(judges.parameters(), lr=0.1, momentum=0.9)
        return {"makes": makes, "judges": judges, "one": one, "two": two}

    x, held, other = torch.randn(5, 3), both(), both()
    step = ws.compile(gan_step)
    step(**held, x=x)
    ws.save(tmp_path, step)
    # given in another order
    models, optimizers = {k: other[k] for k in ("judges", "makes")}, {k: other[k] for k in ("two", "one")}
    ws.load(tmp_path, model=models, optimizer=optimizers)
    again = ws.compile(gan_step)
    assert [step(**held, x=x).item() for _ in range(3)] == [again(**other, x=x).item() for _ in range(3)]
    with pytest.raises(ws.CheckpointError, match=r"model0\.weight: float32\[3, 3\] here, missing in the checkpoint"):
        ws.load(tmp_path, model=[other["makes"], other["judges"]])


class Counting(torch.optim.Optimizer):
    """State that is no tensor, state of the optimizer as a whole, and a tensor of a shape of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "note": ("a", 1)})

    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}
        for group in self.param_groups:
            for param in group["params"]:
                entry = self.state[param]
                entry["count"] = entry.get("count", 0) + 1
                entry.setdefault("seen", torch.zeros(5))[entry["count"]] = 1.0
                param.data.add_(param.grad, alpha=-group["lr"] * entry["count"])


def test_own_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.step()
    ws.save(tmp_path, model=model, optimizer=optimizer, number=2)
    other = nn.Linear(2, 2)
    again = Counting(other.parameters())
    ws.load(tmp_path, model=other, optimizer=again)
    assert again.state["all"] == {"steps": 2}
    assert again.state[other.weight]["count"] == 2
    assert again.state[other.bias]["seen"].tolist() == [0, 1, 1, 0, 0]
    assert torch.equal(other.weight, model.weight)


def test_model_alone_and_nothing(trained: Any) -> None:
    _, model, _, root = trained
    other, _ = make()
    found = ws.load(root, model=other)
    assert same(other.state_dict(), model.state_dict())
    assert found == ws.Checkpoint(2, {"calls": 2}, root / "step-00000002")
    assert ws.load(root / "step-00000001") == ws.Checkpoint(1, {"calls": 1}, root / "step-00000001")


# -- the folder ----------------------------------------------------------------------------


def names(root: Path) -> list[str]:
    """What is in a folder, but the lease of this process."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".writer-"))


def test_keeps_the_newest(trained: Any) -> None:
    step, _, _, root = trained
    assert names(root) == ["latest", "step-00000001", "step-00000002"]
    (root / "mine.tmp").mkdir()
    assert ws.save(root, step, number=7) == root / "step-00000007"
    assert names(root) == ["latest", "mine.tmp", "step-00000002", "step-00000007"]
    assert (root / "latest").read_text() == "step-00000007\n"
    # back in time: the one saved last is the newest, whatever its number
    assert ws.save(root, step, number=3, keep=3).name == "step-00000003"
    assert ws.load(root).number == 3
    assert ws.save(root, step, number=3).name == "step-00000003-2"
    assert ws.save(root, step, number=3, keep=1).name == "step-00000003-3"
    assert names(root) == ["latest", "mine.tmp", "step-00000003-3"]


def test_manifest_names_all_tensors_and_files(trained: Any) -> None:
    *_, root = trained
    folder = root / "step-00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tensors"]["0.weight"]["shape"] == [7, 4]
    assert manifest["tensors"]["0.weight/exp_avg"]["owner"] == "0.weight"
    assert manifest["tensors"]["1.num_batches_tracked"]["dtype"] == "int64"
    assert {*manifest["files"], "manifest.json", "writer.json"} == set(names(folder))
    assert (manifest["number"], manifest["world_size"], manifest["mesh"]) == (2, 1, "dp=1")


class Gain(nn.Module):
    """Counts its calls in `n`, has the `largest` entry of late in an attribute, and keeps `kept` beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.n, self.kept = nn.Parameter(torch.ones(4)), 0, object()
        self.largest = torch.zeros((), dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.largest = torch.maximum(0.9 * self.largest, x.detach().abs().max())
        return x * self.w * (1 + 0.1 * self.n) / (1 + self.largest)

    def get_extra_state(self) -> Any:
        return {"n": self.n, "largest": self.largest, "kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.n, self.largest, self.kept = state["n"], state["largest"].clone(), state["kept"]


class Attribute(Gain):
    """Says nothing of what it keeps: a step has found its tensor."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = 0
        return super().forward(x)


@pytest.mark.parametrize("into", ["step", "called step", "model", "copies"])
def test_what_a_module_keeps_comes_back(into: str, tmp_path: Path) -> None:
    """Against a run in eager torch that nothing interrupts."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Gain()).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(6)]
    model, optimizer = made()
    expected = [train_step(model, optimizer, x).item() for x in batches]
    model, optimizer = made()
    step, copies = ws.compile(train_step), ws.MemoryCopies(tmp_path / "memory")
    for x in batches[:3]:
        model[1].kept = [torch.ones(2), "text", {"a": 1.5}]
        step(model, optimizer, x)
    copies.save(step) if into == "copies" else ws.save(tmp_path, step)
    model, optimizer = made()
    step = ws.compile(train_step)
    if into == "called step":
        step(model, optimizer, batches[5])
    if into == "copies":
        copies.load(step)
    elif into == "model":
        ws.load(tmp_path, model=model, optimizer=optimizer)
    else:
        ws.load(tmp_path, step)
    found = [step(model, optimizer, x).item() for x in batches[3:]]
    torch.testing.assert_close(found, expected[3:], rtol=1e-12, atol=0)
    assert same(model[1].kept, [torch.ones(2), "text", {"a": 1.5}])


def test_tensors_in_attributes_of_modules_come_back_into_the_model_alone(tmp_path: Path) -> None:
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    models = [nn.Sequential(Attribute()).double() for _ in range(3)]
    expected = [train_step(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1), x).item() for x in batches]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = ws.compile(train_step)
    for x in batches[:2]:
        step(models[1], optimizers[1], x)
    ws.save(tmp_path, step)
    ws.load(tmp_path, model=models[2], optimizer=optimizers[2])
    resumed = [train_step(models[2], optimizers[2], x).item() for x in batches[2:]]
    torch.testing.assert_close(resumed, expected[2:], rtol=1e-12, atol=0)
    models[2][0].largest = None
    with pytest.raises(ws.CheckpointError, match=r"0\.largest: float64\[\] in the checkpoint, missing here"):
        ws.load(tmp_path, model=models[2])


def test_what_a_module_keeps_is_data_and_belongs_to_it(tmp_path: Path) -> None:
    model = nn.Sequential(Gain(), Gain())
    text = "get_extra_state() of a module, '0._extra_state', holds what cannot be saved"
    with pytest.raises(ws.CheckpointError, match=re.escape(text)):
        ws.save(tmp_path, model=model, number=1)
    model[0].kept = model[1].kept = 3
    ws.save(tmp_path, model=model, number=1)
    other = nn.Module()
    other.w = nn.Parameter(torch.ones(4))
    with pytest.raises(ws.CheckpointError, match=r"1\._extra_state: kept by a module in the checkpoint, not here"):
        ws.load(tmp_path, model=nn.Sequential(Gain(), other))
    with pytest.raises(ws.CheckpointError, match=r"stateful 'a\._extra_state', a name that torch gives"):
        ws.save(tmp_path, model=model, number=2, stateful={"a._extra_state": Gain()})


# -- errors --------------------------------------------------------------------------------


def refused(root: Path, into: Any) -> str:
    """The text of the error; the live state is as it was."""
    step, model, optimizer, _ = into
    before, calls = state_of(model, optimizer), step.calls
    with pytest.raises(ws.CheckpointError) as error:
        ws.load(root, step, strict=True)
    assert same(state_of(model, optimizer), before)
    assert step.calls == calls
    return str(error.value).replace(str(root), "ROOT")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
}


@pytest.mark.parametrize("file", ["manifest.json", "values.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found(trained: Any, how: str, file: str) -> None:
    root = trained[-1]
    DAMAGE[how](root / "step-00000002" / file)
    text = refused(root, trained)
    assert text.startswith("checkpoint ROOT/step-00000002 ")
    assert file in text
    assert text.endswith("\n  next: load 'ROOT/step-00000001', which is intact")
    with pytest.warns(UserWarning, match=r"step-00000002 .*; loaded .*step-00000001 instead, which is intact"):
        assert ws.load(root, trained[0]).number == 1
    with pytest.raises(ws.CheckpointError, match="step-00000002"):
        ws.load(root / "step-00000002", trained[0])  # asked for by name


def test_every_byte_of_the_manifest_counts(trained: Any) -> None:
    path = trained[-1] / "step-00000002" / "manifest.json"
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 100)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(trained[-1], trained)


def test_text_of_damage(trained: Any) -> None:
    root = trained[-1]
    size = (root / "step-00000002" / "values.pt").stat().st_size
    os.truncate(root / "step-00000002" / "values.pt", 10)
    assert refused(root, trained) == (
        f"checkpoint ROOT/step-00000002 is damaged: values.pt has 10 bytes, it had {size:,}\n"
        "  needed: the files as they were saved\n"
        "  next: load 'ROOT/step-00000001', which is intact"
    )
    flip(root / "step-00000001" / "values.pt")
    (root / "step-00000002" / ".metadata").unlink()
    assert refused(root, trained) == (
        "checkpoint ROOT/step-00000002 is damaged:\n"
        "    .metadata is missing\n"
        f"    values.pt has 10 bytes, it had {size:,}\n"
        "  needed: the files as they were saved\n"
        "  next: correct the path, or start anew: no other checkpoint is intact"
    )


def test_text_of_nothing_there(trained: Any) -> None:
    root = trained[-1]
    assert refused(root / "none", trained) == (
        "ROOT does not exist\n  needed: a folder that wholestep.save wrote to\n  next: correct the path"
    )
    assert refused(root / "step-00000008", trained).startswith("checkpoint ROOT is no folder\n")
    for text in ("../elsewhere\n", "step-00000008\n", "\0" * 9000):  # a hint, which may be stale
        (root / "latest").write_text(text)
        assert ws.load(root).number == 2
    (root / "latest").unlink()
    assert ws.load(root).number == 2
    empty = root / "empty"
    empty.mkdir()
    assert refused(empty, trained).startswith("ROOT holds no checkpoint\n")


def rewrite(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it the checksum that it should have."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps({**content, "checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode())}))


def cut(content: dict[str, Any], *rows: list[int]) -> None:
    """Say that the first weight is in parts: of each the first row, and how many."""
    _, _, file, start, length = content["chunks"]["0.weight"][0]
    content["chunks"]["0.weight"] = [[[begin, 0], [count, 4], file, start, length] for begin, count in rows]


@pytest.mark.parametrize(
    ("change", "found", "needed"),
    [
        (lambda m: m.update(calls="3"), "calls is '3'", "a whole number"),
        (lambda m: m.update(calls=-1), "calls is -1", "a number from 0"),
        (lambda m: m.update(world_size=0), "world_size is 0", "a number from 1"),
        (lambda m: m.update(number=True), "number is True", "a whole number"),
        (lambda m: m.pop("mesh"), "field mesh is missing", "a text"),
        (lambda m: m.update(more=1), "unknown field more", "one of number, calls"),
        (lambda m: m["files"].update({"../x": [1, 2]}), "files is '../x'", "the name of a file in the folder"),
        (lambda m: m["files"].update({"x": [-1, 2]}), "files['x'] is -1", "a size from 0"),
        (lambda m: m["tensors"]["0.weight"].update(role="all"), "tensors['0.weight'].role is 'all'", "one of param"),
        (lambda m: m["tensors"]["0.weight"].update(dtype="nn"), "tensors['0.weight'].dtype is 'nn'", "a dtype"),
        (lambda m: m["tensors"]["0.weight"].update(shape=[-7]), "tensors['0.weight'].shape is (-7,)", "sizes from 0"),
        (lambda m: m["tensors"]["0.weight/exp_avg"].update(owner="9"), ".owner is '9'", "the name of a parameter"),
        (lambda m: m["optimizers"].clear(), ".optimizer is 'optimizer'", "a name in 'optimizers'"),
        (lambda m: m["optimizers"]["optimizer"].update(groups=[["9"]]), ".groups is '9'", "the name of a parameter"),
        (lambda m: m["files"].pop("values.pt"), "'files' lacks values.pt", "every file of the checkpoint"),
        (lambda m: m["stateful"].update(a=[]), "'files' lacks stateful-0-0.pt", "every file of the checkpoint"),
        (lambda m: m["stateful"].update(a=[1]), "stateful['a'] is 1", "a rank from 1 to 0"),
        (lambda m: cut(m, [0, 3], [0, 3]), "chunks['0.weight'] is", "all elements of [7, 4], each once"),
        (lambda m: cut(m, [0, 4], [3, 4], [0, 1]), "chunks['0.weight'] is", "all elements of [7, 4], each once"),
        (lambda m: cut(m, [0, 4], [4, 2]), "chunks['0.weight'] is", "all elements of [7, 4], each once"),
    ],
)  # fmt: skip
def test_a_right_checksum_is_no_proof(trained: Any, change: Any, found: str, needed: str) -> None:
    """Each value of a manifest is checked, also under the checksum that it should have."""
    reseal(trained[-1] / "step-00000002", change)
    text = refused(trained[-1], trained)
    assert text.startswith("checkpoint ROOT/step-00000002: its manifest.json is malformed: ")
    assert found in text
    assert f"needed: {needed}" in text
    assert text.endswith("load 'ROOT/step-00000001', which is intact")


def test_foreign_and_newer(trained: Any) -> None:
    root = trained[-1]
    rewrite(root / "step-00000002", format="another")
    assert "its manifest.json is not of format 'wholestep.checkpoint'" in refused(root, trained)
    rewrite(root / "step-00000002", format="wholestep.checkpoint", version=3)
    assert refused(root, trained) == (
        "checkpoint ROOT/step-00000002 has version 3\n"
        "  needed: version 2\n"
        "  next: load it with the wholestep that wrote it"
    )


@pytest.mark.parametrize("called", [True, False])
def test_other_model(trained: Any, called: bool) -> None:
    root = trained[-1]
    model, optimizer = make(width=9)
    model.add_module("more", nn.Linear(2, 2))
    step = ws.compile(train_step)
    if called:
        train(step, model, optimizer, 1)
        text = refused(root, (step, model, optimizer, root))
    else:
        ws.load(root, step)
        before = copy.deepcopy(model.state_dict())
        for _ in range(2):  # it does not start from something else after that
            with pytest.raises(ws.CheckpointError) as error:
                train(step, model, optimizer, 1)
            text = str(error.value).replace(str(root), "ROOT")
        assert same(model.state_dict(), before)
    assert text.startswith(
        "checkpoint ROOT/step-00000002 does not fit:\n"
        "    0.weight: float32[7, 4] in the checkpoint, float32[9, 4] here\n"
        "    0.bias: float32[7] in the checkpoint, float32[9] here\n"
    )
    assert "    more.weight: float32[2, 2] here, missing in the checkpoint\n" in text
    assert text.count("\n    ") == 11
    assert "\n    and " in text
    assert text.endswith(
        "\n  needed: the same model and optimizer"
        "\n  next: load it into what it was saved from; several models or optimizers by the names they had then"
    )


def test_other_optimizer(trained: Any) -> None:
    root = trained[-1]
    model, optimizer = make("sgd dampening")
    with pytest.raises(
        ws.CheckpointError, match="does not fit: optimizer 'optimizer': AdamW in the checkpoint, SGD here"
    ):
        ws.load(root, model=model, optimizer=optimizer)
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(ws.CheckpointError, match=r"other parameter groups \(\[2, 4\] and \[6\] parameters"):
        ws.load(root, model=model, optimizer=one_group)
    model = model.to(torch.bfloat16)
    with pytest.raises(ws.CheckpointError, match=r"0.weight: float32\[7, 4\] in the checkpoint, bfloat16\[7, 4\] here"):
        ws.load(root, model=model)
    with pytest.raises(ws.CheckpointError, match=r"0\.weight: on 'meta' here"):
        ws.load(root, model=make()[0].to("meta"))


def test_misuse(trained: Any, tmp_path: Path) -> None:
    step, model, _, root = trained
    for given in (
        {},
        {"step": ws.compile(train_step)},
        {"model": model},
        {"step": step, "keep": 0},
        {"step": step, "keep": 1.5},
        {"step": step, "every": True},
        {"model": model, "number": 1, "every": 2},
        {"step": step, "number": -1},
    ):
        with pytest.raises(ws.CheckpointError, match=r"^save\("):
            ws.save(tmp_path, **given)
    with pytest.raises(ws.CheckpointError, match="both a step and model= or optimizer= were given"):
        ws.load(tmp_path, step, model=model)
    before = names(root)
    with pytest.raises(ws.CheckpointError, match="extra holds what cannot be saved"):
        ws.save(root, step, extra={"model": make})
    assert names(root) == before
    assert ws.load(root).number == 2


def test_gradients_that_are_carried_on_are_warned_of(tmp_path: Path) -> None:
    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = make()
    step = ws.compile(accumulate)
    train(step, model, optimizer, 2)
    with pytest.warns(UserWarning, match="carries gradients from one call to the next"):
        ws.save(tmp_path, step)


# -- crashes -------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class Fuse:
    """Breaks the `count`-th operation that changes the disk for good, before or after it is done. Heartbeats are not
    counted: other tests' folders have them too.
    """

    def __init__(self, count: int, after: bool, error: type[BaseException]) -> None:
        self.left, self.after, self.error = count, after, error

    def wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "wholestep-lease":
                return operation(*args, **kwargs)
            self.left -= 1
            if self.left == 0 and not self.after:
                raise self.error
            result = operation(*args, **kwargs)
            if self.left == 0:
                raise self.error
            return result

        return run


@pytest.mark.crossed
@pytest.mark.filterwarnings("ignore:.* is saved, but older checkpoints could not be removed")
@pytest.mark.parametrize("error", [Crash, OSError])
@pytest.mark.parametrize("after", [False, True])
def test_crash_at_any_point(
    trained: Any, after: bool, error: type[BaseException], monkeypatch: Any, tmp_path_factory: Any
) -> None:
    """Save number 3 breaks at its first, second, ... point: 2 or 3 is loadable, and the next save works."""
    step, model, optimizer, root = trained
    two = state_of(model, optimizer)
    train(step, model, optimizer, 1)
    three = state_of(model, optimizer)
    loaded, count = set(), 0
    while True:
        count += 1
        copied = tmp_path_factory.mktemp("copy") / "checkpoints"
        shutil.copytree(root, copied)
        fuse = Fuse(count, after, error)
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
                patch.setattr(os, name, fuse.wrap(getattr(os, name)))
            with contextlib.suppress(Crash, ws.CheckpointError):
                ws.save(copied, step)
        if fuse.left > 0:
            break
        fresh, other = make()
        found = ws.load(copied, model=fresh, optimizer=other)
        assert same(state_of(fresh, other)[:2], {2: two, 3: three}[found.number][:2])
        loaded.add(found.number)
        ws.save(copied, step)
        assert ws.load(copied).number == 3
        assert len(names(copied)) == 3
    assert loaded == {2, 3}
    assert count > 10


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc for the name of an open file")
def test_all_is_on_disk_before_it_is_named(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, *_, root = trained
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def log_sync(handle: Any) -> None:
        done.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{handle}'), root)}")
        fsync(handle)

    def log_replace(source: Any, target: Any) -> None:
        done.append(f"name {os.path.relpath(target, root)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "replace", log_replace)
    ws.save(root, step, number=3)
    done = [what.replace("step-00000003", "NEW") for what in done if ".writer-" not in what]
    named = done.index("name NEW/manifest.json")
    files = {"__0_0.distcp", "values.pt", ".metadata", "writer.json", "manifest.json.tmp"}
    assert {f"sync NEW/{name}" for name in files} | {"sync NEW"} <= set(done[:named])
    assert done[named + 1 :] == ["sync NEW", "sync .", "sync latest.tmp", "name latest", "sync .", "sync step-00000001"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks /proc for the name of an open file")
def test_the_folders_of_a_new_root_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def log_sync(handle: Any) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", log_sync)
    ws.save(tmp_path / "a" / "b", model=nn.Linear(2, 2), number=1)
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_whatever_is_altered_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """At random: bytes of each file, other kinds of files, and fields of the manifest: without its checksum all are
    refused; under a right one nothing but a CheckpointError is raised.
    """
    draw, model = random.Random(7), nn.Sequential(nn.Linear(3, 4), Gain())
    model[1].kept = 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train_step(model, optimizer, torch.randn(5, 3))
    good = ws.save(tmp_path / "good", model=model, optimizer=optimizer, number=3, extra={"a": 1})
    state = state_of(model, optimizer)[:2]
    files = sorted(path.name for path in good.iterdir() if path.name != "writer.json")
    for number in range(200):
        folder = tmp_path / f"step-{number:08d}"
        shutil.copytree(good, folder)
        if number % 2:
            reseal(folder, lambda content: alter(content, draw))
            with contextlib.suppress(ws.CheckpointError):
                ws.load(folder, model=model, optimizer=optimizer)
            ws.load(good, model=model, optimizer=optimizer)
        else:
            ALTERED[number // 2 % len(ALTERED)](folder / draw.choice(files), draw)
            with pytest.raises(ws.CheckpointError):
                ws.load(folder, model=model, optimizer=optimizer)
        assert same(state_of(model, optimizer)[:2], state)
        shutil.rmtree(folder)


ALTERED: list[Callable[[Path, random.Random], object]] = [
    lambda path, draw: flip(path),
    lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    lambda path, draw: (path.unlink(), os.mkfifo(path)),
    lambda path, draw: (path.unlink(), path.symlink_to("/dev/zero")),
    lambda path, draw: (path.unlink(), path.mkdir()),
    lambda path, draw: path.write_bytes(path.read_bytes() + draw.randbytes(3)),
]


def alter(content: Any, draw: random.Random) -> None:
    """Change one value at a random depth to another one."""
    names = ["number", "calls", "saved_at", "mesh"]  # other values of these are other facts about the same tensors
    while True:
        key = draw.choice(
            [key for key in content if key not in names] if isinstance(content, dict) else range(len(content))
        )
        if not isinstance(content[key], (dict, list)) or not content[key] or draw.random() < 0.2:
            break
        content = content[key]
    if draw.random() < 0.3:
        del content[key]
    else:
        content[key] = draw.choice([None, -1, 0, 1, 2, 10**12, "x", "", "float64", [], {}, [[]], 1.5, True, "w" * 300])


def test_crash_while_an_old_one_is_removed(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, *_, root = trained
    unlink, blown = os.unlink, Fuse(3, False, Crash).wrap(os.unlink)

    def of_old_one(path: Any, **options: Any) -> None:  # a lease that is renewed meanwhile does not count
        (blown if "step-00000001" in str(path) else unlink)(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", of_old_one)
        with pytest.raises(Crash):
            ws.save(root, step, number=3)
    assert names(root) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    assert len(names(root / "step-00000001")) == 3
    assert ws.load(root).number == 3
    with pytest.raises(ws.CheckpointError, match="step-00000001 has no manifest"):
        ws.load(root / "step-00000001")
    ws.save(root, step, number=4)
    assert names(root) == ["latest", "step-00000003", "step-00000004"]
