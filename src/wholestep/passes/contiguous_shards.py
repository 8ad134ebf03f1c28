"""Gathers parameters from one piece of memory in which they rest side by side, instead of copying them there first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, Role, operands
from ..graph.ops import FREE, costs
from ..graph.storage import shares, storages
from ..graph.verify import is_mutating, is_wait
from .base import InPlace
from .bucket import GATHER, join_rows


@dataclass(frozen=True)
class ContiguousShards(InPlace):
    """Gathers shards that lie side by side in memory from there, without a copy into a bucket.

    `runtime.shard_buffers` puts them there.

    Every parameter is of one bucket, the first that gathers it; other buckets are copied together as before. So are
    those of which a part is updated while the gather may still read it. Bitwise the same. It goes last, for it has to
    see which operations write in place.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """`local` with `side_by_side` in place of `join_rows` where it can be."""
        graph = local.graph
        params = {node for given, node in local.placeholders() if given.role is Role.PARAM}
        claimed: dict[Node, tuple[Node, ...]] = {}
        place = {node: i for i, node in enumerate(graph.nodes)}
        writes = _writes(graph, params)
        for node in graph.nodes:
            if not _gathers(node):
                continue
            pieces = tuple(operands(node))
            if not params.issuperset(pieces) or len(set(pieces)) < len(pieces):
                continue
            free = all(claimed.get(piece, pieces) == pieces for piece in pieces)
            if free and not _written(writes, set(pieces), place[node], _until(node, place)):
                node.target = side_by_side
                claimed |= dict.fromkeys(pieces, pieces)
        return local


def _gathers(node: Node) -> bool:
    return node.target is join_rows and all(user.target is GATHER for user in node.users)


def _until(join: Node, place: dict[Node, int]) -> float:
    """Where the last reader of a bucket is known to have read it."""
    ends = [place[wait] if is_wait(wait) else float("inf") for gather in join.users for wait in gather.users]
    return max(ends, default=float("inf"))


def _written(writes: list[tuple[int, set[Node]]], pieces: set[Node], start: int, end: float) -> bool:
    return any(start < at < end and pieces & written for at, written in writes)


def _writes(graph: Graph, params: set[Node]) -> list[tuple[int, set[Node]]]:
    """The places of nodes that write in place, with the parameters in whose memory that may be."""
    home: dict[Node, set[Node]] = {}
    for storage in storages(graph):
        for node in storage.members if storage.node in params else ():
            home.setdefault(node, set()).add(storage.node)
    found: list[tuple[int, set[Node]]] = []
    for at, node in enumerate(graph.nodes):
        if node.op == "call_function" and is_mutating(node):
            found.append((at, set[Node]().union(*(home.get(given, ()) for given in operands(node)))))
    return found


def buckets(local: LocalGraph) -> list[list[int]]:
    """Numbers of the inputs that should rest side by side, in their order."""
    placeholders = [node for node in local.graph.nodes if node.op == "placeholder"]
    number = {node: i for i, node in enumerate(placeholders)}
    lists = [[number[piece] for piece in cast(list[Node], node.args[0])] for node in _sides(local.graph)]
    return [list(one) for one in dict.fromkeys(map(tuple, lists))]


def _sides(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is side_by_side]


@costs(FREE)
@shares("view")
def side_by_side(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row: their own memory where they rest side by side, else a copy."""
    assert parts == 1, "gathers take rows as they are"
    first = pieces[0]
    start = end = first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for piece in pieces:
        if piece.storage_offset() != end or not piece.is_contiguous() or piece.untyped_storage().data_ptr() != memory:
            return join_rows(pieces, parts)
        end += piece.numel()
    return first.as_strided((end - start,), (1,), start)
