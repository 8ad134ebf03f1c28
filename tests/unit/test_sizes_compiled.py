"""Regions of Inductor for all sizes of the batch: compiled once, and again where the compiler compared sizes."""

import copy
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim import AdamW

import wholestep as ws
from tests.steps import mean_square
from wholestep.backend.inductor import inductor_backend as backend
from wholestep.backend.inductor.sized_regions import SizedRegion
from wholestep.distributed.activity import ACTIVITY

IN_A_CALL = "compiling a region for other sizes"
SIZES = ((4, 8), (3, 5), (7, 32), (2, 2), (13, 31), (64, 33), (3, 5))


def model_of(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(), nn.Linear(2 * width, 3)
    ).double()


def beside_eager(chosen: Any, sizes: Sequence[tuple[int, int]] = SIZES, **options: Any) -> ws.CompiledStep:
    """Train on batches of these sizes beside eager mode: the same results and parameters."""
    model = model_of()
    other = copy.deepcopy(model)
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    step = ws.compile(mean_square, backend=chosen, **options)
    for rows, length in sizes:
        x = torch.randn(rows, length, 6, dtype=torch.float64)
        mine, theirs = step(model, optimizer, x), mean_square(other, plain, x)
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return step


def compiler(monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any], object]) -> list[GraphModule]:
    """In place of Inductor, what runs a region as it is, after `ask` compared the size of the dim 1."""
    compiled: list[GraphModule] = []

    def compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        sizes = [one for one in inputs if isinstance(one, torch.SymInt)]
        if sizes:
            ask(sizes[1])
            compiled.append(module)
        return module

    monkeypatch.setattr(backend, "_compile", compile)
    return compiled


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.full
def test_inductor_compiles_each_region_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor, compiled = backend._compile, list[int]()

    def compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(sum(isinstance(one, torch.SymInt) for one in inputs))
        return inductor(module, inputs)

    monkeypatch.setattr(backend, "_compile", compile)
    step = beside_eager("inductor", dynamic={"x": (0, 1)})
    assert (len(step.programs), step.misses) == (1, [])
    assert set(compiled) <= {0, 2}, "two symbols, or none"
    assert 2 in compiled


def test_what_the_compiler_compares_makes_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    doing: list[str] = []

    def ask(size: Any) -> bool:
        doing.append(ACTIVITY.busy)
        return bool(size <= 16)

    compiled = compiler(monkeypatch, ask)
    step = beside_eager("inductor", dynamic={"x": (0, 1)})
    assert len(compiled) == 2 * len(set(compiled)), "each region for short and for long batches"
    assert doing == ["compiling mean_square"] * len(set(compiled)) + [IN_A_CALL] * len(set(compiled)), "others wait"
    again = [miss for miss in step.misses if miss.startswith("a region is compiled again at ")]
    assert len(again) == len(set(compiled))
    assert "x.shape[0] = 7, x.shape[1] = 32: Inductor compares sizes in %" in again[0]


def test_a_compiler_that_fixes_sizes_compiles_a_few_and_runs_others_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler(monkeypatch, int)
    step = beside_eager("inductor", [(3, n) for n in (4, 5, 6, 7, 8, 9, 4)], dynamic={"x": (0, 1)})
    assert len(compiled) == 4 * len(set(compiled))
    rest = [miss for miss in step.misses if "runs op by op" in miss]
    assert "x.shape[1] = 8: it was compiled 4 times" in rest[0]


def test_a_region_that_cannot_be_compiled_with_symbols_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: Any) -> None:
        raise NotImplementedError("no symbols here")

    compiler(monkeypatch, ask)
    step = beside_eager("inductor", dynamic={"x": (0, 1)})
    assert step.misses[0] == "a region runs op by op, as Inductor cannot compile it with symbols: no symbols here"


def test_a_region_whose_inputs_are_not_as_described_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler(monkeypatch, lambda size: None)
    described = SizedRegion.__post_init__

    def wrong(self: SizedRegion) -> None:
        described(self)
        self._described = lambda *_: ()

    monkeypatch.setattr(SizedRegion, "__post_init__", wrong)
    step = beside_eager("inductor", SIZES[:2], dynamic={"x": (0, 1)})
    assert len(compiled) == len(set(compiled))
    assert "its inputs have other strides" in step.misses[0]
