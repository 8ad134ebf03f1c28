"""Custom ops of captured graphs: marks on gradients and losses, sums over ranks, a CTC loss of fixed size, rounding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .op_kinds import COUNTS_ROWS


def _like(value: Tensor, *_: object) -> Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("wholestep::grad_ready", mutates_args=())
def grad_ready(grad: Tensor, param: str) -> Tensor:
    """Mark `grad` as the complete gradient of `param` from one backward. Runs in an unpartitioned graph only."""
    return grad.clone()


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


grad_ready.register_fake(_like)
grad_ready.register_autograd(_backward)

GRAD_READY = torch.ops.wholestep.grad_ready.default


@torch.library.custom_op("wholestep::loss", mutates_args=())
def loss(value: Tensor) -> Tensor:
    """Mark `value` as the start of a backward. `normalize` removes the op."""
    return value.clone()


loss.register_fake(_like)

LOSS = torch.ops.wholestep.loss.default


@torch.library.custom_op("wholestep::over_ranks", mutates_args=())
def over_ranks(size: Tensor) -> Tensor:
    """Return the sum of norms over ranks, finite if all are. Runs in an unpartitioned graph only."""
    return size.clone()


over_ranks.register_fake(_like)

OVER_RANKS = torch.ops.wholestep.over_ranks.default
COMPLETE = frozenset({GRAD_READY, OVER_RANKS})
"""Ops whose result does not vary between ranks: partitioning replaces them by a reduction."""

_aten = torch.ops.aten


@torch.library.custom_op("wholestep::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss of each row, and its alphas padded to the maximal label length."""
    loss, alpha = _aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero_infinity)
    missing = 2 * targets.shape[-1] + 1 - alpha.shape[-1]
    return loss, torch.nn.functional.pad(alpha, [0, missing])


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    rows = log_probs.shape[1]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, log_probs.shape[0], 2 * targets.shape[-1] + 1)


CTC_LOSS = torch.ops.wholestep.ctc_loss.default


@torch.library.custom_op("wholestep::assignment", mutates_args=())
def assignment(cost: Tensor, maximize: bool) -> Tensor:
    """Return rows and columns of the assignment that scipy finds on the host, for which the host waits."""
    solve: Any = cast(Any, sys.modules["scipy.optimize"]).linear_sum_assignment  # the step has imported it
    return torch.as_tensor(np.stack(solve(cost.cpu().numpy(), maximize)), device=cost.device)


@assignment.register_fake
def _(cost: Tensor, maximize: bool) -> Tensor:
    return cost.new_empty((2, cast(Any, torch).sym_min(*cost.shape)), dtype=torch.int64)


ASSIGNMENT = torch.ops.wholestep.assignment.default


@torch.library.custom_op("wholestep::rows_of", mutates_args=())
def rows_of(mask: Tensor, count: int) -> Tensor:
    """Return `mask.nonzero()`; `count` is the number of rows where the graph has it as a symbol."""
    return mask.nonzero()


@rows_of.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((count, mask.dim()), dtype=torch.int64)


ROWS_OF = torch.ops.wholestep.rows_of.default
COUNTS_ROWS.add(ROWS_OF)


@torch.library.custom_op("wholestep::numbers_of", mutates_args=())
def numbers_of(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return a copy of the integers `values`, which Python reads as numbers; `counts` are these in the graph."""
    return values.clone()


numbers_of.register_fake(_like)

NUMBERS_OF = torch.ops.wholestep.numbers_of.default
COUNTS_ROWS.add(NUMBERS_OF)


@torch.library.custom_op("wholestep::behind", mutates_args=())
def behind(value: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of `value`, behind the rows that were counted."""
    return value.clone()


behind.register_fake(_like)

BEHIND = torch.ops.wholestep.behind.default


@torch.library.custom_op("wholestep::round_at_random", mutates_args=())
def round_at_random(value: Tensor, step: Tensor, starts: Sequence[int], shape: Sequence[int], salt: int) -> Tensor:
    """Round float32 to bfloat16: up with the probability of what is cut off, so that the expectation is the value.

    The random bits of an element follow from its place in the tensor of global `shape`, of which `value` has the piece
    that begins at `starts`, from the count `step` and from `salt`. They do not depend on how the tensor is sharded.
    Values that are not finite stay what they are.
    """
    place = torch.zeros((), dtype=torch.int32, device=value.device)
    for dim, (start, length) in enumerate(zip(starts, value.shape, strict=True)):
        stride = prod(shape[dim + 1 :])
        along = torch.arange(start, start + length, device=value.device) * stride  # int64: no product overflows
        place = place + (along & 0xFFFFFFFF).to(torch.int32).view(-1, *[1] * (value.dim() - dim - 1))
    count = step.to(device=value.device, dtype=torch.int32)
    bits = _mixed(_mixed(place + _mixed(count + salt)) + count)
    words = value.contiguous().view(torch.int32)
    rounded = ((words + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


@round_at_random.register_fake
def _(value: Tensor, step: Tensor, starts: Sequence[int], shape: Sequence[int], salt: int) -> Tensor:
    return torch.empty_like(value, dtype=torch.bfloat16, memory_format=torch.contiguous_format)


def _mixed(bits: Tensor) -> Tensor:
    """The finalizer of MurmurHash3, in 32 bits that wrap around: each bit of the result depends on all bits."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * -0x7A143595
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return bits ^ ((bits >> 16) & 0xFFFF)


ROUND_AT_RANDOM = torch.ops.wholestep.round_at_random.default
