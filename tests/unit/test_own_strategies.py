"""A strategy and an order of stages of somebody's own, by public names alone."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from tests.together import OneDevice, compare
from wholestep.cost.stage_orders import NAMED
from wholestep.partition.stage_program import orders_in


@dataclass(frozen=True)
class SharedTokens(ws.Strategy):
    """Ranks of an axis share the tokens of each sequence, and, if `stores`, the parameters."""

    axis: str = "seq"
    stores: bool = False

    def axes(self, mesh: ws.Mesh) -> tuple[str, ...]:
        mesh.axis_size(self.axis)
        return (self.axis,)

    def storage_layouts(
        self, graph: ws.TrainGraph, mesh: ws.Mesh, before: Mapping[str, ws.Stored]
    ) -> dict[str, ws.Stored]:
        rows = ws.AxisState("S", 0)
        parts = {n: ws.Stored(s.param.put(self.axis, rows), s.state.put(self.axis, rows)) for n, s in before.items()}
        return parts if self.stores else dict(before)

    def storage_axes(self, mesh: ws.Mesh) -> tuple[str, ...]:
        return (self.axis,) if self.stores else ()

    def batch_cut(self, mesh: ws.Mesh, name: str, ndim: int) -> ws.BatchCut | None:
        return ws.BatchCut(1, (self.axis,)) if ndim > 1 else None

    def describe(self, mesh: ws.Mesh) -> str:
        return f"tokens on {self.axis}"


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unsqueeze(1) for y in self.qkv(self.embed(tokens)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def read(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("mesh", ["seq=3", "dp=2,seq=2"])
def test_a_strategy_from_outside_computes_what_one_device_does(mesh: str, stores: bool) -> None:
    model = Reader().double()
    tokens, labels = torch.randint(11, (2, 4, 7))
    own = SharedTokens(stores=stores)
    strategies = [ws.DataParallel("zero1", axis="dp", semantics="global"), own] if "dp" in mesh else [own]
    args = model, torch.optim.AdamW(model.parameters()), tokens, labels
    comparison = ws.compare(read, args, parallel=strategies, mesh=mesh)
    assert comparison.equal, comparison
    graph = ws.capture(read, *args)
    plan = ws.plan(graph, mesh, strategies)
    assert plan.repeated == (), "each rank computes its tokens alone"
    axes = ("seq",) * stores + ("dp",) * ("dp" in mesh)  # data parallelism shards what the others leave
    assert {plan.storage[name].dims[0] for name in ("out.weight/exp_avg", "qkv.bias/exp_avg_sq")} == {axes}


def test_what_strategies_before_say_stays() -> None:
    """Stages own parameters, of which ranks of the other axis have rows."""
    graph = ws.capture(read, model := Reader(), torch.optim.SGD(model.parameters()), *torch.randint(11, (2, 4, 6)))
    for strategies in ([ws.Pipeline(), SharedTokens(stores=True)], [SharedTokens(stores=True), ws.Pipeline()]):
        plan = ws.plan(graph, "pp=2,seq=2", strategies)
        assert plan.storage["out.weight"].dims == (("seq",), ())
        assert plan.owners["out.weight"] == 1
        assert ws.stage_program(ws.partition(graph, plan), 1).collectives()


def test_it_is_chosen_beside_micro_batches_and_kept_in_the_compile_cache(tmp_path: Path) -> None:
    strategies = [ws.DataParallel("zero1", axis="dp"), ws.MicroBatches("auto"), SharedTokens()]
    logs = list[list[str]]()
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        step = ws.compile(mean_square, mesh="dp=1,seq=1", parallel=strategies, memory_bytes="1MiB", cache=tmp_path)
        step(model, torch.optim.AdamW(model.parameters()), torch.ones(512, 64))
        assert step.plan.mesh.pieces > 1
        logs.append(step.cache_log)
    assert logs == [["miss: no entry"], ["hit"]]


def test_a_plan_file_asks_for_it(tmp_path: Path) -> None:
    model = Reader()
    args = model, torch.optim.SGD(model.parameters()), *torch.randint(11, (2, 2, 6))
    ws.plan(ws.capture(read, *args), "seq=1", SharedTokens()).save(tmp_path / "plan.json")
    with pytest.raises(ws.PlanError, match="strateg"):
        ws.compile(read, mesh="seq=1", parallel=ws.Plan.load(tmp_path / "plan.json"))


ROWS = ws.Layout((("b",), ()))
LIES: dict[str, tuple[str, Any, str]] = {
    "axes: a text": ("axes", "a", "says 'a'\n  needed: a tuple of names of axes"),
    "axes: none of the mesh": ("axes", ("zz",), "has no axis 'zz'"),
    "describe": ("describe", None, "says None\n  needed: a value of type str"),
    "a dim that is none": (
        "batch_cut",
        ws.BatchCut(2, ("a",)),
        "dim=2, .*a BatchCut with one of the 2 dims of",
    ),
    "a cut that is none": ("batch_cut", (0, ("a",)), "needed: a BatchCut"),
    "an axis of another": ("batch_cut", ws.BatchCut(0, ("b",)), "says 'b'\n  needed: its own axes, a"),
    "no parameters": ("storage_layouts", {}, "one entry for each parameter"),
    "layouts of one": ("storage_layouts", {"0.weight": ROWS}, "needed: a value of type"),
    "stored along another": ("storage_layouts", {"weight": ws.Stored(ROWS, ROWS)}, "says 'b'\n  needed: its own axes"),
    "gathered along another": ("storage_axes", ("b",), "says 'b'\n  needed: its own axes"),
    "no pins": ("pins", None, "needed: a value of type Pins"),
    "a node that is none": (
        "pins",
        ws.Pins({"nothing": {"a": ws.AxisState("S", 0)}}),
        "says 'nothing'",
    ),
    "a node's dim": ("pins", ws.Pins({"mm": {"a": ws.AxisState("S", 9)}}), r"S\(9\) of %mm'.*one of its 2 dims"),
    "a node's axis": ("pins", ws.Pins({"mm": {"c": ws.AxisState("S", 0)}}), "has no axis 'c'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_is_refused_with_the_method(lie: str) -> None:
    method, answer, text = LIES[lie]
    answers = {"axes": ("a",), "describe": "of mine"} | {method: answer}
    methods = {name: lambda self, *args, value=value: value for name, value in answers.items()}
    strategy = type("Mine", (ws.Strategy,), methods)()
    model = nn.Linear(4, 4, bias=False)
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters()), torch.randn(4, 4))
    with pytest.raises((ws.PlanError, ws.MeshError)) as error:
        ws.plan(graph, "a=2,b=2", strategy)
    assert re.search(text, str(error.value), re.DOTALL), error.value
    assert "has no axis" in text or f"Mine.{method}" in str(error.value)


# -- orders ------------------------------------------------------------------------------------------------------------
Tasks = list[list[tuple[str, int]]]


def two_ahead(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Tasks:
    """Two micro-batches forward in front of the first backward."""
    orders: Tasks = []
    for stage in range(stages):
        names = sorted((n for n in blocks if blocks[n].stage == stage), key=lambda n: blocks[n].level)
        tasks: list[tuple[str, int]] = []
        for i in range(micro_batches + 1):
            tasks += [(n, i) for n in names if not blocks[n].is_backward and i < micro_batches]
            tasks += [(n, i - 1) for n in names if blocks[n].is_backward and i > 0]
        orders.append(tasks)
    return orders


def without_the_last(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Tasks:
    return [tasks[:-1] for tasks in two_ahead(blocks, micro_batches, stages)]


def twice(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Tasks:
    return [[*tasks[:-1], tasks[0]] for tasks in two_ahead(blocks, micro_batches, stages)]


def backwards_first(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Tasks:
    return [tasks[::-1] for tasks in two_ahead(blocks, micro_batches, stages)]


def of_one_stage(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Tasks:
    return two_ahead(blocks, micro_batches, stages)[:1]


def of_names(blocks: Mapping[str, Any], micro_batches: int, stages: int) -> Any:
    return [list(blocks)] * stages


@pytest.fixture
def registered() -> Iterator[None]:
    with patch.dict(NAMED):
        for order in (two_ahead, without_the_last, twice, backwards_first, of_one_stage, of_names):
            ws.stage_order(order.__name__)(order)
        yield


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).double()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("registered")
def test_an_order_from_outside_is_the_order_that_stages_run() -> None:
    pipeline, batches = ws.Pipeline(micro_batches=4, schedule="two_ahead"), torch.randn(2, 8, 8, dtype=torch.float64)
    difference = compare(OneDevice(made, mean_square, [(x,) for x in batches]), "pp=2", pipeline)
    assert difference.worst < 1e-12, f"{difference.where} differs by {difference.worst:.1e}"
    graph = ws.capture(mean_square, *made(), batches[0])
    plan = ws.plan(graph, "pp=2", pipeline)
    (parts,) = orders_in(ws.partition(graph, plan))
    assert parts.order == "two_ahead"
    assert [i for _, i in parts.tasks[0]] == [0, 1, 0, 2, 1, 3, 2, 3]
    plan_again = ws.Plan.from_json(plan.to_json())
    assert plan_again.strategies == plan.strategies


WRONG = {
    "without_the_last": "stage 0 has 7 tasks",
    "twice": "missing or too often",
    "backwards_first": "waits for ever in front of",
    "of_one_stage": "stage 1 has 0 tasks",
    "of_names": "needed: the tasks of each stage",
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", WRONG)
def test_an_order_that_loses_a_task_or_never_ends_is_refused(name: str) -> None:
    graph = ws.capture(mean_square, *made(), torch.randn(8, 8, dtype=torch.float64))
    with pytest.raises(ws.PlanError, match=WRONG[name]) as error:
        ws.partition(graph, ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=4, schedule=name)))
    assert name in str(error.value)


def test_names_of_orders() -> None:
    with pytest.raises(ws.PlanError, match="register it with"):
        ws.Pipeline(schedule="mine")
    for name in ("1f1b", "auto"):
        with pytest.raises(ws.PlanError, match="rename it"):
            ws.stage_order(name)
