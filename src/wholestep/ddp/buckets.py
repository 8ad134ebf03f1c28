"""Which gradients DDP's reducer sends together: its rules as plain bookkeeping, without a tensor or a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Param:
    """A parameter whose gradient is reduced.

    `number` is its place in the reducer's own list, which is the order of registration; `size_bytes` is that of its
    gradient; only gradients of one `kind` (dtype and device) share a bucket, and a sparse one has a bucket to itself.
    """

    name: str
    number: int
    size_bytes: int
    kind: tuple[str, str]
    sparse: bool = False


def assign(params: Sequence[Param], limits: Sequence[int]) -> tuple[tuple[Param, ...], ...]:
    """The reducer's buckets of `params`, filled in the order given; those that never reach their limit come last.

    A bucket closes when its bytes reach the limit, so it may be larger. The n-th bucket of a kind has the n-th of
    `limits` (bytes), further ones the last.
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
    """What decides the buckets of one DDP module: its parameters in order of registration, and its limits in bytes.

    `by_arrival` says that the buckets are made anew after the first backward, in the order in which gradients came;
    else (DDP's `find_unused_parameters` without `static_graph`) they stay as they are made from the registered order.
    """

    params: tuple[Param, ...]
    limits: tuple[int, ...]
    by_arrival: bool = True

    def buckets(self, arrivals: Sequence[Param]) -> tuple[tuple[Param, ...], ...]:
        """The buckets, in the order in which they are sent, when the gradients of one graph arrive in this order.

        Parameters registered behind all of these are taken to come before them, from graphs that follow this one.
        """
        if not self.by_arrival:
            made = assign(self.params, self.limits)
            return tuple(sorted(made, key=lambda bucket: min(p.number for p in bucket), reverse=True))
        newest = max((p.number for p in arrivals), default=-1)
        before = (p for p in reversed(self.params) if p.number > newest)
        return assign(tuple(chain(before, arrivals)), self.limits)
