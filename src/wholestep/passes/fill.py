"""Writes products straight into the bucket in which they are reduced, instead of copying them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.graph import LocalGraph
from ..graph.ops import CARRIED, FREE, PRODUCTS, WRITES_A_PART, costs
from ..graph.storage import shares
from .base import InPlace
from .bucket import add_call, join_rows, made_by

aten = torch.ops.aten


@dataclass(frozen=True)
class Fill(InPlace):
    """Gradients that are products of matrices, which nearly all bytes of a model's are, become part of an all-reduce's
    bucket without a copy. The other pieces are copied once all are there. Bitwise the same.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Fill the buckets of `local`; where pieces differ in size between ranks they are left as they are."""
        if sum(axis.size > 1 for axis in local.mesh.axes) != 1:
            return local
        graph = local.graph
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.target is join_rows and node.args[1] == 1:
                _fill(graph, node, place)
        return local


def _fill(graph: Graph, join: Node, place: dict[Node, int]) -> None:
    pieces, whole = cast(list[Node], join.args[0]), made_by(join)
    sizes = [made_by(piece).numel for piece in pieces]
    straight = [i for i, piece in enumerate(pieces) if piece.target is aten.mm.default and len(piece.users) == 1]
    straight.sort(key=lambda i: place[pieces[i]])
    if not straight:
        return
    with graph.inserting_before(pieces[straight[0]]):
        bucket = add_call(graph, new_bucket, (whole.numel, whole.dtype, torch.device(whole.device)), whole, join)
    for i in straight:
        with graph.inserting_before(pieces[i]):
            bucket = add_call(graph, multiply_into, (bucket, sum(sizes[:i]), *pieces[i].args), whole, pieces[i])
    others = [i for i in range(len(pieces)) if i not in straight]
    if others:
        with graph.inserting_before(join):
            bucket = add_call(graph, put_pieces, (bucket, sizes, others, [pieces[i] for i in others]), whole, join)
    join.replace_all_uses_with(bucket)
    graph.erase_node(join)
    for i in straight:
        graph.erase_node(pieces[i])


# What the graph calls.
@costs(FREE)
def new_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the pieces of a bucket."""
    return torch.empty(numel, dtype=dtype, device=device)


@costs(PRODUCTS)
@shares("view")
def multiply_into(bucket: Tensor, start: int, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices becomes the elements of `bucket` from `start` on."""
    rows, columns = a.shape[0], b.shape[1]
    torch.mm(a, b, out=bucket.narrow(0, start, rows * columns).view(rows, columns))
    return bucket


@costs(CARRIED)
@costs(WRITES_A_PART)
@shares("view")
def put_pieces(bucket: Tensor, sizes: Sequence[int], numbers: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
    """Pieces become those parts of `bucket`, cut into `sizes`, that `numbers` name."""
    parts: tuple[Tensor, ...] = torch.split(bucket, list(sizes))
    for number, piece in zip(numbers, pieces, strict=True):
        parts[number].copy_(piece.reshape(-1))
    return bucket
