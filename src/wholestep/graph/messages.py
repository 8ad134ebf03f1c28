"""What a stage of a pipeline calls to send a value to another one, and to receive one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .storage import shares

UnderWay = tuple[Any, Tensor]
"""A message under way, which has a `wait`, and its tensor."""


@shares("all")
def start_send(x: Tensor, target: int, tag: int, group: str) -> UnderWay:
    """Start to send `x` to coordinate `target` of an axis."""
    return _torch.start_send(x, target, tag, group), x


def start_receive(shape: Sequence[int], dtype: torch.dtype, device: str, source: int, tag: int, group: str) -> UnderWay:
    """Start to receive a tensor from coordinate `source` of an axis."""
    out = torch.empty(shape, dtype=dtype, device=device)
    return _torch.start_receive(out, source, tag, group), out


@shares("all")
def complete(message: UnderWay) -> Tensor:
    """Wait until a message has left, or is there; returns its tensor."""
    message[0].wait()
    return message[1]


def send(x: Tensor, target: int, tag: int, group: str) -> None:
    """Send `x` to coordinate `target` of an axis, and wait until it has left."""
    complete(start_send(x, target, tag, group))


def receive(shape: Sequence[int], dtype: torch.dtype, device: str, source: int, tag: int, group: str) -> Tensor:
    """Receive a tensor from coordinate `source` of an axis."""
    return complete(start_receive(shape, dtype, device, source, tag, group))


STARTED = (start_send, start_receive, complete)
"""What takes no time of the stage: messages travel beside what it computes."""
SENDS, RECEIVES = (send, start_send), (receive, start_receive)
POINT_TO_POINT = (*SENDS, *RECEIVES)
"""Functions of a stage's program whose last argument is an axis before binding, and then a process group."""
