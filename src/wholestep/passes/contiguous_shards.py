"""All-gathers parameters straight from adjacent memory instead of copying them into a bucket first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor
from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, Role
from ..graph.nodes import is_mutating, is_wait, operands
from ..graph.op_kinds import FREE, priced_like
from ..graph.storage import shares, storages
from .base import InPlace
from .bucket import GATHER, join_rows


@dataclass(frozen=True)
class ContiguousShards(InPlace):
    """All-gathers shards from where they are stored, without a copy into a bucket. Bitwise the same.

    `runtime.shard_buffers` stores the shards of each bucket next to each other. A parameter belongs to the first bucket
    that gathers it; later buckets are still copied. So is a bucket with a part that is updated while the gather may
    read it: the pass comes last, after the one that decides which ops write in place.
    """

    must_precede: ClassVar[tuple[str, ...]] = ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Replace `join_rows` by `side_by_side` where that is safe."""
        graph = local.graph
        params = {node for param, node in local.placeholders() if param.role is Role.PARAM}
        claimed: dict[Node, tuple[Node, ...]] = {}
        place = {node: i for i, node in enumerate(graph.nodes)}
        writes: list[tuple[int, set[Node]]] | None = None
        for node in graph.nodes:
            if node.target is not join_rows or any(user.target is not GATHER for user in node.users):
                continue
            pieces = tuple(operands(node))
            if not params.issuperset(pieces) or len(set(pieces)) < len(pieces):
                continue
            unclaimed = all(claimed.get(piece, pieces) == pieces for piece in pieces)
            end = _last_read(node, place)
            writes = _writes(graph, params) if writes is None else writes
            written = any(place[node] < at < end and stored & set(pieces) for at, stored in writes)
            if unclaimed and not written:
                node.target = side_by_side
                claimed |= dict.fromkeys(pieces, pieces)
        return local


def _last_read(join: Node, place: dict[Node, int]) -> float:
    """Position of the wait that ends the last read of a bucket; infinity where there is none."""
    ends = [place[wait] if is_wait(wait) else float("inf") for gather in join.users for wait in gather.users]
    return max(ends, default=float("inf"))


def _writes(graph: Graph, params: set[Node]) -> list[tuple[int, set[Node]]]:
    """Positions of the nodes that write in place, with the parameters whose memory they may write."""
    params_of: dict[Node, set[Node]] = {}
    for storage in storages(graph):
        for node in storage.members if storage.node in params else ():
            params_of.setdefault(node, set()).add(storage.node)
    return [
        (at, set[Node]().union(*(params_of.get(operand, ()) for operand in operands(node))))
        for at, node in enumerate(graph.nodes)
        if node.op == "call_function" and is_mutating(node)
    ]


def buckets(local: LocalGraph) -> list[list[int]]:
    """For each bucket, the numbers of the inputs to be stored next to each other, in order."""
    placeholders = [node for node in local.graph.nodes if node.op == "placeholder"]
    number = {node: i for i, node in enumerate(placeholders)}
    joins = [node for node in local.graph.nodes if node.target is side_by_side]
    lists = [tuple(number[piece] for piece in cast(list[Node], node.args[0])) for node in joins]
    return [list(numbers) for numbers in dict.fromkeys(lists)]


@priced_like(FREE)
@shares("view")
def side_by_side(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row: a view where they are adjacent in memory, else a copy."""
    assert parts == 1, "gathers take rows as they are"
    first = pieces[0]
    start = end = first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for piece in pieces:
        if piece.storage_offset() != end or not piece.is_contiguous() or piece.untyped_storage().data_ptr() != memory:
            return join_rows(pieces, parts)
        end += piece.numel()
    return first.as_strided((end - start,), (1,), start)
