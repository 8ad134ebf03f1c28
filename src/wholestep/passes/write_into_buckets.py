"""Writes products straight into the bucket in which they are reduced, and as the part of an average that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, node_at
from ..graph.ops import CARRIED, FREE, PRODUCTS, WRITES_A_PART, costs
from ..graph.storage import shares
from ..mesh import Mesh
from .base import InPlace
from .bucket import REDUCE, SCATTER, add_call, join_rows, made_by

aten = torch.ops.aten


@dataclass(frozen=True)
class WriteIntoBuckets(InPlace):
    """Computes gradients that are matrix products in their all-reduce's bucket, without a copy.

    Nearly all bytes of a model's gradients are such. The other pieces are copied once all are there.

    An average over ranks is a sum of parts: products and copies are scaled as they are made, where a backend that sums
    and then divides passes over the bucket once more. That is done where parts are exact, a power of two of any but
    float16, which they might be too small for. A mean that is scattered in the next call stays one: that call takes it.

    Bitwise the same, but that a BLAS may add up a product in another order where its memory is aligned otherwise, as it
    is behind pieces of odd sizes: elements differ by 5e-7 of the largest in float32, by 2e-15 in float64.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Fill the buckets of `local`; where pieces differ in size between ranks they are left as they are."""
        if sum(axis.size > 1 for axis in local.mesh.axes) != 1:
            return local
        graph = local.graph
        place = {node: i for i, node in enumerate(graph.nodes)}
        carried = {node for out, node in local.results() if out.kind == "carry"}
        for node in list(graph.nodes):
            if node.target in (REDUCE, SCATTER):
                scale = _part(node, local.mesh) if node.target is REDUCE or node not in carried else None
                if _fill(graph, node_at(node, 0), place, scale or 1.0) or (scale and _scale(graph, node, scale)):
                    node.update_arg(1, "sum" if scale else node.args[1])
        return local


def _part(by: Node, mesh: Mesh) -> float | None:
    """What a rank's tensor is multiplied by to be summed up where it would be averaged; None where it stays as it is.

    Nothing here may depend on how the tensor was made: a rank that sums and one that averages compute different things,
    and what one rank makes as a product another one, of more micro-batches, makes as a sum of products.
    """
    given = node_at(by, 0)
    if by.args[1] != "avg" or made_by(given).dtype == torch.float16:
        return None
    if given.target is join_rows and given.args[1] != 1:
        return None
    ranks = mesh.axis_size(cast(str, by.args[-1]))
    return 1 / ranks if ranks & (ranks - 1) == 0 else None


def _scale(graph: Graph, by: Node, scale: float) -> bool:
    """Multiply what the collective `by` takes by `scale`."""
    given = node_at(by, 0)
    if given.target is aten.mm.default and len(given.users) == 1:
        given.target, given.args = part_of_average, (*given.args, scale)
    else:
        with graph.inserting_before(by):
            by.update_arg(0, add_call(graph, aten.mul.Tensor, (given, scale), made_by(given), given))
    return True


def _fill(graph: Graph, join: Node, place: dict[Node, int], scale: float) -> bool:
    """True if `join`, the pieces of an all-reduce, became a bucket that is filled, with all multiplied by `scale`."""
    if join.target is not join_rows or join.args[1] != 1 or len(join.users) != 1:
        return False
    pieces, whole = cast(list[Node], join.args[0]), made_by(join)
    sizes = [made_by(piece).numel for piece in pieces]
    straight = [i for i, piece in enumerate(pieces) if piece.target is aten.mm.default and len(piece.users) == 1]
    straight.sort(key=lambda i: place[pieces[i]])
    if not straight:
        return False
    with graph.inserting_before(pieces[straight[0]]):
        bucket = add_call(graph, new_bucket, (whole.numel, whole.dtype, torch.device(whole.device)), whole, join)
    for i in straight:
        with graph.inserting_before(pieces[i]):
            bucket = add_call(graph, multiply_into, (bucket, sum(sizes[:i]), *pieces[i].args, scale), whole, pieces[i])
    others = [i for i in range(len(pieces)) if i not in straight]
    if others:
        with graph.inserting_before(join):
            given = [pieces[i] for i in others]
            bucket = add_call(graph, put_pieces, (bucket, sizes, others, given, scale), whole, join)
    join.replace_all_uses_with(bucket)
    graph.erase_node(join)
    for i in straight:
        graph.erase_node(pieces[i])
    return True


# What the graph calls.
@costs(FREE)
def new_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the pieces of a bucket."""
    return torch.empty(numel, dtype=dtype, device=device)


@costs(PRODUCTS)
@shares("view")
def multiply_into(bucket: Tensor, start: int, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The product of two matrices, times `scale`, becomes the elements of `bucket` from `start` on."""
    rows, columns = a.shape[0], b.shape[1]
    made = bucket.narrow(0, start, rows * columns).view(rows, columns)
    torch.addmm(made, a, b, beta=0, alpha=scale, out=made)
    return bucket


@costs(PRODUCTS)
def part_of_average(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The product of two matrices, times `scale`."""
    made = a.new_empty((a.shape[0], b.shape[1]))
    return torch.addmm(made, a, b, beta=0, alpha=scale, out=made)


@costs(CARRIED)
@costs(WRITES_A_PART)
@shares("view")
def put_pieces(
    bucket: Tensor, sizes: Sequence[int], numbers: Sequence[int], pieces: Sequence[Tensor], scale: float
) -> Tensor:
    """Pieces, times `scale`, become those parts of `bucket`, cut into `sizes`, that `numbers` name."""
    parts: tuple[Tensor, ...] = torch.split(bucket, list(sizes))
    for number, piece in zip(numbers, pieces, strict=True):
        torch.mul(piece.reshape(-1), scale, out=parts[number])
    return bucket
