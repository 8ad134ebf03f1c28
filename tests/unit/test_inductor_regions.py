"""How a graph is cut for Inductor: equal layers share a function, and aliases do not cross."""

import operator
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import wholestep as ws
from wholestep.backend.eager import eager
from wholestep.backend.inductor import inductor_backend as backend
from wholestep.backend.inductor.aliases import without_aliases
from wholestep.backend.inductor.regions import CompiledRegions, Repeat, find_repeats, in_regions
from wholestep.graph import meta

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("labels", "least", "expected"),
    [
        ("abcdefgh" * 3, 4, [Repeat(0, 24, 8)]),
        ("xy" + "abcdefgh" * 3 + "abz", 4, [Repeat(2, 28, 8)]),  # a third of the next one belongs to it
        ("a" * 24, 6, [Repeat(0, 24, 6)]),
        ("abababXabababY" * 2, 4, [Repeat(0, 28, 14)]),  # the period that covers more
        ("abcdefgh" * 2, 9, []),  # fewer than two of the least length
        ("abcdefghijklmnop", 2, []),
        ("", 4, []),
    ],
)
def test_repeats(labels: str, least: int, expected: list[Repeat]) -> None:
    assert find_repeats(labels, least) == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """What Inductor would get; it runs as it is."""
    compiled: list[GraphModule] = []

    def compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(module)
        return module

    monkeypatch.setattr(backend, "_compile", compile)
    return compiled


def _train(layers: int, chosen: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    step = train_step if chosen is None else ws.compile(train_step, backend=chosen)
    losses = [step(model, optimizer, torch.randn(3, 8)) for _ in range(3)]
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.usual("fused")
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"foreach": True}, marks=pytest.mark.full), {"fused": True}],
    ids=["plain", "foreach", "fused"],
)
def test_equal_layers_are_compiled_once(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many regions are compiled for 16 layers as for 8; the numbers are those of eager mode."""
    compiled = _compiled(monkeypatch)
    distinct: dict[int, int] = {}
    for layers in (8, 16):
        compiled.clear()
        for mine, theirs in zip(_train(layers, "inductor", **options), _train(layers, None, **options), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        distinct[layers] = len(compiled)
    lists = any("_foreach_addcdiv" in str(n.target) for module in compiled for n in module.graph.nodes)
    assert lists == ("foreach" in options)
    assert distinct[8] == distinct[16] <= 12
    assert not any("_fused_adamw" in str(n.target) for module in compiled for n in module.graph.nodes)


def _graph(build: Callable[..., Sequence[Any]], given: Sequence[Tensor]) -> tuple[Graph, dict[Any, Any]]:
    """A graph that `build` writes from placeholders, and a value of each node."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(given))]
    for node, tensor in zip(inputs, given, strict=True):
        meta.set_tensors(node, (meta.meta_of(tensor),))
    graph.output(tuple(build(graph, *inputs)))
    values: dict[Any, Any] = dict(zip(inputs, (tensor.clone() for tensor in given), strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            values[node] = node.target(*args, **node.kwargs)
    return graph, values


def _cut(graph: Graph, values: dict[Any, Any], apart: Sequence[Any] = ()) -> tuple[Graph, CompiledRegions]:
    regions = CompiledRegions(lambda module, inputs: module)
    without_aliases(graph, lambda node: node.target in apart)
    return in_regions(graph, lambda node: node.target in apart, values, regions), regions


def _names(regions: CompiledRegions) -> list[list[str]]:
    return [[n.name for n in m.graph.nodes if n.op == "call_function"] for m in regions.compiled.values()]  # type: ignore[attr-defined]


def test_what_runs_by_itself_stays_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A getitem goes with what made it, however late it stands; the order of the others is that of the graph."""
    monkeypatch.setattr(
        "wholestep.backend.inductor.regions.TUNING", SimpleNamespace(fewest_fused=0, fewest_nodes_of_layer=20)
    )
    given = [torch.tensor([[1.0, 5.0], [2.0, 3.0]])]

    def build(graph: Graph, x: Any) -> Sequence[Any]:
        pair = graph.call_function(aten.max.dim, (x, 0))
        first = graph.call_function(operator.getitem, (pair, 0))
        sent = graph.call_function(aten.neg.default, (first,))
        summed = graph.call_function(aten.add.Tensor, (first, 1))
        twice = graph.call_function(aten.mul.Tensor, (summed, 2))
        arrived = graph.call_function(aten.abs.default, (sent,))
        late = graph.call_function(operator.getitem, (pair, 1))
        graph.call_function(aten.add_.Tensor, (x, 1))
        return graph.call_function(aten.add.Tensor, (twice, arrived)), late

    graph, values = _graph(build, given)
    apart = (aten.neg.default, aten.abs.default)
    cut, regions = _cut(graph, values, apart)
    assert _names(regions) == [
        ["max_dim", "getitem", "getitem_1"],
        ["add_tensor", "mul_tensor"],
        ["add__tensor", "add_tensor_1"],
    ]
    calls = [n.target for n in cut.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [c in apart for c in calls] == [False, True, False, True, False]
    ours, theirs = given[0].clone(), given[0].clone()
    for a, b in zip(eager(cut)([ours]), eager(graph)([theirs]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours, theirs)


def test_views_are_made_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No region takes or returns a view. A temporary that is overwritten is not overwritten in another region."""
    given = [torch.randn(3, 4), torch.randn(4, 3)]

    def build(graph: Graph, x: Any, y: Any) -> Sequence[Any]:
        call = graph.call_function
        turned = call(aten.t.default, (y,))
        held = x
        for target in (aten.sin.default, aten.cos.default, aten.exp.default, aten.tanh.default):
            held = call(target, (held,))
        flat = call(aten.view.default, (held, [12]))
        alone = call(aten.neg.default, (flat,))
        for target in (aten.sin_.default, aten.cos_.default, aten.exp_.default):
            held = call(target, (held,))
        added = call(aten.add_.Tensor, (held, turned))
        written = call(aten.mul_.Tensor, (y, 2.0))
        return alone, added, call(aten.add.Tensor, (written, 1))

    graph, values = _graph(build, given)
    expected = eager(graph)([one.clone() for one in given])
    cut, regions = _cut(graph, values, (aten.neg.default,))
    assert regions.calls == 2
    ours = [one.clone() for one in given]
    for a, b in zip(eager(cut)(ours), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours[1], given[1] * 2)
    made = [next(n for n in m.graph.nodes if n.op == "output").args[0] for m in regions.compiled.values()]  # type: ignore[attr-defined]
    assert [[n.name for n in nodes] for nodes in made] == [["tanh_default"], ["add__tensor", "add_tensor"]]
    assert "t_default" in _names(regions)[1]
    targets = [n.target for module in regions.compiled.values() for n in module.graph.nodes]  # type: ignore[attr-defined]
    assert targets.count(aten.exp.default) == 2
    assert aten.exp_.default not in targets


@pytest.mark.parametrize(
    ("one", "other", "functions"),
    [((2.0, 3), (2.0, 3), 1), ((2.0, 3), (2, 3), 2), ((2.0, 3), (2.5, 3), 2), ((2.0, 3), (2.0, 5), 2)],
    ids=["equal", "type of a number", "number", "shape"],
)
def test_equal_regions_share_a_function(one: Any, other: Any, functions: int) -> None:
    given = [torch.randn(one[1]), torch.randn(other[1])]

    def build(graph: Graph, *inputs: Any) -> Sequence[Any]:
        made: list[Any] = []
        for x, (number, _) in zip(inputs, (one, other), strict=True):
            for target in (aten.sin.default, aten.cos.default, aten.exp.default):
                x = graph.call_function(target, (x,))
            made += [graph.call_function(aten.neg.default, (graph.call_function(aten.mul.Tensor, (x, number)),))]
        return made

    graph, values = _graph(build, given)
    cut, regions = _cut(graph, values, (aten.neg.default,))
    assert (regions.calls, len(regions.compiled)) == (2, functions)
    for a, b in zip(eager(cut)(given), eager(graph)(given), strict=True):
        assert torch.equal(a, b)


def test_a_region_with_little_to_fuse_runs_as_it_is() -> None:
    def build(graph: Graph, x: Any) -> Sequence[Any]:
        product = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (x,)), x))
        return (graph.call_function(aten.relu.default, (product,)),)

    graph, values = _graph(build, [torch.randn(3, 3)])
    cut, regions = _cut(graph, values)
    assert regions.calls == 0
    assert [n.name for n in cut.nodes] == [n.name for n in graph.nodes]


