"""Custom ops of captured graphs: marks on gradients and losses, sums over ranks, a CTC loss of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("wholestep::grad_ready", mutates_args=())
def grad_ready(grad: Tensor, param: str) -> Tensor:
    """Mark `grad` as the complete gradient of `param` from one backward. Runs in an unpartitioned graph only."""
    return grad.clone()


@grad_ready.register_fake
def _(grad: Tensor, param: str) -> Tensor:
    return torch.empty_like(grad)


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


grad_ready.register_autograd(_backward)

GRAD_READY = torch.ops.wholestep.grad_ready.default


@torch.library.custom_op("wholestep::loss", mutates_args=())
def loss(value: Tensor) -> Tensor:
    """Mark `value` as the start of a backward. `normalize` removes the op."""
    return value.clone()


loss.register_fake(torch.empty_like)

LOSS = torch.ops.wholestep.loss.default


@torch.library.custom_op("wholestep::over_ranks", mutates_args=())
def over_ranks(size: Tensor) -> Tensor:
    """Return the sum of norms over ranks, finite if all are. Runs in an unpartitioned graph only."""
    return size.clone()


over_ranks.register_fake(torch.empty_like)

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
