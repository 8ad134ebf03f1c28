"""Cuts values into pieces before ops on elements rather than after, so that no piece waits for the whole of them.

A mask of attention is made of the places of all tokens, of which a rank has some. The gradient of a mean is one number
expanded to the batch, a mask of dropout a scaled draw: of these, a loop needs a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.nodes import add_call, copy_node, drop_dead, operands
from ..layout import Extent, OfOwner, chunk_range, has_extent
from ..mesh import TIME
from ..sizes import SizeInt
from .rank_ops import take_chunk

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default)
_FACTORIES = (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
_TRIANGLES = (aten.tril.default, aten.triu.default)


def slice_early(graph: Graph) -> None:
    """Move the slices in `graph` in front of what they can be moved in front of."""
    moved = True
    while moved:
        slices = [node for node in graph.nodes if node.target is take_chunk]
        moved = sum(_moves(node) for node in slices if node.users) > 0  # all of them
        drop_dead(graph)


def _moves(cut: Node) -> bool:
    """Move one slice, and others that are the same, a step towards the inputs, if they can be moved."""
    value, dim, parts, axis = cast("tuple[Node, int, int, str]", cut.args)
    if value.target is take_chunk and value.args[-1] != TIME:
        return _moves(value)
    same = all(user.target is take_chunk and user.args[1:] == cut.args[1:] for user in value.users)
    if value.target in _FACTORIES:
        return _resized(cut, value, dim, parts, axis)
    if value.target is aten.expand.default and meta.one_tensor(value).shape[dim] != _size_before(value, dim):
        return _resized(cut, value, dim, parts, axis)
    if not same or meta.tensor(value) is None:
        return False
    pointwise = _torch.is_op(value.target) and torch.Tag.pointwise in value.target.tags
    shrinks = any(meta.size_bytes(operand) > meta.size_bytes(value) for operand in operands(value))
    if (shrinks and axis == TIME) or not (pointwise or value.target in (*_COPIES, *_TRIANGLES, aten.expand.default)):
        return False
    diagonal = _diagonal(value, dim, parts, axis) if value.target in _TRIANGLES else None
    if value.target in _TRIANGLES and diagonal is None:
        return False
    shape, slices = meta.one_tensor(value).shape, dict[Node, Node]()
    with cut.graph.inserting_before(min(user for user in value.users if user.users)):
        for operand in operands(value):
            tensor = meta.one_tensor(operand)
            at = dim - len(shape) + len(tensor.shape)
            if at < 0 or tensor.shape[at] != shape[dim]:
                continue
            length = meta.one_tensor(cut).shape[dim]
            piece = replace(tensor, shape=(*tensor.shape[:at], length, *tensor.shape[at + 1 :]))
            args = (operand, at, parts, axis)
            slices[operand] = add_call(cut.graph, take_chunk, args, piece, operand, f"{operand.name}_piece")
            meta.set_strided(slices[operand], True)
        new = copy_node(value, cut.graph, lambda operand: slices.get(operand, operand))
    if value.target is aten.expand.default:
        sizes = cast(Sequence[Any], value.args[1])
        new.args = new.args[0], [*sizes[:dim], -1, *sizes[dim + 1 :]]
        meta.set_ranked(new, has_extent(new.args))
    if diagonal is not None:
        new.args = new.args[0], cast(Any, diagonal)
        meta.set_ranked(new, has_extent(diagonal))
    for same_cut in value.users:
        _replace(same_cut, new, strided=True)
    return True


def _size_before(expand: Node, dim: int) -> int:
    """The size, before it is expanded, of what becomes `dim`."""
    shape = meta.one_tensor(cast(Node, expand.args[0])).shape
    at = dim - len(meta.one_tensor(expand).shape) + len(shape)
    return shape[at] if at >= 0 else 1


def _diagonal(value: Node, dim: int, parts: int, axis: str) -> int | OfOwner | None:
    """The diagonal of a piece of a triangle. None where the size of `dim` may differ between ranks: what starts a piece
    is not known then.
    """
    diagonal: Any = value.args[1] if len(value.args) > 1 else 0
    shape = meta.one_tensor(value).shape
    sign = {len(shape) - 2: 1, len(shape) - 1: -1}.get(dim)
    if sign is None:
        return diagonal
    if isinstance(diagonal, OfOwner) or not _is_of_no_input(value):
        return None
    starts = (chunk_range(shape[dim], parts, piece)[0] for piece in range(parts))
    return OfOwner(axis, tuple(diagonal + sign * start for start in starts), start=True)


def _is_of_no_input(value: Node) -> bool:
    """Whether `value` is made of numbers that are the same on all ranks alone, as the places of all tokens."""
    reached = [value]
    for node in reached:
        if node.op != "call_function" or node.target is take_chunk or has_extent(node.args):
            return False
        reached += (operand for operand in operands(node) if operand not in reached)
    return True


def _replace(cut: Node, new: Node, strided: bool) -> None:
    """Let `new` be the piece that `cut` is."""
    tensor, shape = meta.one_tensor(new), meta.one_tensor(cut).shape
    piece = replace(tensor, shape=shape) if new.target is aten.expand.default else meta.with_shape(tensor, shape)
    meta.set_tensors(new, (piece,))
    meta.set_strided(new, strided)
    cut.replace_all_uses_with(new)


def _resized(cut: Node, value: Node, dim: int, parts: int, axis: str) -> bool:
    """A piece of an expanded or constant tensor: the same with another size."""
    expands = value.target is aten.expand.default
    sizes = list(cast(Sequence[Any], value.args[1 if expands else 0]))
    if isinstance(sizes[dim], Extent) and sizes[dim].times > 1:
        return False
    sizes[dim] = _piece_of(sizes[dim], axis, parts)
    with cut.graph.inserting_before(cut):
        new = copy_node(value, cut.graph, lambda operand: operand)
    new.args = (value.args[0], sizes) if expands else (sizes, *value.args[1:])
    meta.set_ranked(new, has_extent(sizes))
    _replace(cut, new, strided=meta.is_strided(cut))
    return True


def _piece_of(size: int | Extent, axis: str, parts: int) -> int | Extent:
    if isinstance(size, Extent):
        return Extent(size.size, (*size.axes, (axis, parts)))
    uneven = isinstance(size, SizeInt) or size % parts
    return Extent(size, ((axis, parts),)) if uneven else size // parts
