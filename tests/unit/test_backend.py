"""Backends from outside the package: an object of `ws.Backend` runs the steps of `backend="eager"`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.backends import Interpreted, Plain
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.backend.build import BACKENDS, CAPABILITIES, backend_of

FLAGS = dict.fromkeys(("in_place_buffers", "fused_optimizers"), True) | dict.fromkeys(
    ("splits_steps", "times_nodes", "recordable"), False
)


def trained(name: str, recipe: str, backend: Any, steps: int = 3) -> list[torch.Tensor]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build(torch.float32)
    optimizer = OPTIMIZERS[recipe].make(model.parameters())
    step = ws.compile(case.step, backend=backend)
    for i in range(steps):
        torch.manual_seed(i)
        step(model, optimizer, case.batches(i, torch.float32))
    return [p.detach() for p in model.parameters()]


@pytest.mark.crossed
@pytest.mark.parametrize("name", ["mlp-mean", "tied"])
@pytest.mark.parametrize("recipe", ["SGD-plain", "AdamW-fused"])
def test_a_backend_from_outside_computes_what_eager_does(name: str, recipe: str) -> None:
    mine = Interpreted()
    found, expected = trained(name, recipe, mine), trained(name, recipe, "eager")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(mine.no_grad) == 1 + 3
    assert all(mine.no_grad)
    assert mine.clocks == [None]


@torch.library.custom_op("wholestep_tests::columns", mutates_args=())
def columns(x: torch.Tensor) -> torch.Tensor:
    """A kernel whose result is not laid out as its shape function says."""
    return x.t().clone(memory_format=torch.contiguous_format).t()


@columns.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("wholestep_tests::columns_of_two", mutates_args=())
def columns_of_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One of two results is such a one."""
    return x + 1, columns(x + 2)


@columns_of_two.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 5, 3, 5, 4)], ids=["one-size", "sizes"])
def test_results_have_the_strides_of_the_trace_in_each_call(sizes: tuple[int, ...]) -> None:
    strides: list[tuple[int, ...]] = []

    def step(model: nn.Module, x: torch.Tensor) -> Any:
        plain, second = columns_of_two(x)
        return columns(x), plain, second, columns(x).as_strided((2, 3), (3, 1)), model(x)

    compiled = ws.compile(step, mesh="dp=1", dynamic=len(set(sizes)) > 1)
    model = nn.Linear(4, 2)
    for rows in sizes:
        x = torch.arange(rows * 4.0).reshape(rows, 4)
        whole, plain, second, first, _ = compiled(model, x)
        assert torch.equal(whole, x)
        assert torch.equal(plain, x + 1)
        assert torch.equal(second, x + 2)
        assert torch.equal(first, x.as_strided((2, 3), (3, 1)))
        strides += [tensor.stride() for tensor in (whole, plain, second)]
    assert set(strides) == {(4, 1)}


def test_capabilities_decide_the_graph_and_the_passes() -> None:
    case = CASES["mlp-mean"]
    model = case.build(torch.float32)
    texts: dict[str, str] = {}
    for backend in (Interpreted(), Plain()):
        step = ws.compile(case.step, backend=backend)
        step(model, OPTIMIZERS["AdamW-fused"].make(model.parameters()), case.batches(0, torch.float32))
        texts[backend.name] = str(step.local_graph)
    assert "_fused_adamw" in texts["interpreted"]
    assert "_fused_adamw" not in texts["plain"]
    names = [type(one).__name__ for one in ws.default_passes(backend=Plain(), schedule=None)]
    assert names == ["Offload", "Reinplace"]
    assert ws.default_passes(backend=Interpreted()) == ws.default_passes(backend="eager")


@pytest.mark.parametrize("name", BACKENDS)
def test_built_in_backends_are_of_the_protocol(name: str) -> None:
    made = backend_of(name)
    assert made.name == name
    assert backend_of(made) is made
    assert all(isinstance(getattr(made, flag), bool) for flag in CAPABILITIES)


def refused(backend: Any, **options: Any) -> str:
    with pytest.raises(ws.BackendError) as error:
        ws.compile(CASES["mlp-mean"].step, backend=backend, **options)
    return str(error.value)


def test_an_error_names_the_parts_that_an_object_lacks() -> None:
    class Bare:
        name = "bare"
        in_place_buffers = splits_steps = True

        def __repr__(self) -> str:
            return "<Bare>"

    assert refused(Bare()) == (
        "backend=<Bare> lacks fused_optimizers, times_nodes, recordable, compile\n"
        "  needed: a Backend: name (text), fused_optimizers, in_place_buffers, splits_steps, times_nodes, recordable "
        "(bool), compile(graph, inputs, example_inputs, clock)\n"
        "  next: add them; wholestep.Backend describes each"
    )
    assert "lacks name" in refused(SimpleNamespace(**FLAGS, compile=print))
    assert "lacks splits_steps" in refused(SimpleNamespace(**{**FLAGS, "splits_steps": 1}, name="x", compile=print))
    assert "is a class" in refused(Interpreted)
    with pytest.raises(ws.BackendError, match="lacks"):
        ws.default_passes(backend=Bare())  # type: ignore[arg-type]


def test_the_name_of_a_built_in_backend_is_taken() -> None:
    assert "has the name 'eager'" in refused(SimpleNamespace(**FLAGS, name="eager", compile=print))


def test_what_a_backend_cannot_do_is_refused() -> None:
    assert "backend 'interpreted' cannot leave collectives to the next call" in refused(
        Interpreted(), schedule="across_steps"
    )
    assert "measure=True with backend 'interpreted'" in refused(Interpreted(), measure=True)
    case = CASES["mlp-mean"]
    model = case.build(torch.float32)
    step = ws.compile(case.step, backend=Interpreted(), schedule=ws.Schedule(ws.Hardware.default()))
    with pytest.raises(ws.BackendError, match="'interpreted' does not time nodes"):
        step.profile(model, OPTIMIZERS["SGD-plain"].make(model.parameters()), case.batches(0, torch.float32))


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (None, "returned None\n  needed: a function"),
        (lambda values: None, "returned NoneType from a step"),
        (lambda values: list(values) * 9, "values from a step"),
    ],
)
def test_what_a_backend_returns_is_checked(run: Any, found: str) -> None:
    backend = SimpleNamespace(**FLAGS, name="odd", compile=lambda *_: run)
    with pytest.raises(ws.BackendError) as error:
        trained("mlp-mean", "SGD-plain", backend)
    assert "backend 'odd' " in str(error.value)
    assert found in str(error.value)
