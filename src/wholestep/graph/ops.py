"""Ops that stages know by name: the marks wholestep adds to a captured graph, and those that cost next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("wholestep::grad_ready", mutates_args=())
def grad_ready(grad: Tensor, param: str) -> Tensor:
    """`grad`, marked as the whole gradient of `param` from one backward. Runs only in an unpartitioned graph."""
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
    """`value`, marked as what a backward starts from. Removed when the capture is normalized."""
    return value.clone()


@loss.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


LOSS = torch.ops.wholestep.loss.default

_aten = torch.ops.aten
CHEAP = frozenset(
    {
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.split.Tensor,
        _aten._to_copy.default,
    }
)
"""Views and casts: cheaper to make again than to keep or to send."""
