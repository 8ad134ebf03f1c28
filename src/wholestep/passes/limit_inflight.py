"""Bounds the gradients that are on the wire: what a reduction reads is held until it is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph, node_at
from ..graph.verify import is_wait
from .base import InPlace
from .overlap import most_in_flight

_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


@dataclass(frozen=True)
class LimitInflight(InPlace):
    """Limits the gradients that are in flight.

    Before a reduce-scatter starts, the oldest along its axis are waited for until all of them read `in_flight_bytes`
    at most, or no more than `in_flight` are left along that axis; with None, as `SizeBuckets` decided. Stages of
    hierarchical collectives along other axes start regardless.

    Without it whole gradients would be held to the end of the backward where only the update waits for them. The wire
    carries the others meanwhile, so that it is as busy as before. Bitwise the same.
    """

    in_flight_bytes: int | None = None
    in_flight: int | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True

    @property
    def must_follow(self) -> tuple[str, ...]:
        """What decides how much is in flight."""
        return ("SizeBuckets",) if self.in_flight_bytes is None else ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move waits of `local` up; where the end of a step is left to the next call, they are late on purpose."""
        if local.across is not None:
            return local
        in_flight_bytes, in_flight = most_in_flight(local, self.in_flight_bytes, self.in_flight)
        graph = local.graph
        flying: dict[Any, dict[Node, int]] = defaultdict(dict)
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if is_wait(node):
                for one in flying.values():
                    one.pop(node_at(node, 0), None)
            elif node.target is _SCATTER:
                given = node_at(node, 0)
                size_bytes = sum(made.size_bytes for made in meta.tensors(given) if made is not None)
                alike = flying[node.args[-1]]
                while len(alike) >= in_flight and size_bytes + _sum(flying) > in_flight_bytes:
                    oldest = next(iter(alike))
                    del alike[oldest]
                    stays = not is_wait(given)  # waits have moved: their places are known no more
                    start = given if stays and place[given] > place[oldest] else node
                    for wait in list(oldest.users):
                        start.prepend(wait)
                alike[node] = size_bytes
        return local


def _sum(flying: Mapping[Any, Mapping[Node, int]]) -> int:
    return sum(sum(one.values()) for one in flying.values())
