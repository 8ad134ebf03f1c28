"""Words for rules whose text depends on the call: names of dims, terms, ops by name, sample tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .registry import Bind
from .rule import ANY_PARTIAL, BoundRule, PassThrough

aten = torch.ops.aten


def ops(*names: str) -> list[Any]:
    """Overloads by name, `sum.dim_IntList` or `relu` for the default one; those that this torch lacks are left out."""
    found: list[Any] = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        found += [op] if op is not None else []
    return found


def dims_of(call: Call, operand: int = 0, letter: str = "d") -> list[str]:
    """A name for each dim of an operand."""
    return [f"{letter}{i}" for i in range(len(call.shape(operand)))]


def term(dims: Sequence[str], whole: Collection[str] = ()) -> str:
    """Text of a term; the dims in `whole` stay whole."""
    return " ".join(f"{d}!" if d in whole else d for d in dims) or "()"


def fitted(dims: Sequence[str], shape: Sequence[int]) -> str:
    """The term of a tensor that broadcasts, from the right, to dims with these names."""
    names = dims[len(dims) - len(shape) :]
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True)) or "()"


def text(inputs: Iterable[str], outputs: Iterable[str]) -> str:
    """A rule from its terms."""
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def moves(call: Call, bind: Bind, *together: int) -> BoundRule:
    """`bind` for an op that moves values and adds zeros: whatever the operands `together` are partial in passes."""
    bound = bind.on(call)
    through = (PassThrough(frozenset(together or (0,)), ANY_PARTIAL),)
    return replace(bound, groups=tuple(replace(g, partial=through) for g in bound.groups))


def whole(call: Call) -> BoundRule:
    """Everything whole: nothing may be cut."""
    bound = Bind(text(["*"] * len(call.slots), ["*"] * len(call.outputs))).on(call)
    return replace(bound, groups=tuple(replace(g, opaque=frozenset[int]()) for g in bound.groups))


def called(function: Callable[..., Any], op: Any, what: str) -> Callable[..., Any]:
    """`function` under a name that a program prints: that of the op it stands for, and `what` is different."""
    function.__name__ = f"{op._overloadpacket.__name__}_{what}"
    return function


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Sample values, float64, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def ints(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Sample indices below `high`, the same each time."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed + high + sum(shape)))
