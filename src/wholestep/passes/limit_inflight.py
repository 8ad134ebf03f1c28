"""Bounds the gradients in flight: the operand of a reduction stays allocated until the reduction is waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_wait, node_at
from .base import InPlace
from .bucket import REDUCE, SCATTER, adds_up


@dataclass(frozen=True)
class LimitInflight(InPlace):
    """Limits the gradients that are in flight. Bitwise the same.

    Before a reduce-scatter starts, the program waits for the oldest ones along its axis until all in flight read at
    most `in_flight_bytes` of the program's sizes, or fewer than `in_flight` are left along that axis. Stages of
    hierarchical collectives along other axes start regardless.

    An all-reduce in the body of a loop counts as a reduce-scatter does, where the loop adds up a part of its result.

    Without this pass full gradients stay allocated until the end of the backward, because only the update waits for
    them. The link stays busy with the newer reductions.
    """

    must_follow: ClassVar[tuple[str, ...]] = ("SizeBuckets",)
    orders: ClassVar[bool] = True

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move waits of `local` up; a program of `CrossStep` stays as it is, for its waits are late on purpose."""
        if local.across is not None:
            return local
        assert local.sizes is not None, "SizeBuckets came before"
        sizes, graph = local.sizes, local.graph
        pending: dict[Any, dict[Node, int]] = defaultdict(dict)  # by axis, bytes that each reduce-scatter reads
        pending_bytes = 0
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if is_wait(node):
                for along_axis in pending.values():
                    pending_bytes -= along_axis.pop(node_at(node, 0), 0)
            elif node.target is SCATTER or (node.target is REDUCE and adds_up(node)):
                operand = node_at(node, 0)
                size_bytes = meta.size_bytes(operand)
                same_axis = pending[node.args[-1]]
                while len(same_axis) >= sizes.in_flight and size_bytes + pending_bytes > sizes.in_flight_bytes:
                    oldest = next(iter(same_axis))
                    pending_bytes -= same_axis.pop(oldest)
                    unmoved = not is_wait(operand)  # `place` is out of date for waits
                    start = operand if unmoved and place[operand] > place[oldest] else node
                    for wait in list(oldest.users):
                        start.prepend(wait)
                same_axis[node] = size_bytes
                pending_bytes += size_bytes
        return local
