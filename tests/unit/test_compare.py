"""`ws.compare`: what is right is equal but for rounding; a planted fault is named, or the first op that reads it."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests import hf_plans
from tests.catalogue import CASES, OPTIMIZERS
from tests.hf_models import loss_of
from wholestep.graph import meta
from wholestep.graph.nodes import copy_graph, is_collective
from wholestep.proof.on_ranks import PlanOnRanks
from wholestep.proof.sketch import distance, places_of, sums_of

GLOBAL = ws.DataParallel("replicate", semantics="global")
PLANS: dict[str, tuple[str, Any]] = {
    "fully_shard": ("dp=2", ws.DataParallel("fully_shard")),
    "replicate": ("dp=3", GLOBAL),
    "summed": ("dp=2", ws.DataParallel("zero2", reduce="sum")),
    "cp": ("cp=2", ws.ContextParallel(axis="cp")),
    "dp x cp": ("dp=2,cp=2", [ws.DataParallel(axis="dp", semantics="global"), ws.ContextParallel(axis="cp")]),
}
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _language(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _plan(plan: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    if plan != "tp":
        return PLANS[plan]
    styles = args[0].config.base_model_tp_plan
    return "tp=2", ws.TensorParallel({f"model.{name}": style for name, style in styles.items()})


def _step(name: str) -> Step:
    """A step in single precision, and its arguments."""
    if name in CASES:
        case, recipe = CASES[name], OPTIMIZERS["SGD-momentum" if name == "tokens" else "AdamW-foreach"]
        model = case.build(torch.float32)
        return case.step, (model, recipe.make(model.parameters()), case.batches(0, torch.float32))
    model: Any = hf_plans.tiny(name).float()
    if name == "mixtral":
        model.set_experts_implementation("grouped_mm")
    return _language, (model, torch.optim.AdamW(model.parameters()), hf_plans.batch(torch.Generator().manual_seed(1)))


def _full(*parts: Any) -> Any:
    return pytest.param(*parts, marks=pytest.mark.full)


RIGHT = [
    ("convolutions", "fully_shard"), ("convolutions", "summed"), ("tokens", "replicate"), ("mixtral", "tp"),
    *(_full(n, plan) for n in CASES for plan in ("fully_shard", "replicate", "summed")),
    *(_full(n, p) for n in ("llama", "gemma3_text", "mixtral", "deepseek_v3", "olmoe") for p in (*PLANS, "tp")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), RIGHT)
def test_what_is_right_is_equal(name: str, plan: str) -> None:
    step, args = _step(name)
    before = [p.detach().clone() for p in args[0].parameters()]
    comparison = ws.compare(step, args, *_plan(plan, args))
    assert comparison.equal, comparison
    assert comparison.compared > 0.8 * comparison.tensors, comparison
    assert all(map(torch.equal, before, args[0].parameters()))
    assert not any(args[1].state.values()), "the user's optimizer has no state yet"


def _scaled(x: Tensor) -> Tensor:
    return x * 1.01


def _in_16_bits(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _flipped(x: Tensor) -> Tensor:
    return x.flip(-1).contiguous()


def _left_out(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


IN_VALUES = {"scaled": _scaled, "in 16 bits": _in_16_bits, "flipped": _flipped, "left out": _left_out}


class Fault:
    """A pass that plants a fault: in the value of an op, or in a reduction. `names`: the op, in the planned graph;
    `readers`: those that read it.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.chance, self.names, self.readers = kind, random.Random(seed), list[str](), list[str]()

    def __call__(self, local: ws.LocalGraph) -> ws.LocalGraph:
        graph = copy_graph(local.graph)
        if self.kind in IN_VALUES:
            node = self.chance.choice([n for n in graph.nodes if self._is_fit(n)])
            self.names = [name for name, _ in meta.computes(node) or ()]
            self.readers = [name for user in node.users for name, _ in meta.computes(user) or ()]
            with graph.inserting_after(node):
                new = graph.call_function(IN_VALUES[self.kind], (node,))
            node.replace_all_uses_with(new)
            new.args = (node,)
            meta.copy(node, new)
            meta.set_computes(node, None)
        else:  # "sum", or "avg", becomes "max" or the other one
            here, there = self.kind.split(" for ")
            sums = [n for n in graph.nodes if is_collective(n) and "reduce" in str(n.target) and n.args[1] == there]
            node = self.chance.choice(sums)
            node.args = (node.args[0], here, *node.args[2:])
        return replace(local, graph=graph)

    @staticmethod
    def _is_fit(node: Any) -> bool:
        tensor = meta.tensor(node) if node.op == "call_function" and meta.computes(node) else None
        exact = ("view", "empty", "ones", "zeros", "full", "expand", "getitem", "_.")  # few of these matter
        fits = (
            tensor is not None
            and not meta.rows(node)
            and tensor.dtype.is_floating_point
            and bool(tensor.shape)
            and tensor.shape[-1] > 3
        )
        return fits and not any(name in str(node.target) for name in exact)


