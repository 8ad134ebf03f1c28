"""Compares a compiled step in a world of one with the same function run eagerly on a twin."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from tests.oracle import clone, relative, twin

Between = Callable[..., None]


def same_as_eager(
    fn: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    calls: Iterable[tuple[Any, ...]],
    *,
    tolerance: float = 1e-12,
    between: Between | None = None,
    grads: bool = False,
    **options: Any,
) -> ws.CompiledStep:
    """Call `fn(*make(), *call)` for each of `calls`, compiled and eagerly, on twins.

    Results and changed arguments are compared after each call, all that modules and optimizers hold after the last.
    `between(i, *made)` runs on both before call `i`. A tolerance of 0 asks for the same bits.
    """
    eager, ours = twin(make)
    step = ws.compile(fn, **options)
    for i, call in enumerate(calls):
        if between is not None:
            between(i, *eager)
            between(i, *ours)
        theirs, mine = clone(call), clone(call)
        torch.manual_seed(100 + i)
        expected = fn(*eager, *theirs)
        torch.manual_seed(100 + i)
        found = step(*ours, *mine)
        same(found, expected, tolerance, f"result of call {i}")
        same(mine, theirs, tolerance, f"arguments of call {i}")
    for number, (found, expected) in enumerate(zip(ours, eager, strict=True)):
        same_holder(found, expected, tolerance, grads, f"argument {number}")
    assert step.calls == i + 1
    return step


def same(found: Any, expected: Any, tolerance: float, where: str) -> None:
    """Equal structure and types; tensors within `tolerance`, relative."""
    if isinstance(expected, (nn.Module, Optimizer)):
        return
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{where} is {type(found).__name__}"
        assert found.dtype == expected.dtype, f"{where} is {found.dtype}"
        difference = relative(found.detach(), expected.detach())
        assert difference <= tolerance, f"{where}: {difference:.1e}"
        return
    assert type(found) is type(expected), f"{where} is {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for key in expected:
            same(found[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            same(a, b, tolerance, f"{where}[{i}]")
    elif dataclasses.is_dataclass(expected):
        for f in dataclasses.fields(expected):
            same(getattr(found, f.name), getattr(expected, f.name), tolerance, f"{where}.{f.name}")
    else:
        assert found == expected, f"{where} is {found!r}, not {expected!r}"


def same_holder(found: Any, expected: Any, tolerance: float, grads: bool, where: str) -> None:
    """What modules and optimizers hold, wherever they are nested."""
    if isinstance(expected, nn.Module):
        same(dict(found.state_dict()), dict(expected.state_dict()), tolerance, where)
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
            assert type(a) is type(b), f"{where}.{name} became a {type(a).__name__}"
            assert a.requires_grad == b.requires_grad, f"{where}.{name}"
            if grads:
                same(a.grad, b.grad, tolerance, f"{where}.{name}.grad")
    elif isinstance(expected, Optimizer):
        same(found.state_dict(), expected.state_dict(), tolerance, where)
    elif isinstance(expected, (list, tuple)):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            same_holder(a, b, tolerance, grads, f"{where}[{i}]")
    elif isinstance(expected, dict):
        for key in expected:
            same_holder(found[key], expected[key], tolerance, grads, f"{where}[{key!r}]")


def batches(*shapes: tuple[int, ...], count: int = 3, dtype: torch.dtype = torch.float64) -> list[tuple[Any, ...]]:
    """`count` calls with one random tensor for each shape."""
    seeds = itertools.count(1)
    made: list[tuple[Any, ...]] = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(next(seeds))
        made.append(tuple(torch.randn(s, generator=generator, dtype=dtype) for s in shapes))
    return made
