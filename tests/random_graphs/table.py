"""Calls of the ops that have rules, with the arguments that their rules are checked on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.random_graphs.builder import Builder, Unfit, is_real
from tests.rule_samples import samples_of, table
from wholestep import _torch
from wholestep.rules.testing.check import Sample
from wholestep.rules.testing.harness import tensors_in, with_tensors

_LEFT_OUT = ("empty", "equal", "_fused_sdp_choice", "nextafter", "frexp", "_efficientzerotensor", "randperm")


@lru_cache(maxsize=1)
def samples() -> tuple[tuple[Any, Sample], ...]:
    """Every op with each of its samples."""
    ops: list[Any] = []
    for op in table():
        random = _torch.is_op(op) and torch.Tag.nondeterministic_seeded in op.tags
        if not (random or any(word in str(op) for word in (*_LEFT_OUT, "fused_ad", "fused_sgd"))):
            ops.append(op)
    every = [(op, s) for op, given in samples_of(ops).items() for s in given[:4]]
    return tuple((op, s) for op, s in every if all(map(is_plain, tensors_in([*s.args, *s.kwargs.values()]))))


def is_plain(value: Tensor) -> bool:
    """A dense tensor of real numbers in double precision, of whole numbers or of booleans."""
    narrow = value.is_floating_point() and value.dtype != torch.float64
    return not value.is_complex() and not narrow and value.layout == torch.strided


def tabled(b: Builder) -> None:
    """A call of a random op of the table; values of the right shape take the place of its sample's."""
    groups = samples()
    op, sample = b.rng.choice(groups)
    given = list(tensors_in([*sample.args, *sample.kwargs.values()]))
    args, kwargs = sample.args, sample.kwargs
    taken: list[int] = []
    for tensor in given:
        same = [i for i, v in enumerate(b.values) if v.shape == tensor.shape and is_real(v) and is_real(tensor)]
        taken.append(b.rng.choice(same) if same and b.rng.random() < 0.5 else b.give(tensor))

    def run(*tensors: Tensor) -> Any:
        new_args, new_kwargs = with_tensors(args, kwargs, tensors)
        return op(*new_args, **new_kwargs)

    b.call(run, *taken)


@lru_cache(maxsize=1)
def _pointwise() -> tuple[tuple[Any, Sample], ...]:
    found = [(op, s) for op, s in samples() if _torch.is_op(op) and torch.Tag.pointwise in op.tags]
    return tuple((op, s) for op, s in found if all(map(is_real, tensors_in([*s.args, *s.kwargs.values()]))))


def pointwise(b: Builder) -> None:
    """An op that treats elements alike, on values of any shape."""
    op, sample = b.rng.choice(_pointwise())
    count = len(list(tensors_in([*sample.args, *sample.kwargs.values()])))
    if any(isinstance(a, (list, tuple)) for a in sample.args) or not count:
        raise Unfit
    x = b.pick()
    taken = [x, *(b.broadcasting(x) for _ in range(count - 1))]

    def run(*tensors: Tensor) -> Any:
        new_args, new_kwargs = with_tensors(sample.args, sample.kwargs, tensors)
        return op(*new_args, **new_kwargs)

    b.call(run, *taken)
