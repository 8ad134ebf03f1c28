"""What a step takes from outside while it is traced, once and for all later calls: loaders, seeds, other ranks."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from ..errors import CaptureError
from ..graph import meta

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def refuse_batches_inside(original: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the iteration over a DataLoader."""
    raise CaptureError(
        "the step takes a batch from a DataLoader while it is captured: all later steps would use the same",
        "batches as arguments of the step",
        "iterate over the loader outside, and call the step with each batch",
    )


def refuse_seeds(original: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of torch.manual_seed and its like."""
    raise CaptureError(
        "the step seeds torch's random numbers (manual_seed, seed, or set_rng_state with a state from elsewhere)",
        "random numbers that go on from step to step: a captured step draws from a stream of its own",
        "seed before the first call, or make the numbers outside and pass them in",
    )


def refuse_collective(original: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the functions of torch.distributed."""
    raise _collective(f"torch.distributed.{getattr(original, '__name__', 'a collective')}()")


def refuse_collectives(module: torch.fx.GraphModule) -> None:
    """Raise CaptureError when a trace holds a collective that the user's code has called."""
    for node in module.graph.nodes:
        if _torch.is_op(node.target) and str(node.target).partition(".")[0] in _COLLECTIVES:
            error = _collective(str(node.target))
            error.where = meta.source_line(node)
            raise error


def _collective(what: str) -> CaptureError:
    return CaptureError(
        f"the step calls {what} itself",
        "a step as one device runs it: communication follows from where tensors rest",
        'leave it out; for what one device computes on the whole batch give DataParallel(..., semantics="global")',
    )


def refuse_generators(named: dict[str, Any]) -> None:
    """Raise CaptureError when a call draws from a generator of the user's, whose state a graph does not hold."""
    if isinstance(named.get("generator"), torch.Generator):
        raise CaptureError(
            "the step draws random numbers from a torch.Generator of its own",
            "random numbers of the default generator, which continues from call to call in a compiled step",
            "leave out generator=, or draw the numbers before the step and pass them in",
        )


def sync_batch_norm(original: Any, self: Any, input: torch.Tensor) -> torch.Tensor:
    """`SyncBatchNorm.forward`, which speaks to other ranks where there are any."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1 and self.training:
        raise CaptureError(
            "SyncBatchNorm averages over ranks itself",
            "a step as one device runs it",
            'BatchNorm, and DataParallel(..., semantics="global"): its statistics are those of the whole batch',
        )
    return original(self, input)
