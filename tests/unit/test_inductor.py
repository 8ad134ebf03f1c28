"""`backend="inductor"` on one device, and how a graph is cut for it."""

import operator
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.backend.eager import eager
from wholestep.backend.inductor import Inductor, in_segments
from wholestep.backend.tensorize_numbers import as_tensors
from wholestep.graph import meta

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")


@needs_compiler
@pytest.mark.parametrize(
    "recipe",
    [
        "SGD-nesterov-wd",
        "NAdam-weight_decay",
        pytest.param("SGD-plain", marks=pytest.mark.full),
        pytest.param("Adagrad-plain", marks=pytest.mark.full),
    ],
)
def test_scheduled_numbers_and_weight_decay(recipe: str) -> None:
    """Learning rates that eager mode reads into Python; a decay that is added to a product of matrices."""
    case = CASES["mlp-mean"]
    models = [case.build(torch.float32) for _ in range(2)]
    optimizers = [OPTIMIZERS[recipe].make(m.parameters()) for m in models]
    step = ws.compile(case.step, backend="inductor")
    for i in range(4):
        batch = case.batches(i, torch.float32)
        found, expected = step(models[0], optimizers[0], batch), case.step(models[1], optimizers[1], batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def _reads_a_number() -> Graph:
    graph = Graph()
    x, lr = graph.placeholder("x"), graph.placeholder("lr")
    made = meta.meta_of(torch.empty(3))
    meta.set_tensors(x, (made,))
    out = graph.call_function(
        aten.leaky_relu.default, (x, graph.call_function(aten._local_scalar_dense.default, (lr,)))
    )
    graph.output((out,))
    return graph


@needs_compiler
def test_a_number_that_an_op_takes_in_python() -> None:
    with pytest.raises(ws.BackendError) as raised:
        Inductor().compile(_reads_a_number(), [], [torch.ones(3), torch.tensor(0.5)], None)
    assert str(raised.value) == (
        "Inductor cannot compile this graph: %leaky_relu_default (aten.leaky_relu.default) takes a scheduled number "
        'as a Python number\n  needed: an optimizer that computes with tensors\n  next: use backend="eager"'
    )


@pytest.mark.parametrize("kind", ["add", "sub", "addcdiv", "addcmul", "lists", "in place"])
def test_numbers_become_tensors(kind: str) -> None:
    """What is multiplied by a number is multiplied by the tensor: the same values in float64."""
    x, y, z = (torch.rand(3, dtype=torch.float64) + 0.5 for _ in range(3))
    target, args, name = {
        "add": (aten.add.Tensor, (x, y), "alpha"),
        "sub": (aten.sub.Tensor, (x, y), "alpha"),
        "addcdiv": (aten.addcdiv.default, (x, y, z), "value"),
        "addcmul": (aten.addcmul.default, (x, y, z), "value"),
        "lists": (aten._foreach_add.List, ([x, y], [y, z]), "alpha"),
        "in place": (aten.add_.Tensor, (x.clone(), y), "alpha"),
    }[kind]
    expected = target(*[a.clone() if kind == "in place" and a is args[0] else a for a in args], **{name: 0.3})
    graph = Graph()
    given = iter([graph.placeholder(f"x{i}") for i in range(4)])
    flat: list[Tensor] = []

    def node_of(value: Any) -> Any:
        if isinstance(value, list):
            return [node_of(v) for v in value]
        flat.append(value)
        return next(given)

    nodes = tuple(node_of(a) for a in args)
    number = graph.placeholder("number")
    read = graph.call_function(aten._local_scalar_dense.default, (number,))
    graph.output((graph.call_function(target, nodes, {name: read}),))
    assert as_tensors(graph) == []
    used = [n for n in graph.nodes if n.op == "placeholder" and (n.users or n is number)]
    for node in [n for n in graph.nodes if n.op == "placeholder" and n not in used]:
        graph.erase_node(node)
    found = eager(graph)([*flat, torch.tensor(0.3, dtype=torch.float64)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)


def test_a_graph_is_cut_where_it_communicates() -> None:
    """In the order of the graph; what picks from a result goes with what made it, however late it stands."""
    graph = Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(aten.max.dim, (x, 0))
    first = graph.call_function(operator.getitem, (pair, 0))
    sent = graph.call_function(aten.neg.default, (first,))
    summed = graph.call_function(aten.add.Tensor, (first, 1))
    twice = graph.call_function(aten.mul.Tensor, (summed, 2))
    arrived = graph.call_function(aten.abs.default, (sent,))
    late = graph.call_function(operator.getitem, (pair, 1))
    graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((graph.call_function(aten.add.Tensor, (twice, arrived)), late))
    apart = (aten.neg.default, aten.abs.default)
    compiled: list[list[str]] = []
    given = torch.tensor([[1.0, 5.0], [2.0, 3.0]])

    def compile(module: Any, inputs: Any) -> Any:
        compiled.append([n.name for n in module.graph.nodes if n.op == "call_function"])
        return module

    cut = in_segments(graph, lambda n: n.target in apart, dict.fromkeys(graph.nodes), compile)
    assert compiled == [
        ["max_dim", "getitem", "getitem_1"],
        ["add_tensor", "mul_tensor"],
        ["add__tensor", "add_tensor_1"],
    ]
    assert [n.target for n in cut.nodes if n.target in apart] == list(apart)
    calls = [n.target for n in cut.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [c in apart for c in calls] == [False, True, False, True, False]
    ours, theirs = given.clone(), given.clone()
    for a, b in zip(eager(cut)([ours]), eager(graph)([theirs]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours, theirs)
