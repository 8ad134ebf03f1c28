"""A model of DDP's reducer: which gradients it puts into one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Param:
    """A parameter whose gradient is reduced.

    `number` is its position in order of registration, `size_bytes` the size of its gradient. Only gradients of the same
    `kind` (dtype and device) share a bucket; a sparse gradient has its own bucket.
    """

    name: str
    number: int
    size_bytes: int
    kind: tuple[str, str]
    sparse: bool = False


def assign(params: Sequence[Param], limits: Sequence[int]) -> tuple[tuple[Param, ...], ...]:
    """Return the reducer's buckets, filled in the order of `params`; buckets that do not reach their limit are last.

    A bucket closes when its bytes reach the limit, so it may be larger. The n-th bucket of a kind has the n-th of
    `limits` (bytes), later ones the last.
    """
    closed: list[tuple[Param, ...]] = []
    filling: dict[tuple[str, str], list[Param]] = {}
    count: dict[tuple[str, str], int] = {}
    for param in params:
        if param.sparse:
            closed.append((param,))
            continue
        bucket = filling.setdefault(param.kind, [])
        bucket.append(param)
        limit = limits[min(count.get(param.kind, 0), len(limits) - 1)]
        if sum(p.size_bytes for p in bucket) >= limit:
            closed.append(tuple(filling.pop(param.kind)))
            count[param.kind] = count.get(param.kind, 0) + 1
    return (*closed, *(tuple(bucket) for bucket in filling.values()))


@dataclass(frozen=True)
class Reducer:
    """The reducer of one DDP module: its parameters in order of registration, and its limits in bytes.

    `by_arrival`: the reducer rebuilds its buckets after the first backward, in the order of arrival of the gradients;
    else (DDP's `find_unused_parameters` without `static_graph`) buckets keep the order of registration.
    """

    params: tuple[Param, ...]
    limits: tuple[int, ...]
    by_arrival: bool = True

    def buckets(self, arrivals: Sequence[Param]) -> tuple[tuple[Param, ...], ...]:
        """Return the buckets in the order of reduction, if the gradients of one graph arrive in this order.

        Parameters registered after all of these are assumed to arrive before them, from later graphs.
        """
        if not self.by_arrival:
            made = assign(self.params, self.limits)
            return tuple(sorted(made, key=lambda bucket: min(p.number for p in bucket), reverse=True))
        last = max((p.number for p in arrivals), default=-1)
        before = (p for p in reversed(self.params) if p.number > last)
        return assign(tuple(chain(before, arrivals)), self.limits)
