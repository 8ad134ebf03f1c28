"""The compile cache in one process: a second start of a step measures and searches nothing, any change does again."""

import json
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import wholestep as ws
from tests.backends import Interpreted
from tests.steps import mean_square as train_step
from wholestep.cache import key as cache_key
from wholestep.cache import step_cache as files
from wholestep.cache.key import Key, UnknownValueError, digest, text_of
from wholestep.cache.step_cache import DamagedError, KeptChoices, StepCache
from wholestep.distributed.launch import World
from wholestep.distributed.rendezvous import Rendezvous
from wholestep.graph.graph import LocalGraph
from wholestep.graph.nodes import copy_graph
from wholestep.hardware.curves import CollectiveCost
from wholestep.passes import fit_memory, saved_values
from wholestep.plan.decision import Objective
from wholestep.plan.strategies import Strategies
from wholestep.plan.strategy import Pins
from wholestep.plan.tensor_parallel import SolvedLayouts
from wholestep.runtime import choose_strategy, finalize

MEASURED = ws.Hardware.measured(flops_per_us=50_000.0, launch_us=7.25)
BUDGET = 52_000  # bytes; the steps below take 58,900 where nothing is made again


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.GELU())]
        self.layers, self.power = nn.Sequential(*layers, nn.Linear(16, 4)), 2
        self.mask = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.mask) ** self.power


@dataclass
class Start:
    """What a process begins with; changes are made to it before its first step."""

    model: Net = field(default_factory=Net)
    fn: Callable[..., torch.Tensor] = train_step
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, Any] = field(default_factory=lambda: {"memory_bytes": BUDGET})
    rows: Sequence[int] = (128,)

    def run(self, folder: Path | str) -> tuple[ws.CompiledStep, list[float]]:
        """A step for each of `rows`."""
        optimizer = self.optimizer(self.model.parameters(), **self.numbers)
        step = ws.compile(self.fn, cache=folder, **self.options)
        inputs = [torch.randn(n, 16, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(self.rows)]
        return step, [step(self.model, optimizer, x).item() for x in inputs]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalize, "measure_hardware", lambda world, stages: MEASURED)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("original")


@pytest.fixture
def kept(tmp_path: Path, original: Path) -> Path:
    """A folder with the entry of `Start()`: a copy of the one that the first of these tests makes."""
    if not any(original.iterdir()):
        step, _ = Start().run(original)
        assert step.cache_log == ["miss: no entry"]
        assert len(list(original.iterdir())) == 1
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


