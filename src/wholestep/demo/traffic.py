"""What a step leaves at rest and what it moves, measured from outside, alike for every way of training."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


def bytes_at_rest(optimizer: Optimizer) -> int:
    """Bytes of this rank's parameters and optimizer state, each storage once."""
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    state: list[Any] = [value for per_parameter in optimizer.state.values() for value in per_parameter.values()]
    seen: dict[int, int] = {}
    for value in parameters + state:
        if isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step on one rank: counts by kind, and bytes sent in the ring algorithm."""

    counts: dict[str, int]
    sent_bytes: int


def traffic(step: Callable[[], object]) -> Traffic:
    """Run `step` once and watch the collectives that pass PyTorch's dispatcher.

    Bytes are those a rank sends in the ring algorithm with n ranks: 2(n-1)/n of what is all-reduced, (n-1)/n of what
    is gathered or what is scattered, all of what is broadcast.
    """
    watch = _Watch()
    with watch:
        step()
    return Traffic(dict(watch.counts), round(watch.sent_bytes))


@dataclass
class _Totals:
    counts: Counter[str] = field(default_factory=Counter[str])
    sent_bytes: float = 0.0


class _Watch(CommDebugMode):
    """CommDebugMode that also adds up bytes; every group is taken to be the whole world."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = _Totals()

    @property
    def counts(self) -> Counter[str]:
        return self.totals.counts

    @property
    def sent_bytes(self) -> float:
        return self.totals.sent_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.name())
        if "c10d" in name and not any(t is DTensor for t in types):
            kind = next((KINDS[key] for key in KINDS if name.split("::")[1].lstrip("_").startswith(key)), None)
            if kind:
                self.totals.counts[kind] += 1
                self.totals.sent_bytes += _ring_bytes(kind, name, args)
        return cast(Any, super().__torch_dispatch__(func, types, args, kwargs))


def _ring_bytes(kind: str, name: str, args: tuple[Any, ...]) -> float:
    """Bytes one rank sends for a collective with these arguments."""
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