def test_ops_without_a_tensor_in_common_run_as_they_are() -> None:
    """The norm of each gradient, and what follows of these numbers: no kernel would do more than one of them."""

    def build(graph: Graph, *inputs: Any) -> Sequence[Any]:
        norms = [graph.call_function(aten.linalg_vector_norm.default, (x,)) for x in inputs]
        total = norms[0]
        for one in norms[1:]:
            total = graph.call_function(aten.add.Tensor, (total, one))
        return (total,)

    graph, values = _graph(build, [torch.randn(3) for _ in range(20)])
    cut, regions = _cut(graph, values)
    assert regions.calls == 0
    assert [n.name for n in cut.nodes] == [n.name for n in graph.nodes]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.full if n >= 4 else ()) for n in range(16)])
def test_wherever_a_stretch_is_cut_it_computes_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of tensors and of numbers, views, and writes into inputs."""
    draw = random.Random(seed)
    given = [*(torch.randn(4) for _ in range(3)), *(torch.tensor(float(n)) for n in range(3))]
    one = (aten.sin.default, aten.neg.default, aten.exp.default)
    two = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)

    def build(graph: Graph, *inputs: Any) -> Sequence[Any]:
        tensors, numbers = list(inputs[:3]), list(inputs[3:])
        for _ in range(40):
            kind, held = draw.random(), draw.choice((tensors, numbers))
            if kind < 0.3:
                held.append(graph.call_function(draw.choice(one), (draw.choice(held),)))
            elif kind < 0.7:
                held.append(graph.call_function(draw.choice(two), (draw.choice(held), draw.choice(held))))
            elif kind < 0.8:
                tensors.append(graph.call_function(aten.mul.Tensor, (draw.choice(tensors), draw.choice(numbers))))
            elif kind < 0.9:
                shape = [4] if held is tensors else []
                held.append(graph.call_function(aten.view.default, (draw.choice(held), shape)))
            else:
                into = draw.choice(inputs[:3] if held is tensors else inputs[3:])
                graph.call_function(aten.copy_.default, (into, draw.choice(held)))
        return (*tensors[3:], *numbers[3:])

    def cut_anywhere(stretch: list[Any], values: Any) -> list[list[Any]]:
        marks = [0, *sorted(draw.sample(range(1, len(stretch)), 8)), len(stretch)]
        return [stretch[a:b] for a, b in pairwise(marks)]

    monkeypatch.setattr("wholestep.backend.inductor.regions._cut", cut_anywhere)
    monkeypatch.setattr("wholestep.backend.inductor.regions.TUNING", SimpleNamespace(fewest_fused=2))
    graph, values = _graph(build, given)
    cut, _ = _cut(graph, values)
    ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    for a, b in zip((*eager(cut)(ours), *ours), (*eager(graph)(theirs), *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
