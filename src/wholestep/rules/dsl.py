"""Building blocks of the rule table: rows, samples, names of dims, sample tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph.op_kinds import IN_PLACE_OF
from . import registry
from .call import Call

aten = torch.ops.aten
row = partial(registry.rule, origin=registry.BUILT_IN)
"""A built-in rule: `registry.rule`, of ops by name."""
WHOLE = "*+ -> ...!+"
"""Nothing may be sharded."""


def sample(op: Any, samples: registry.Samples) -> None:
    """Register `samples`, which makes sample arguments, for ops whose row is that of a family."""
    registry.SAMPLES.update(dict.fromkeys(registry.targets_of(op), samples))


def dims_of(call: Call) -> list[str]:
    """A name for each dim of the first operand."""
    return [f"d{i}" for i in range(len(call.shape(0)))]


def term(dims: Sequence[str], unsharded: Collection[str] = ()) -> str:
    """Text of a term, with the dims in `unsharded` marked `!`."""
    return " ".join(f"{d}!" if d in unsharded else d for d in dims) or "()"


def text(inputs: Iterable[str], outputs: Iterable[str]) -> str:
    """Text of a rule from its terms."""
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def called(function: Callable[..., Any], op: Any, what: str) -> Callable[..., Any]:
    """`function` under the name that programs print, the name of the op that it replaces, and `what` differs; it is
    priced as that op.
    """
    IN_PLACE_OF[function] = op
    function.__name__ = f"{op._overloadpacket.__name__}_{what}"
    return function


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible sample values in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def ints(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Reproducible sample indices below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed + high + sum(shape)))
