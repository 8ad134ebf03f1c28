"""`backend="inductor"` on one device."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.backend.eager import eager
from wholestep.backend.inductor.inductor_backend import Inductor
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
    """The op runs by itself, with the number of each call."""
    run = Inductor().compile(_reads_a_number(), [], [torch.ones(3), torch.tensor(0.5)], None)
    for slope in (0.5, 0.25):
        assert torch.equal(run([-torch.ones(3), torch.tensor(slope)])[0], torch.full((3,), -slope))


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
