"""Writes gradients that are matrix products straight into the bucket of their reduction, scaled for an average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.graph import LocalGraph
from ..graph.meta import one_tensor, set_computes
from ..graph.nodes import add_call, node_at
from ..graph.op_kinds import BUCKET_COPIES, FREE, PRODUCTS, WRITES_A_PART, priced_like
from ..graph.storage import shares
from ..mesh import Mesh
from .base import InPlace
from .bucket import REDUCE, SCATTER, join_rows
from .coalesced import coalesce

aten = torch.ops.aten


@dataclass(frozen=True)
class WriteIntoBuckets(InPlace):
    """Computes gradients that are matrix products in their all-reduce's bucket, without a copy.

    Nearly all bytes of a model's gradients are matrix products. Other pieces are copied into the bucket once all exist.

    An average over ranks becomes a sum: products and copies are scaled when they are written, which saves the backend
    a pass over the bucket to divide it. This needs an exact scale: a power of two ranks, and no float16, whose values
    could underflow. A reduce-scatter that `CrossStep` carries into the next call stays an average.

    Bitwise the same, except that a BLAS may sum a product in another order if its output is aligned differently, as it
    is after pieces of odd sizes: elements differ by 5e-7 of the largest in float32, by 2e-15 in float64.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Fill the buckets of `local`; no change on several axes, where sizes of pieces differ between ranks."""
        if sum(axis.size > 1 for axis in local.mesh.axes) != 1:
            return local
        graph = local.graph
        place = {node: i for i, node in enumerate(graph.nodes)}
        carried = {node for out, node in local.results() if out.kind == "carry"}
        for node in list(graph.nodes):
            if node.target in (REDUCE, SCATTER):
                scale = _scale_of(node, local.mesh) if node.target is REDUCE or node not in carried else None
                if _fill(graph, node_at(node, 0), place, scale or 1.0) or (scale and _scale(graph, node, scale)):
                    node.update_arg(1, "sum" if scale else node.args[1])
        return local


def _scale_of(by: Node, mesh: Mesh) -> float | None:
    """The factor that turns the average of collective `by` into a sum; None where it stays an average.

    The decision must not depend on which op made the tensor: all ranks must decide the same, and a product on one rank
    is a sum of products on another that has more micro-batches.
    """
    operand = node_at(by, 0)
    if by.args[1] != "avg" or one_tensor(operand).dtype == torch.float16:
        return None
    if operand.target is coalesce or (operand.target is join_rows and operand.args[1] != 1):
        return None
    ranks = mesh.axis_size(cast(str, by.args[-1]))
    return 1 / ranks if ranks & (ranks - 1) == 0 else None


def _scale(graph: Graph, by: Node, scale: float) -> bool:
    """Multiply the operand of the collective `by` by `scale`."""
    operand = node_at(by, 0)
    if operand.target is aten.mm.default and len(operand.users) == 1:
        operand.target, operand.args = part_of_average, (*operand.args, scale)
        set_computes(operand, None)
    else:
        with graph.inserting_before(by):
            by.update_arg(0, add_call(graph, aten.mul.Tensor, (operand, scale), one_tensor(operand), operand))
    return True


def _fill(graph: Graph, join: Node, place: dict[Node, int], scale: float) -> bool:
    """Replace `join`, the pieces of an all-reduce, by a bucket into which each is written times `scale`. False if it is
    no such join, or no piece is a matrix product.
    """
    if join.target is not join_rows or join.args[1] != 1 or len(join.users) != 1:
        return False
    pieces, joined = cast(list[Node], join.args[0]), one_tensor(join)
    sizes = [one_tensor(piece).numel for piece in pieces]
    products = [i for i, piece in enumerate(pieces) if piece.target is aten.mm.default and len(piece.users) == 1]
    products.sort(key=lambda i: place[pieces[i]])
    if not products:
        return False
    with graph.inserting_before(pieces[products[0]]):
        bucket = add_call(graph, new_bucket, (joined.numel, joined.dtype, torch.device(joined.device)), joined, join)
    for i in products:
        with graph.inserting_before(pieces[i]):
            bucket = add_call(graph, multiply_into, (bucket, sum(sizes[:i]), *pieces[i].args, scale), joined, pieces[i])
    numbers = [i for i in range(len(pieces)) if i not in products]
    if numbers:
        with graph.inserting_before(join):
            copied = [pieces[i] for i in numbers]
            bucket = add_call(graph, put_pieces, (bucket, sizes, numbers, copied, scale), joined, join)
    join.replace_all_uses_with(bucket)
    graph.erase_node(join)
    for i in products:
        graph.erase_node(pieces[i])
    return True


# Functions that graphs call.
@priced_like(FREE)
def new_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the pieces of a bucket."""
    return torch.empty(numel, dtype=dtype, device=device)


@priced_like(PRODUCTS)
@shares("view")
def multiply_into(bucket: Tensor, start: int, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Write `scale * a @ b` into `bucket`, from element `start` on."""
    rows, columns = a.shape[0], b.shape[1]
    target = bucket.narrow(0, start, rows * columns).view(rows, columns)
    torch.addmm(target, a, b, beta=0, alpha=scale, out=target)
    return bucket


@priced_like(PRODUCTS)
def part_of_average(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`scale * a @ b`."""
    product = a.new_empty((a.shape[0], b.shape[1]))
    return torch.addmm(product, a, b, beta=0, alpha=scale, out=product)


@priced_like(BUCKET_COPIES)
@priced_like(WRITES_A_PART)
@shares("view")
def put_pieces(
    bucket: Tensor, sizes: Sequence[int], numbers: Sequence[int], pieces: Sequence[Tensor], scale: float
) -> Tensor:
    """Split `bucket` into `sizes`, and write each piece times `scale` into the part with its number: on a GPU by two
    kernels for all pieces.
    """
    slots: tuple[Tensor, ...] = torch.split(bucket, list(sizes))
    parts, rows = [slots[number] for number in numbers], [piece.reshape(-1) for piece in pieces]
    if bucket.is_cuda:
        put_together(parts, rows, scale)
        return bucket
    for part, row in zip(parts, rows, strict=True):
        torch.mul(row, scale, out=part)
    return bucket


def put_together(parts: Sequence[Tensor], rows: Sequence[Tensor], scale: float) -> None:
    """Write each row times `scale` into its part; the same bits as one by one."""
    aten._foreach_copy_.default(parts, rows)
    if scale != 1.0:
        aten._foreach_mul_.Scalar(parts, scale)
