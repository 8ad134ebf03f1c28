"""Copies between host and device beside the step: a copy is started, and `arrived` waits for it where it is read.

Each direction has a stream of its own, which waits for what ran before. Copies to the host also wait for earlier copies
to the device: what is computed from a gradient that has arrived may overwrite the parameter.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..graph.op_kinds import ARRIVALS, FREE, copies_to, priced_like
from ..graph.storage import shares

_ARRIVAL = "_wholestep_arrival"


@copies_to("device")
@shares("if alike")
def to_device(x: Tensor, device: str, at_once: bool = False) -> Tensor:
    """Start to copy `x` to the compute device; `x` itself if it is there. `at_once`: the host waits for the copy."""
    if at_once or x.is_cuda or not _beside(x, device):
        return x.to(device)
    side = _stream(device, "to device")
    target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return _started(target, x, side)


@copies_to("host")
@shares("if alike")
def to_host(x: Tensor) -> Tensor:
    """Start to copy `x` to host memory; `x` itself if it is there."""
    if not x.is_cuda or not _beside(x, x.device):
        return x.cpu()
    side = _stream(str(x.device), "to host")
    side.wait_stream(_stream(str(x.device), "to device"))
    target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    x.record_stream(side)
    return _started(target, x, side)


@priced_like(ARRIVALS)
@shares("if alike")
def arrived(x: Tensor) -> Tensor:
    """Return `x`, copied: the stream that computes waits for it, or the host."""
    event: torch.cuda.Event | None = vars(x).pop(_ARRIVAL, None)
    if event is not None:
        if x.is_cuda:
            torch.cuda.current_stream(x.device).wait_event(event)
        else:
            event.synchronize()
    return x


@copies_to("host")
@shares("nothing")
def kept_on_host(x: Tensor) -> Tensor:
    """Start to copy `x` to host memory of its own, from which `fetched` takes it; a copy of `x` if it is there."""
    if not _beside(x, x.device):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    return _started(target, x, _stream(str(x.device), "to host"))


@priced_like(ARRIVALS)
@priced_like(FREE)
@shares("nothing")
def kept(host: Tensor, x: Tensor) -> Tensor:
    """Return `host`, to which all of `x` is copied before what computes goes on, which may overwrite or free `x`."""
    if (event := vars(host).pop(_ARRIVAL, None)) is not None:
        torch.cuda.current_stream(x.device).wait_event(event)
    return host


@copies_to("device")
@priced_like(FREE)
def fetched(host: Tensor, device: str) -> Tensor:
    """Start to copy back what `kept_on_host` has copied; `host` itself, which nothing else reads, if `device` is it."""
    return to_device(host, device)


def _started(target: Tensor, x: Tensor, side: torch.cuda.Stream) -> Tensor:
    """`target`, into which `side` copies `x`."""
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        target.copy_(x, non_blocking=True)
    vars(target)[_ARRIVAL] = side.record_event()
    return target


def _beside(x: Tensor, device: str | torch.device) -> bool:
    """True where a copy of `x` has a stream: `device` is a GPU, and each element of `x` has memory of its own."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    return all(stride > 0 or size <= 1 for size, stride in zip(x.shape, x.stride(), strict=True))


@cache
def _stream(device: str, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


HOST_COPIES = (to_device, to_host, arrived, kept_on_host, kept, fetched)
