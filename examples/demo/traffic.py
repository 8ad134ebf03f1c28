"""What a step stores and sends, measured from outside, alike for every way to train."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "reduce_scatter",  # wholestep's on gloo: an exchange and a local sum
    "alltoall": "reduce_scatter",
    "broadcast": "broadcast",
}


def bytes_stored(optimizer: Optimizer) -> int:
    """Bytes of this rank's parameters and optimizer state, each storage once."""
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    state: list[Any] = [value for per_parameter in optimizer.state.values() for value in per_parameter.values()]
    found: dict[int, int] = {}
    for value in parameters + state:
        if isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step on one rank: counts by kind, and bytes that the rank sends."""

    counts: dict[str, int]
    sent_bytes: int


def traffic(step: Callable[[], object]) -> Traffic:
    """Run `step` once and watch the collectives that pass PyTorch's dispatcher.

    Bytes are those of the ring algorithm on n ranks: 2(n-1)/n of what is all-reduced, (n-1)/n of what is gathered or
    scattered, all of what is broadcast.
    """
    watch = _Watch()
    with watch:
        step()
    return Traffic(dict(Counter(kind for kind, _ in watch.seen)), round(sum(sent for _, sent in watch.seen)))


class _Watch(CommDebugMode):
    """Keeps kind and sent bytes of each collective; takes every group for the whole world."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.name())
        if "c10d" in name and DTensor not in types:
            called = name.split("::")[1].lstrip("_")
            kind = next((KINDS[start] for start in KINDS if called.startswith(start)), None)
            if kind:
                self.seen.append((kind, _ring_bytes(kind, name, args)))
        return cast(Any, super().__torch_dispatch__(func, types, args, kwargs))


def _ring_bytes(kind: str, name: str, args: tuple[Any, ...]) -> float:
    """Bytes that one rank sends for a collective with these arguments."""
    n = dist.get_world_size()
    if "functional" in name:  # (input, ...)
        size = _size(args[0]) * (n if kind == "all_gather" else 1)
    elif kind in ("all_reduce", "broadcast"):  # ([tensors], ...) in place
        size = _size(args[0])
    else:  # (output, input, ...)
        size = max(_size(args[0]), _size(args[1]))
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(kind, (n - 1) / n)
    return size * share if n > 1 else 0.0


def _size(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_size(item) for item in cast(Sequence[object], value))
    return 0
