"""The ops wholestep adds to a captured graph: marks on complete gradients and on the value a backward starts from."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("wholestep::grad_ready", mutates_args=())
def grad_ready(grad: Tensor, param: str) -> Tensor:
    """`grad`, marked as the whole gradient of `param` from one backward. Runs only where a captured graph is run unpartitioned."""
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
