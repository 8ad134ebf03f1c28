"""Small programs on which partitioning once went wrong; random graphs found them, these keep them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.random_graphs.case import Case
from tests.random_graphs.program import Program, finished
from tests.random_graphs.run import parts_of, problem
from tests.simulate import run_one
from wholestep import _torch
from wholestep.graph.graph import Input, Output, Role
from wholestep.graph.meta import meta_of, with_stride
from wholestep.layout import AxisState, Layout, replicated, sharded
from wholestep.mesh import Mesh

aten = torch.ops.aten
A2, A3 = "a=2", "a=3"


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(fn: Callable[..., Any], given: list[tuple[Tensor, Layout]], mesh: str, updates: tuple[int, ...] = ()) -> None:
    """All ranks compute what one device does; outputs are results, the last ones new values of inputs `updates`."""
    graph = _torch.trace(fn, [v for v, _ in given], {}).graph
    inputs = [Input(f"x{i}", Role.PARAM if i in updates else Role.BATCH, meta_of(v)) for i, (v, _) in enumerate(given)]
    count = len(next(iter(reversed(graph.nodes))).args[0]) - len(updates)
    outputs = [*(Output("result", str(i)) for i in range(count)), *(Output("update", f"x{i}") for i in updates)]
    train = finished(graph, inputs, outputs)
    values = {f"x{i}": v for i, (v, _) in enumerate(given)}
    rest = {f"x{i}": layout for i, (_, layout) in enumerate(given)}
    found = problem(Case(Program(train, values), Mesh(mesh), rest, rest))
    assert found is None, found.text


def test_kernels_get_a_gathered_tensor_as_it_lies_in_memory_on_one_device() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v),)

    whole, cut = replicated(4), sharded(4, 3, "a")
    check(attend, [(rand(1, 2, 3, 4), cut), (rand(1, 2, 3, 4, seed=1), whole), (rand(1, 2, 3, 4, seed=2), cut)], A2)


def test_memory_is_read_by_strides_after_a_gather() -> None:
    check(lambda x: (aten.as_strided(x, [2, 2], [1, 2]),), [(rand(2, 2), sharded(2, 1, "a"))], A2)


def test_a_dim_of_one_entry_that_is_cut_is_whole_in_what_is_like_it() -> None:
    check(lambda x: (torch.ones_like(x) - x,), [(rand(1, 3), sharded(2, 0, "a"))], A2)


@pytest.mark.parametrize("op", ["max", "min", "sum", "avg"])
def test_a_whole_value_joins_partial_ones(op: str) -> None:
    partial = replicated(2).put("a", AxisState("P", op=op))
    given = [(rand(2, 3), partial), (rand(2, 3, seed=1), replicated(2))]
    check(lambda x, y: (torch.cat([x, y]),), given, A3)


def test_a_layer_norm_over_all_dims_sums_its_weights_over_none() -> None:
    x, weight, bias = rand(4, 3), rand(4, 3, seed=1), rand(4, 3, seed=2)

    def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        made = torch.nn.functional.layer_norm(leaves[0], (4, 3), leaves[1], leaves[2])
        return torch.autograd.grad(made.square().sum(), leaves)

    check(gradients, [(x, sharded(2, 0, "a")), (weight, replicated(2)), (bias, replicated(2))], A2)


def test_nothing_lands_in_a_storage_of_one_entry_that_is_spread_on_another_rank() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (((x + 1).view(1, 1) * y).detach(),)

    check(step, [(rand(1), sharded(1, 0, "a")), (rand(2), sharded(1, 0, "b"))], "a=2,b=3")


def test_a_view_that_its_schema_hides_is_one() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x + 1
        seen = aten._unsafe_view.default(made, [6])
        return made * 2, seen.exp()

    check(step, [(rand(2, 3), replicated(2))], A2)


def test_parts_of_rows_seen_by_strides_outlive_an_update() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return aten.as_strided(x, [2, 3, 2], [6, 2, 1]).clone().detach(), x - y

    check(step, [(rand(2, 6), sharded(2, 0, "a")), (rand(2, 6, seed=1), replicated(2))], A2, updates=(0,))


@pytest.mark.parametrize("stride", [(0, 1), (1, 1), (1, 3)])
def test_strides_of_overlapping_elements_are_made(stride: tuple[int, int]) -> None:
    wanted = torch.arange(9.0).as_strided((3, 3), stride)
    made = with_stride(wanted.clone(memory_format=torch.contiguous_format), stride)
    assert made.stride() == stride
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_parts_of_a_tensor_are_what_it_is_reduced_from(op: str) -> None:
    whole = rand(3, 4)
    parts = torch.stack(parts_of(whole, op, 3, torch.Generator().manual_seed(0)))
    found = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0)}[op]
    torch.testing.assert_close(found, whole)


def test_a_wrong_graph_is_found_and_made_small() -> None:
    """The test itself can fail: a rule that lies about cumsum is caught, and shrunk to that one call."""
    from tests.random_graphs.shrink import shrink
    from wholestep.rules import registry

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.tanh(x + y).cumsum(0) * 2).exp(), x.sum(1)

    graph = _torch.trace(fn, [rand(6, 5), rand(5)], {}).graph
    inputs = [Input(f"x{i}", Role.BATCH, meta_of(v)) for i, v in enumerate((rand(6, 5), rand(5)))]
    train = finished(graph, inputs, [Output("result", "0"), Output("result", "1")])
    values = {"x0": rand(6, 5), "x1": rand(5)}
    rest = {"x0": Layout((("a",), ("b",))), "x1": replicated(1)}
    made = Case(Program(train, values), Mesh("a=2,b=2"), rest, {})
    assert problem(made) is None
    before = registry.RULES[aten.cumsum.default]
    registry.rule(aten.cumsum.default, "... -> ...")
    try:
        found = problem(made)
        assert found is not None
        assert found.kind == "values"
        small = shrink(made, found)
        calls = [n.target for n in small.program.graph.graph.nodes if n.op == "call_function"]
        assert calls == [aten.cumsum.default]
        assert str(small.mesh) == "a=2"
        assert [list(v.shape) for v in small.program.values.values()] == [[2, 1]]
    finally:
        registry.RULES[aten.cumsum.default] = before
        registry.bound.clear()
    assert len(run_one(train, list(values.values()))) == 2