@lru_cache(maxsize=1)
def usual_losses() -> list[float]:
    """Of `Start()`, without a cache."""
    return Start().run("")[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {"memory_bytes": BUDGET},
    "budget without a schedule": {"memory_bytes": BUDGET, "schedule": None},
    "Auto": {"parallel": ws.Auto()},
    "Auto with a budget": {"parallel": ws.Auto(BUDGET)},
}


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name.endswith("budget") else pytest.mark.full) for name in OPTIONS]
)
def test_a_second_start_measures_and_searches_nothing(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [replace(Start(), model=Net(), options=OPTIONS[options]) for _ in range(3)]
    without, losses = made[0].run("")
    cold, first = made[1].run(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("measured or searched")

    for where, name in ((finalize, "measure_hardware"), (saved_values, "choices"), (choose_strategy, "_chosen")):
        monkeypatch.setattr(where, name, refuse)
    warm, second = made[2].run(tmp_path)
    assert (without.cache_log, cold.cache_log, warm.cache_log) == ([], ["miss: no entry"], ["hit"])
    assert losses == first == second
    assert str(without.local_graph) == str(cold.local_graph) == str(warm.local_graph)
    assert cold.plan == warm.plan
    assert str(cold.plan) == str(warm.plan)
    assert [p.tolist() for p in made[1].model.parameters()] == [p.tolist() for p in made[2].model.parameters()]


def test_values_are_made_again_as_before(kept: Path) -> None:
    """The tests of this file fit a step that would not fit by itself."""
    (file,) = kept.iterdir()
    assert len(json.loads(file.read_text())["choices"]["memory"][1]["names"]) > 5
    step, _ = Start().run(kept)
    assert step.local_graph is not None
    assert ws.peak_memory(step.local_graph).size_bytes <= BUDGET


@pytest.mark.smoke
def test_a_step_that_chooses_nothing_keeps_nothing(tmp_path: Path) -> None:
    step, _ = Start(options={"parallel": ws.DataParallel("replicate")}).run(tmp_path)
    assert step.cache_log == ["nothing to choose"]
    assert not list(tmp_path.iterdir())


# -- what is another step ----------------------------------------------------------------------------------------------
def _scaled(by: float) -> Callable[..., torch.Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        return train_step(model, optimizer, by * x)

    return step


def _frozen(s: Start) -> None:
    s.model.layers[0].bias.requires_grad_(False)


def _with(**options: Any) -> Callable[[Start], None]:
    return lambda s: s.options.update(options)


CHANGES: dict[str, tuple[Callable[[Start], Any], str]] = {
    "attribute": (lambda s: setattr(s.model, "power", 3), "captured graph"),
    "attribute of a submodule": (lambda s: setattr(s.model.layers[1], "approximate", "tanh"), "captured graph"),
    "constant": (lambda s: s.model.mask.mul_(2), "constants"),
    "mode": (lambda s: s.model.eval(), ""),
    "frozen": (_frozen, "captured graph"),
    "batch size": (lambda s: setattr(s, "rows", (112,)), "captured graph"),
    "closure": (lambda s: setattr(s, "fn", _scaled(2.0)), "captured graph"),
    "optimizer": (lambda s: setattr(s, "optimizer", torch.optim.RMSprop), "captured graph"),
    "option of the optimizer": (lambda s: s.numbers.update(weight_decay=0.5), "captured graph"),
    "learning rate": (lambda s: s.numbers.update(lr=0.5), ""),
    "weights": (lambda s: s.model.layers[0].weight.data.mul_(2), ""),
    "style": (_with(parallel=ws.DataParallel("zero1")), "option parallel"),
    "budget": (_with(memory_bytes=BUDGET + 1), "option memory_bytes"),
    "schedule": (_with(schedule=None), "option schedule"),
    "backend": (_with(backend=Interpreted()), "option backend"),
    "size of a bucket": (_with(schedule=ws.Schedule(bucket_bytes=1 << 20)), "option schedule"),
    "gradients kept": (_with(keep_grads=True), "captured graph"),
    "name of the axis": (_with(mesh="data=1"), "mesh"),
    "axes": (_with(mesh="dp=1,tp=1", parallel=ws.DataParallel(axis="dp")), "mesh and option parallel"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(kept: Path, change: str) -> None:
    made, (alter, why) = [Start() for _ in range(2)], CHANGES[change]
    for one in made:
        alter(one)
    (step, losses), (_, expected) = (one.run(where) for one, where in zip(made, (kept, ""), strict=True))
    assert step.cache_log == ([f"miss: other {why}"] if why else ["hit"])
    assert losses == expected


@pytest.mark.parametrize("change", ["attribute", pytest.param("axes", marks=pytest.mark.full)])
def test_a_changed_step_has_an_entry_beside_the_first_one(kept: Path, change: str) -> None:
    for said in (f"miss: other {CHANGES[change][1]}", "hit"):
        made = Start()
        CHANGES[change][0](made)
        assert made.run(kept)[0].cache_log == [said]
    assert Start().run(kept)[0].cache_log == ["hit"]


def test_another_version_or_machine_is_named(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9")
        assert Start().run(kept)[0].cache_log == ["miss: other versions"]
    with monkeypatch.context() as other:
        other.setattr(cache_key, "own_source", lambda: "other")
        assert Start().run(kept)[0].cache_log == ["miss: other versions"]
    monkeypatch.setattr("os.cpu_count", lambda: 999)
    assert Start().run(kept)[0].cache_log == ["miss: other hardware"]


def test_what_is_made_again_in_another_program_is_chosen_anew(kept: Path) -> None:
    """A function that changes the program is not part of the key."""

    def renamed(local: LocalGraph) -> LocalGraph:
        made = replace(local, graph=copy_graph(local.graph))
        for node in [n for n in made.graph.nodes if n.op == "call_function"]:
            node._rename(f"my_{node.name}")
        return made

    made = [Start(options={"memory_bytes": BUDGET, "passes": lambda passes: [renamed, *passes]}) for _ in range(3)]
    runs = [one.run(where) for one, where in zip(made, ("", kept, kept), strict=True)]
    assert runs[1][0].cache_log == ["hit", "miss: what it rematerializes was chosen for another program"]
    assert runs[2][0].cache_log == ["hit"]
    assert runs[0][1] == runs[1][1] == runs[2][1]
    assert str(runs[0][0].local_graph) == str(runs[1][0].local_graph) == str(runs[2][0].local_graph)


# -- steps with effects ------------------------------------------------------------------------------------------------
class Trainer:
    """A step with a counter, a running average, a number that it reads, and callbacks."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps, self.average, self.log, self.scale = 0, 0.0, list[Any](), 1.0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.scale * train_step(self.model, self.optimizer, x)
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * loss
        ws.callback(lambda n, found: self.log.append((n, float(found))), self.steps, loss)
        return loss


def test_effects_are_done_and_changes_are_seen_after_a_hit(tmp_path: Path) -> None:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
    found: list[Any] = []
    for _ in range(2):
        trainer, twin = Trainer(), Trainer()
        step = ws.compile(trainer.step, memory_bytes=BUDGET, cache=tmp_path)
        for number in range(5):
            trainer.scale = twin.scale = 1.0 if number < 3 else 3.0
            torch.testing.assert_close(step(x), twin.step(x))
        assert trainer.steps == 5
        torch.testing.assert_close(trainer.average, twin.average)
        assert [n for n, _ in trainer.log] == [1, 2, 3, 4, 5]
        found.append((step.cache_log, trainer.log, step.captures))
    assert [log[0] for log, *_ in found] == ["miss: no entry", "hit"]
    assert found[0][1:] == found[1][1:]


# -- files -------------------------------------------------------------------------------------------------------------
def _signed(entry: dict[str, Any]) -> str:
    """The entry with the checksum of what it says."""
    body = {name: entry[name] for name in ("key", "choices")}
    return json.dumps({**entry, "sum": digest([json.dumps(body, sort_keys=True)])})


def _changed(*path: str, to: Any) -> Callable[[str], str]:
    """The entry with another value at `path`, and a checksum that fits."""

    def change(text: str) -> str:
        entry = json.loads(text)
        inner = entry
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = to
        return _signed(entry)

    return change


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "cut short": (lambda text: text[:-50], "is no JSON"),
    "empty": (lambda text: "", "is no JSON"),
    "a number": (lambda text: text.replace("7.25", "8.25"), "was changed"),
    "other JSON": (lambda text: "[1, 2]", "is no entry of wholestep's compile cache"),
    "another version": (_changed("version", to=0), "is of another version"),
    "another key": (_changed("key", "mesh", to="?"), "is the entry of another key"),
    "no hardware": (_changed("choices", "hardware", to=["", {"speed": 1}]), "cannot be read (unknown field hardware."),
    "a class": (_changed("choices", "memory", to=[{"is": "os.system"}]), "cannot be read (choices['memory'] is"),
    "no names": (_changed("choices", to=[]), "cannot be read (choices is []"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_named_and_written_again(kept: Path, damage: str) -> None:
    (file,) = kept.iterdir()
    whole, (harm, said) = file.read_text(), DAMAGE[damage]
    file.write_text(harm(whole))
    assert file.read_text() != whole
    with pytest.warns(UserWarning, match="compile cache") as caught:
        step, losses = Start().run(kept)
    (warning,) = (str(w.message) for w in caught if "compile cache" in str(w.message))
    assert warning.startswith(f"compile cache: {file} {said}")
    assert warning.endswith(": it is not used, and written again")
    assert step.cache_log == ["hit"] * (damage == "no hardware") + ["miss: the entry cannot be read"]
    assert losses == usual_losses()
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left"):
        _, losses = Start().run(tmp_path)
    assert losses
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ws.CacheError) as caught:
        ws.compile(train_step, cache=tmp_path / "file")
    assert str(caught.value).splitlines()[0] == f"cache='{tmp_path}/file' is a file"


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "deep" / "folder"))
    assert Start().run("")[0].cache_log == []
    for said in ("miss: no entry", "hit"):
        model, step = Net(), ws.compile(train_step, memory_bytes=BUDGET)
        step(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(128, 16))
        assert step.cache_log == [said]


def test_entries_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for number in range(5):
        files.write(tmp_path, Key.of({"number": number}), {})
    assert len(list(tmp_path.iterdir())) == 3


def test_an_entry_is_what_was_written(tmp_path: Path) -> None:
    solved = Strategies(
        (SolvedLayouts("tp", {}, Pins(decomposed=("mm",)), "said"), ws.DataParallel("zero1", axis="dp"))
    )
    hardware = ws.Hardware.measured(
        collectives=(CollectiveCost("all_reduce", 0.1, 1 / 3, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),)
    )
    text = choose_strategy.text_of(solved, solved)
    auto = choose_strategy.AutoChoice(Objective(0.1, 0.05, 1000, 2000, ("gelu:0",)), text, notes=("a note",))
    fitting, key = fit_memory.Fitting(1, ("gelu:0",)), Key.of({"mesh": "dp=2,tp=2"})

    def kept() -> KeptChoices:
        cache = StepCache(tmp_path, lambda *_: None)
        return KeptChoices(Rendezvous(None, 0, 1, 1.0), cache, lambda: {"mesh": "dp=2,tp=2"}, "first")

    cold = kept()
    assert cold.of(finalize.HARDWARE) is None
    cold.note(finalize.HARDWARE, hardware)
    cold.note(choose_strategy.AUTO, auto)
    cold.note(fit_memory.FITTING, fitting, "of this program")
    cold.store()
    warm = kept()
    assert warm.of(finalize.HARDWARE) == hardware
    assert warm.of(choose_strategy.AUTO) == auto
    assert choose_strategy.strategies_in(auto.strategies, solved) == solved
    assert warm.of(fit_memory.FITTING, "of another program") is None
    assert warm.of(fit_memory.FITTING, "of this program") == fitting
    assert files.read(tmp_path, key) == cold.now
    assert files.read(tmp_path, Key.of({"mesh": "dp=4"})) is None
    files.path_of(tmp_path, key).write_bytes(b"\xff\x00")
    with pytest.raises(DamagedError, match="is no JSON"):
        files.read(tmp_path, key)


# -- options that have no text -----------------------------------------------------------------------------------------
def my_style(given: Any, layout: ws.Layout, mesh: ws.Mesh, axes: tuple[str, ...]) -> tuple[ws.Layout, ws.Layout]:
    """A style of somebody's own."""
    return layout, layout


def test_a_step_with_an_option_without_a_text_is_not_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory_bytes": BUDGET, "parallel": ws.DataParallel(my_style)}
    with pytest.warns(
        UserWarning, match=r"nothing of this step is kept in the compile cache: option parallel\.parts\[0\]\.style is"
    ):
        step, losses = Start(options=options).run(tmp_path)
    assert step.cache_log == ["off: option parallel.parts[0].style is a builtins.function"]
    assert not list(tmp_path.iterdir())
    assert losses == Start(options=options).run("")[1]


def test_values_as_text() -> None:
    tensor = ws.TensorParallel({"a": ColwiseParallel(), "b": RowwiseParallel(output_layouts=Shard(0)), "c": "sequence"})
    again = ws.TensorParallel({"a": ColwiseParallel(), "b": RowwiseParallel(output_layouts=Shard(0)), "c": "sequence"})
    assert text_of("it", tensor) == text_of("it", again)
    other = ws.TensorParallel({"a": ColwiseParallel(), "b": RowwiseParallel(output_layouts=Shard(1)), "c": "sequence"})
    assert text_of("it", tensor) != text_of("it", other)
    assert text_of("it", {"a": {1}, "b": (None, torch.float32)}) == "{'a': set ['1'], 'b': [None, torch.float32]}"
    assert text_of("it", [Shard(1), Replicate()]) == "[Shard(dim=1), Replicate()]"
    with pytest.raises(UnknownValueError, match=r"^it\['a'\]\[1\] is a builtins.function$"):
        text_of("it", {"a": [0, lambda: 0]})


# -- processes ---------------------------------------------------------------------------------------------------------
SCRIPT = """
import hashlib, sys
import torch
from torch import nn
import wholestep as ws

def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.GELU())], nn.Linear(16, 4))
step = ws.compile(train_step, memory_bytes=52_000, cache=sys.argv[1])
loss = step(model, torch.optim.AdamW(model.parameters()), torch.ones(128, 16))
print(step.cache_log, loss.item().hex(), hashlib.sha256(str(step.local_graph).encode()).hexdigest())
"""


def test_a_second_process_measures_nothing_and_runs_the_same_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one is this: the second has another seed for hashes, and would measure other speeds."""
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [str(tmp_path / "train.py"), str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    first = capsys.readouterr().out.strip()
    second = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 0, second.stderr
    assert first.startswith("['miss: no entry'] ")
    assert second.stdout.strip() == first.replace("miss: no entry", "hit")


def test_warnings_come_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory_bytes": BUDGET, "parallel": ws.DataParallel(my_style)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Start(options=options, rows=(128, 96, 112)).run(tmp_path)
    assert sum("compile cache" in str(w.message) for w in caught) == 1


def test_the_world_is_not_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[World] = []
    monkeypatch.setattr(finalize, "measure_hardware", lambda world, stages: asked.append(world) or MEASURED)
    Start(rows=(128, 96), options={"memory_bytes": BUDGET, "schedule": None}).run("")
    assert len(asked) == 1