PLANTED = [
    ("llama", "scaled", "cp"),
    ("convolutions", "in 16 bits", "fully_shard"), ("convolutions", "sum for avg", "fully_shard"),
    ("tokens", "left out", "replicate"), ("tokens", "max for sum", "replicate"),
    ("tokens", "max for avg", "fully_shard"), ("llama", "flipped", "replicate"),
    *(
        _full(name, kind, plan)
        for name in ("llama", "gemma3_text", "mixtral", "convolutions", "tokens", "uneven")
        for kind in (*IN_VALUES, "max for avg", "avg for sum")
        for plan in (("fully_shard",) if kind == "max for avg" else ("replicate",))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "plan"), PLANTED)
def test_a_planted_fault_is_named(name: str, kind: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op itself, or its first reader where it is not compared: a rank may have other rows than its layout says."""
    step, args = _step(name)
    fault, compared = Fault(kind, seed=len(name) + len(kind)), set[str]()
    call = PlanOnRanks.call

    def seen(*given: Any) -> Any:
        distances = call(*given)
        compared.update(op for op, _ in distances)
        return distances

    monkeypatch.setattr(PlanOnRanks, "call", seen)
    comparison = ws.compare(step, args, *PLANS[plan], passes=(*ws.default_passes(), fault))
    assert not comparison.equal, f"{fault.names} of {comparison}"
    first = comparison.parted[0]
    assert first.difference > 8 * first.rounding
    expected = fault.names if compared.intersection(fault.names) else fault.readers
    assert not fault.names or first.name in expected, comparison
    assert first.line in str(comparison)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(30, 16), nn.Linear(16, 48), nn.Linear(16, 30)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.words(x)
        q, k, v = self.qkv(h).split(16, -1)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mask = mask.T if self.fault == "a transposed mask" else mask
        scores = q @ k.transpose(1, 2) / (16 if self.fault == "a wrong scale" else 4)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        weights = weights.bfloat16().float() if self.fault == "bfloat16" else weights
        h = h + self.drop(weights @ v)
        h = h + torch.rand_like(h) * 0 if self.fault == "other random numbers" else h
        flat = h.flatten(0, 1)
        if self.fault == "a stale buffer":
            h = F.batch_norm(flat, None, None, self.norm.weight, self.norm.bias, training=True).view_as(h)
        else:
            h = self.norm(flat).view_as(h)
        return self.out(self.drop(h.detach() if self.fault == "a lost gradient" else h))


def _train(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    reduction = "sum" if model.fault == "a summed loss" else "mean"
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0 if model.fault == "another norm" else 0.1)
    optimizer.step()
    return loss.detach()


def _with(fault: str) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.fault, before = fault, model.fault
        loss = _train(model, optimizer, x, y)
        model.fault = before
        return loss

    return train_step


EDITED = {  # where it is seen first
    "": "", "a wrong scale": "/ (16 if", "a transposed mask": "masked_fill", "bfloat16": "weights @ v",
    "other random numbers": "self.drop", "a stale buffer": "norm.running_mean", "a summed loss": "cross_entropy",
    "another norm": "clip_grad_norm_", "a lost gradient": "words.weight  update  in",
}  # fmt: skip


def _net() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randint(30, (4, 6)), torch.randint(30, (4, 6))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of the step without a fault."""
    path = str(tmp_path_factory.mktemp("records") / "before.json")
    ws.compare(_with(""), _net()).save(path)
    return path


@pytest.mark.parametrize("fault", EDITED)
def test_an_edited_step_is_compared_with_a_file_of_the_other(fault: str, before: str) -> None:
    comparison = ws.compare(_with(fault), _net(), against=before, calls=1 if fault else 2)
    assert comparison.equal == (not fault), comparison
    assert not fault or any(EDITED[fault] in str(parted) for parted in comparison.parted), comparison


def test_an_edited_step_is_compared_with_the_other() -> None:
    comparison = ws.compare(_with("bfloat16"), _net(), against=_with(""), calls=1)
    assert "train_step" in comparison.title
    assert "weights @ v" in comparison.parted[0].line


class Attention(nn.Module):
    """Calls a kernel of attention, which torch counts among the random ops whatever its dropout is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(30, 16), nn.Linear(16, 48), nn.Linear(16, 30)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(self.words(x)).split(16, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.drop(heads.transpose(1, 2).flatten(2)))


def _attend(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def _attention() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Attention()
    return model, torch.optim.AdamW(model.parameters()), torch.randint(30, (4, 8)), torch.randint(30, (4, 8))


def _exchanged(local: ws.LocalGraph) -> ws.LocalGraph:
    graph = copy_graph(local.graph)
    for node in graph.nodes:
        if "scaled_dot_product" in node.name and "backward" not in node.name and len(node.args) > 3:
            node.args = (node.args[1], node.args[0], *node.args[2:])
    return replace(local, graph=graph)


ATTENTION: list[tuple[str, Any]] = [
    ("dp=2", GLOBAL),
    ("cp=2", ws.ContextParallel(axis="cp", method="ring")),
    ("cp=2", ws.ContextParallel(axis="cp", method="gather", balance=True)),
    ("dp=2", [ws.DataParallel(axis="dp"), ws.MicroBatches(2)]),
]


@pytest.mark.parametrize(("mesh", "parallel"), ATTENTION, ids=["dp", "ring", "balanced", "micro-batches"])
def test_kernels_of_attention_are_compared(mesh: str, parallel: Any) -> None:
    stream = torch.get_rng_state()
    comparison = ws.compare(_attend, _attention(), mesh, parallel)
    assert comparison.equal, comparison
    assert comparison.compared > 0.6 * comparison.tensors, comparison  # loops of micro-batches are not
    if parallel is GLOBAL:
        torch.set_rng_state(stream)
        args = _attention()
        before = torch.get_rng_state()
        comparison = ws.compare(_attend, args, mesh, parallel, passes=(*ws.default_passes(), _exchanged))
        assert "scaled_dot_product" in comparison.parted[0].op, comparison
        assert torch.equal(before, torch.get_rng_state()), "random numbers go on as before"


class Buffers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 4), kind
        for name in ("first", "second"):
            self.register_buffer(name, torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        low, high = h.tanh().detach(), h.exp().detach()
        self.first.copy_(high if self.kind == "exchanged" else low)  # type: ignore[operator]
        self.second.copy_(low if self.kind == "exchanged" else high)  # type: ignore[operator]
        return h.sigmoid() if self.kind == "another result" else h.softmax(-1)


@pytest.mark.parametrize("kind", ["", "exchanged", "another result"])
def test_what_a_call_leaves_and_returns_is_compared(kind: str) -> None:
    """No op differs where buffers take each other's values; the last op has no partner where it is another one."""

    def evaluate(model: Any, x: Tensor) -> Tensor:
        model.kind, before = kind, model.kind
        result = model(x)
        model.kind = before
        return result

    def plain(model: Any, x: Tensor) -> Tensor:
        return model(x)

    comparison = ws.compare(evaluate, (Buffers(""), torch.randn(3, 6)), against=plain, calls=1)
    names = [parted.module for parted in comparison.parted]
    assert names == {"": [], "exchanged": ["first", "second"], "another result": ["0"]}[kind], comparison


@pytest.mark.parametrize("semantics", ["per_rank", "global"])
def test_values_that_are_not_finite_are_those_of_ranks(semantics: Any) -> None:
    step, (model, optimizer, batch) = _step("tokens")
    with torch.no_grad():
        next(iter(model.parameters()))[0].fill_(float("nan"))
    comparison = ws.compare(step, (model, optimizer, batch), "dp=2", ws.DataParallel("replicate", semantics=semantics))
    assert comparison.equal, comparison


def test_parts_add_up_to_the_tensor() -> None:
    mesh, shape = ws.Mesh("dp=2,tp=3"), (7, 6, 4)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    value[3, 2, 1], value[0, 0, 0] = float("nan"), float("-inf")
    layout = ws.Layout((("dp",), ("tp",), ()), blocks=(("tp", 2),))
    total = torch.zeros(16, dtype=torch.float64)
    for rank in range(6):
        at = mesh.coordinate(rank)
        places = places_of(layout, shape, mesh, at)
        index = [torch.arange(n) if p is None else p for n, p in zip(shape, places, strict=True)]
        total += sums_of(value[torch.meshgrid(*index, indexing="ij")], shape, places)
    assert torch.allclose(total, sums_of(value))
    other = value + torch.randn(shape, generator=torch.Generator().manual_seed(1))
    apart = (value - other)[value.isfinite()].norm().item()
    assert distance(sums_of(value), sums_of(other)) == pytest.approx(apart, rel=0.7)
    other[6, 5, 3] = float("inf")
    assert distance(sums_of(value), sums_of(other)) == float("inf")


def test_what_cannot_be_compared_is_refused(tmp_path: Any) -> None:
    step, args = _step("tokens")
    with pytest.raises(ws.PlanError, match="without a mesh"):
        ws.compare(step, args, parallel=GLOBAL)
    with pytest.raises(ws.PlanError, match="batches= has 2 entries"):
        ws.compare(step, args, "dp=2", batches=[args, args])
    with pytest.raises(ws.PlanError, match="other tensors than args"):
        ws.compare(step, args, "dp=2", batches=[args[:2]])
    with pytest.raises(ws.PlanError, match="calls=0"):
        ws.compare(step, args, calls=0)
    with pytest.raises(ws.PlanError, match="the function itself"):
        ws.compare(ws.compile(step), args)
    with pytest.raises(ws.PlanError, match="save one without a mesh"):
        ws.compare(step, args, "dp=2", calls=1).save(str(tmp_path / "plan.json"))
    with pytest.raises(ws.PlanError, match="stages"):
        ws.compare(step, args, "pp=2", ws.Pipeline(micro_batches=2))
    path = tmp_path / "record.json"
    with pytest.raises(ws.PlanError, match="a file that"):
        ws.compare(step, args, against=str(path))
    ws.compare(step, args, calls=1).save(str(path))
    record = json.loads(path.read_text())
    record["calls"][0][0]["sums"] = [[0.0]]
    path.write_text(json.dumps(record))
    with pytest.raises(ws.PlanError, match="is damaged"):
        ws.compare(step, args, against=str(path))
