"""Bounds the gradients in flight: the operand of a reduction stays allocated until the reduction is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_wait, node_at
from .base import InPlace
from .overlap import most_in_flight

_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


@dataclass(frozen=True)
class LimitInflight(InPlace):
    """Limits the gradients that are in flight. Bitwise the same.

    Before a reduce-scatter starts, the program waits for the oldest ones along its axis until all in flight read at
    most `in_flight_bytes`, or fewer than `in_flight` are left along that axis; `SizeBuckets` decides where
    `in_flight_bytes` is None. Stages of hierarchical collectives along other axes start regardless.

    Without this pass full gradients stay allocated until the end of the backward, because only the update waits for
    them. The link stays busy with the newer reductions.
    """

    in_flight_bytes: int | None = None
    in_flight: int | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    orders: ClassVar[bool] = True

    @property
    def must_follow(self) -> tuple[str, ...]:
        """`SizeBuckets`, unless bounds are given."""
        return ("SizeBuckets",) if self.in_flight_bytes is None else ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move waits of `local` up; a program of `CrossStep` stays as it is, for its waits are late on purpose."""
        if local.across is not None:
            return local
        in_flight_bytes, in_flight = most_in_flight(local, self.in_flight_bytes, self.in_flight)
        graph = local.graph
        pending: dict[Any, dict[Node, int]] = defaultdict(dict)  # by axis, bytes that each reduce-scatter reads
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if is_wait(node):
                for along_axis in pending.values():
                    along_axis.pop(node_at(node, 0), None)
            elif node.target is _SCATTER:
                given = node_at(node, 0)
                size_bytes = sum(made.size_bytes for made in meta.tensors(given) if made is not None)
                same_axis = pending[node.args[-1]]
                while len(same_axis) >= in_flight and size_bytes + _total(pending) > in_flight_bytes:
                    oldest = next(iter(same_axis))
                    del same_axis[oldest]
                    unmoved = not is_wait(given)  # `place` is out of date for waits
                    start = given if unmoved and place[given] > place[oldest] else node
                    for wait in list(oldest.users):
                        start.prepend(wait)
                same_axis[node] = size_bytes
        return local


def _total(pending: Mapping[Any, Mapping[Node, int]]) -> int:
    return sum(sum(along_axis.values()) for along_axis in pending.values())
