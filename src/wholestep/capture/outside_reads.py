"""Refuses reads from outside the step that a trace would freeze: data loaders, seeds, collectives."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from ..errors import CaptureError
from ..graph import meta

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def refuse_batches_inside(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the iteration over a DataLoader."""
    raise CaptureError(
        "the step takes a batch from a DataLoader while it is captured: all later steps would reuse it",
        "batches as arguments of the step",
        "iterate over the loader outside, and call the step with each batch",
    )


def refuse_seeds(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace torch.manual_seed, torch.seed and torch.set_rng_state."""
    raise CaptureError(
        "the step seeds torch's random numbers (manual_seed, seed, or set_rng_state with a state from elsewhere)",
        "a random stream that continues from step to step: a compiled step has its own stream",
        "seed before the first call, or draw the numbers outside and pass them in",
    )


def refuse_collective(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the functions of torch.distributed."""
    raise _collective(f"torch.distributed.{getattr(original, '__name__', 'a collective')}()")


def refuse_collectives(module: torch.fx.GraphModule) -> None:
    """Raise CaptureError if a trace contains a collective of the user's."""
    for node in module.graph.nodes:
        if _torch.is_op(node.target) and node.target.namespace in _COLLECTIVES:
            error = _collective(str(node.target))
            error.where = meta.source_line(node)
            raise error


def _collective(what: str) -> CaptureError:
    return CaptureError(
        f"the step calls {what} itself",
        "a step for one device: wholestep derives the communication from the plan",
        'remove the call; for results over the whole batch use DataParallel(..., semantics="global")',
    )


def refuse_generators(named: dict[str, Any]) -> None:
    """Raise CaptureError if a call draws from a `torch.Generator`, whose state is not part of the graph."""
    if isinstance(named.get("generator"), torch.Generator):
        raise CaptureError(
            "the step draws random numbers from a torch.Generator of its own",
            "random numbers of the default generator, which continues from call to call in a compiled step",
            "leave out generator=, or draw the numbers before the step and pass them in",
        )


def sync_batch_norm(original: Any, self: Any, input: torch.Tensor) -> torch.Tensor:
    """Replace `SyncBatchNorm.forward`, which communicates if there are several ranks."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1 and self.training:
        raise CaptureError(
            "SyncBatchNorm averages over ranks itself",
            "a step for one device",
            'use BatchNorm with DataParallel(..., semantics="global"), which computes statistics of the whole batch',
        )
    return original(self, input)
