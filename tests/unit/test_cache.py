"""The compile cache in one process: a second step of the same kind compiles nothing, any change compiles anew."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.cache import key as cache_key
from wholestep.cache.folder import MAGIC
from wholestep.runtime import step as runtime_step

SCALE = 1.0
OFFSET = torch.ones(3)


@dataclass
class Config:
    gain: float = 1.0
    shape: tuple[int, ...] = (3,)


class Net(nn.Module):
    power = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)
        self.config, self.mask = Config(), torch.ones(3)
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shifted(self.act(self.norm(self.layer(x))) * self.config.gain * self.mask) ** self.power


def shifted(x: torch.Tensor) -> torch.Tensor:
    return SCALE * x + OFFSET


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, weight: float = 1.0) -> Any:
    optimizer.zero_grad()
    loss = (weight * model(x)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass
class Start:
    """What a process begins with; changes are made to it before its first step."""

    model: Net
    fn: Callable[..., Any] = train_step
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    numbers: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    x: torch.Tensor | None = None
    more: tuple[Any, ...] = ()

    def run(self, folder: Path | str, steps: int = 1) -> tuple[ws.CompiledStep, list[float]]:
        optimizer = self.optimizer(self.model.parameters(), **(self.numbers or {}))
        step = ws.compile(self.fn, cache=folder, **(self.options or {}))
        x = torch.arange(20.0).view(5, 4) / 10 if self.x is None else self.x
        losses = [step(self.model, optimizer, x + i, *self.more).item() for i in range(steps)]
        return step, losses


def start() -> Start:
    return Start(Net())


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the program of `start()`."""
    step, _ = start().run(tmp_path)
    assert step.cache_log == ["miss: no entry"]
    assert len(list(tmp_path.iterdir())) == 1
    return tmp_path


def test_a_second_start_compiles_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    for stage in ("capture_step", "plan", "partition"):
        monkeypatch.setattr(runtime_step, stage, refuse)
    step, losses = start().run(kept, 3)
    assert (step.cache_log, step.captures) == (["hit"], 0)
    monkeypatch.undo()
    again, expected = start().run("", 3)
    assert losses == expected
    assert (str(step.train_graph), str(step.local_graph)) == (str(again.train_graph), str(again.local_graph))
    assert step.plan == again.plan
    assert step.plan is not None
    assert again.plan is not None
    assert step.plan.explain("layer.weight") == again.plan.explain("layer.weight")


@pytest.mark.parametrize("case", ["tokens", "convolutions", "partly-used", "micro-clip", "recurrent", "tied"])
@pytest.mark.parametrize("recipe", ["AdamW-fused", "SGD-momentum", "SGD-dampening", "Adam-two-groups"])
def test_steps_are_bitwise_those_of_a_cold_start(tmp_path: Path, case: str, recipe: str) -> None:
    found = []
    for folder in (tmp_path, tmp_path, ""):
        model = CASES[case].build(torch.float32)
        optimizer = OPTIMIZERS[recipe].make(model.parameters())
        step = ws.compile(CASES[case].step, cache=folder)
        for i in range(3):
            step(model, optimizer, CASES[case].batches(i, torch.float32))
        found.append((step, [t.tolist() for t in (*model.parameters(), *model.buffers())]))
    (cold, first), (warm, second), (_, third) = found
    assert first == second == third
    assert warm.cache_log == ["hit"] * len(cold.cache_log)
    assert cold.captures == len(cold.cache_log) > 0 == warm.captures


# -- what is another program ------------------------------------------------------------------
def _scaled_step(by: float) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, x, by)

    return step


def _no_bias(s: Start) -> None:
    s.model.layer.bias = None


def _frozen(s: Start) -> None:
    s.model.layer.bias.requires_grad_(False)


def _hooked(s: Start) -> None:
    s.model.layer.register_forward_hook(lambda module, args, out: 2 * out)


def _patched(s: Start) -> None:
    s.model.norm.forward = lambda x: x  # type: ignore[method-assign]


def _with(**options: Any) -> Callable[[Start], None]:
    return lambda s: setattr(s, "options", options)


CHANGES: dict[str, tuple[Callable[[Start], Any], str]] = {
    "attribute": (lambda s: setattr(s.model, "power", 3), "module model is another one"),
    "nested attribute": (lambda s: setattr(s.model.config, "gain", 2.0), "module model is another one"),
    "attribute of a submodule": (lambda s: setattr(s.model.norm, "eps", 1e-3), "module model.norm is another one"),
    "tensor attribute": (lambda s: s.model.mask.mul_(2), "module model is another one"),
    "function attribute": (lambda s: setattr(s.model, "act", torch.relu), "module model is another one"),
    "patched method": (_patched, "module model.norm is another one"),
    "hook": (_hooked, "module model.layer is another one"),
    "mode": (lambda s: s.model.norm.eval(), "module model.norm is another one"),
    "no bias": (_no_bias, "module model.layer is another one"),
    "frozen": (_frozen, "parameters and buffers is another one"),
    "gradients": (lambda s: s.model(torch.ones(1, 4)).sum().backward(), "parameters and buffers is another one"),
    "dtype": (lambda s: s.model.layer.double().float().half().float(), ""),
    "batch size": (lambda s: setattr(s, "x", torch.ones(6, 4)), "argument x is another one"),
    "strides": (lambda s: setattr(s, "x", torch.ones(4, 5).t()), "argument x is another one"),
    "argument": (lambda s: setattr(s, "more", (2.0,)), "the structure of the arguments is another one"),
    "closure": (lambda s: setattr(s, "fn", _scaled_step(2.0)), "the step function is another one"),
    "optimizer": (lambda s: setattr(s, "optimizer", torch.optim.Adam), "optimizer is another one"),
    "option": (lambda s: setattr(s, "numbers", {"weight_decay": 0.5}), "attributes of optimizer is another one"),
    "learning rate": (lambda s: setattr(s, "numbers", {"lr": 0.5}), ""),
    "style": (_with(parallel=ws.DataParallel("zero1")), "option parallel is another one"),
    "gradients kept": (_with(keep_grads=True), "option keep_grads is another one"),
    "memory": (_with(memory_bytes="1GiB"), "option memory_bytes is another one"),
    "schedule": (_with(schedule=None), "option schedule is another one"),
    "passes": (_with(passes=lambda passes: passes), "option passes is another one"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_named(kept: Path, change: str) -> None:
    made, (alter, why) = start(), CHANGES[change]
    alter(made)
    step, losses = made.run(kept)
    assert step.cache_log == ([f"miss: {why}"] if why else ["hit"])
    again = start()
    alter(again)
    assert losses == again.run("")[1], "what ran is what the change asks for"
    other = start()
    alter(other)
    assert other.run(kept)[0].cache_log == ["hit"], "the changed step is kept too"
    assert start().run(kept)[0].cache_log == ["hit"], "beside the first one"


def test_a_closure_value_is_part_of_the_step(tmp_path: Path) -> None:
    logs = [Start(Net(), fn=_scaled_step(by)).run(tmp_path)[0].cache_log[0] for by in (1.0, 2.0, 1.0)]
    assert logs == ["miss: no entry", "miss: the step function is another one", "hit"]


@pytest.mark.parametrize(("name", "value"), [("SCALE", 2.0), ("OFFSET", torch.zeros(3)), ("shifted", torch.relu)])
def test_a_global_that_ran_code_reads_is_seen(
    kept: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(sys.modules[__name__], name, value)
    step, losses = start().run(kept)
    assert step.cache_log == [f"miss: the global {__name__}.{name} is another one"]
    assert losses == start().run("")[1]


def test_a_class_attribute_is_seen(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "power", 3)
    assert start().run(kept)[0].cache_log == ["miss: module model is another one"]


def test_a_function_of_torch_that_was_replaced_is_seen(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "layer_norm", lambda x, *args: 2 * x)
    assert start().run(kept)[0].cache_log == ["miss: the global torch.nn.functional.layer_norm is another one"]


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_another_version_is_another_program(kept: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr({"numpy": np, "torch": torch}[module], "__version__", "9.9")
    assert start().run(kept)[0].cache_log == ["miss: versions is another one"]


def test_other_source_of_wholestep_is_another_program(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "own_source", lambda: "other")
    assert start().run(kept)[0].cache_log == ["miss: versions is another one"]


def test_autocast_is_part_of_the_key(kept: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step, _ = start().run(kept)
    assert step.cache_log == ["miss: grad mode, autocast, default dtype or the whole batch is another one"]


def test_a_value_of_the_batch_that_the_step_reads(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * (1.0 if mask.all() else 3.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    logs, losses = [], []
    for mask in (torch.ones(3), torch.zeros(3), torch.ones(3), torch.zeros(3)):
        made = Start(Net(), fn=step, more=(mask.long(),))
        compiled, loss = made.run(tmp_path)
        logs.append(compiled.cache_log[0].partition(" at ")[0])
        losses += loss
    assert logs == ["miss: no entry", "miss: the value that the step reads", "hit", "hit"]
    assert losses[0] == losses[2] != losses[1] == losses[3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_live_tensor_that_the_step_uses_stays_live(kept: Path) -> None:
    """A constant that the model holds is read at each call, in a warm start as in a cold one."""
    found = []
    for folder in (kept, ""):
        made = start()
        optimizer = torch.optim.AdamW(made.model.parameters())
        step, x = ws.compile(train_step, cache=folder), torch.ones(5, 4)
        step(made.model, optimizer, x)
        made.model.mask.mul_(3)
        found.append(step(made.model, optimizer, x).item())
    assert found[0] == found[1]


# -- files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-50], "is cut short or changed"),
        (lambda data: data[:500] + b"?" + data[501:], "is cut short or changed"),
        (lambda data: data.replace(MAGIC, b"wholestep-program 0 "), "is of another version"),
        (lambda data: b"nothing of the kind", "is no program of wholestep"),
        (lambda data: b"", "is no program of wholestep"),
    ],
)
def test_a_damaged_entry_is_named_and_written_again(kept: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match=f"{file.name} {said}: it is not used, and written again"):
        step, _ = start().run(kept)
    assert step.cache_log == ["miss: the entry cannot be read"]
    assert start().run(kept)[0].cache_log == ["hit"]
    assert len(list(kept.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left"):
        _, losses = start().run(tmp_path)
    assert losses
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ws.CacheError) as caught:
        ws.compile(train_step, cache=tmp_path / "file")
    assert str(caught.value).splitlines()[0] == f"cache='{tmp_path}/file' is a file"


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "deep" / "folder"))
    assert ws.compile(train_step, cache="").cache_log == []
    for said in ("miss: no entry", "hit"):
        model, step = Net(), ws.compile(train_step)
        step(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(5, 4))
        assert step.cache_log == [said]


def test_programs_of_one_key_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in range(12):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", float(value))
        start().run(tmp_path)
    assert len(list(tmp_path.iterdir())) == 8


# -- what is not kept --------------------------------------------------------------------------------
def test_what_cannot_be_compared_is_not_kept_and_named_once(tmp_path: Path) -> None:
    made = start()
    made.model.rows = (i for i in range(3))  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"not kept in the compile cache: model.rows is a builtins.generator"):
        step, _ = made.run(tmp_path)
    assert step.cache_log == ["off: model.rows is a builtins.generator"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(made.model, torch.optim.AdamW(made.model.parameters()), torch.ones(7, 4))
    assert list(tmp_path.iterdir()) == []


def test_code_of_no_file_is_not_kept(tmp_path: Path) -> None:
    """What a function made by `exec` reads cannot be found again."""
    scope: dict[str, Any] = {"__name__": "made_up", "factor": 2}
    exec("def scaled(x):\n    return factor * x", scope)
    made = start()
    made.model.act = scope["scaled"]
    with pytest.warns(UserWarning, match="not kept"):
        step, _ = made.run(tmp_path)
    assert step.cache_log == ["miss: no entry", "off: scaled ran with globals of no module (made_up)"]


def test_a_node_that_is_no_op_is_not_kept(tmp_path: Path) -> None:
    def strange(local: ws.LocalGraph) -> ws.LocalGraph:
        from wholestep.graph.graph import copy_graph

        graph = copy_graph(local.graph)
        for node in graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = _my_tanh
        return replace(local, graph=graph)

    made = start()
    made.options = {"passes": strange}
    with pytest.warns(UserWarning, match=r"_my_tanh \(tests.unit.test_cache\) is no torch op"):
        made.run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def _my_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


# -- verification --------------------------------------------------------------------------------------
def test_verification_finds_what_no_key_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def reads(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        return train_step(model, optimizer, x, float(os.environ["WHOLESTEP_TEST_WEIGHT"]))

    monkeypatch.setenv("WHOLESTEP_TEST_WEIGHT", "1")
    Start(Net(), fn=reads).run(tmp_path)
    monkeypatch.setenv("WHOLESTEP_CACHE_VERIFY", "1")
    step, _ = Start(Net(), fn=reads).run(tmp_path)
    assert (step.cache_log, step.captures) == (["hit"], 1)
    monkeypatch.setenv("WHOLESTEP_TEST_WEIGHT", "2")
    with pytest.raises(ws.CacheError) as caught:
        Start(Net(), fn=reads).run(tmp_path)
    assert str(caught.value).splitlines()[0].endswith("is not what this step compiles to: other captured graph")


# -- source ------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
import torch
from torch import nn
import wholestep as ws
from helper import Worker

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.worker = Worker()
    def forward(self, x):
        return self.worker.call(self.layer(x))

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

model = Net()
step = ws.compile(train_step, cache=sys.argv[1])
loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
print(step.cache_log, step.captures, loss.item())
"""
HELPER = """
from inner import scaled

class Worker:
    def call(self, x):
        return getattr(self, "_" + "call")(x)
    def _call(self, x):
        return lookup()(x)

def lookup():
    import inner
    return getattr(inner, "sca" + "led")
"""
INNER = """
def scaled(x):
    return 1.0 * x
"""


def test_edited_source_is_seen_wherever_it_ran(tmp_path: Path) -> None:
    """In a process each: the script, a module that it imports, and one that only a look-up by name leads to."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "inner.py").write_text(INNER)

    def run() -> str:
        command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "kept")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first, second = run(), run()
    assert first.startswith("['miss: no entry'] 1 ")
    assert second == first.replace("['miss: no entry'] 1", "['hit'] 0")
    (tmp_path / "inner.py").write_text(INNER.replace("1.0", "2.0"))
    third = run()
    assert third.startswith("['miss: ")
    assert third.split()[-1] != first.split()[-1]
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "train.py").write_text(SCRIPT + "\n# a remark at the end\n")
    assert run() == second, "what did not run may change"
    (tmp_path / "train.py").write_text(SCRIPT.replace("self.worker.call(self.layer(x))", "2 * self.layer(x)"))
    assert run().startswith("['miss: module model is another one'] 1 ")


def _scaled(net: Net) -> None:
    global SCALE
    SCALE = 3.0


CHANGES_OUTSIDE: dict[str, Callable[[Net], Any]] = {
    "a field of a dataclass": lambda net: setattr(net.config, "gain", 2.0),
    "an attribute of a module of torch": lambda net: setattr(net.norm, "eps", 0.5),
    "a function": lambda net: setattr(net, "act", torch.relu),
    "a tensor": lambda net: setattr(net, "mask", torch.full((3,), 0.5)),
    "a submodule": lambda net: setattr(net, "norm", nn.Identity()),
    "a method of one object": lambda net: setattr(net.layer, "forward", lambda x: x[:, :3] * 2),
    "a global": _scaled,
}


@pytest.mark.parametrize("what", CHANGES_OUTSIDE)
def test_what_changes_after_a_hit_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0)
    x = torch.randn(5, 4)

    def start() -> tuple[Net, torch.optim.Optimizer]:
        net = Net()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    ws.compile(train_step, cache=tmp_path)(*start(), x)
    step, ours, theirs = ws.compile(train_step, cache=tmp_path), start(), start()
    torch.testing.assert_close(step(*ours, x), train_step(*theirs, x))
    assert step.cache_log == ["hit"]
    for net, _ in (ours, theirs):
        CHANGES_OUTSIDE[what](net)
    for _ in range(2):
        torch.testing.assert_close(step(*ours, x), train_step(*theirs, x))
    assert step.misses
