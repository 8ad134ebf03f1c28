"""Cuts values into pieces before ops on elements rather than after, so that no piece waits for the whole of them.

The gradient of a mean is one number expanded to the batch, a mask of dropout a scaled draw: of these, a loop needs a
piece at a time.
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
from ..layout import Extent, has_extent
from ..mesh import TIME
from .rank_ops import take_chunk

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default)
_FACTORIES = (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)


def slice_early(graph: Graph) -> None:
    """Move the slices along `time` in `graph` in front of what they can be moved in front of."""
    moved = True
    while moved:
        slices = [node for node in graph.nodes if node.target is take_chunk and node.args[-1] == TIME]
        moved = sum(map(_moves, slices)) > 0  # all of them
        drop_dead(graph)


def _moves(cut: Node) -> bool:
    """Move one slice a step towards the inputs, if it can be moved."""
    value, dim, parts, axis = cast("tuple[Node, int, int, str]", cut.args)
    if value.target is take_chunk and value.args[-1] != TIME:
        return _moves(value)
    same = all(user.target is take_chunk and user.args[1:] == cut.args[1:] for user in value.users)
    if value.target is aten.expand.default or value.target in _FACTORIES:
        return _resized(cut, value, dim, parts, axis)
    if not same or meta.tensor(value) is None:
        return False
    pointwise = _torch.is_op(value.target) and torch.Tag.pointwise in value.target.tags
    shrinks = any(meta.size_bytes(operand) > meta.size_bytes(value) for operand in operands(value))
    if shrinks or (not pointwise and value.target not in _COPIES):
        return False
    shape, slices = meta.one_tensor(value).shape, dict[Node, Node]()
    with cut.graph.inserting_before(cut):
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
    _replace(cut, new, strided=True)
    return True


def _replace(cut: Node, new: Node, strided: bool) -> None:
    """Let `new` be the piece that `cut` is."""
    tensor, shape = meta.one_tensor(new), meta.one_tensor(cut).shape
    piece = replace(tensor, shape=shape) if new.target is aten.expand.default else meta.with_shape(tensor, shape)
    meta.set_tensors(new, (piece,))
    meta.set_strided(new, strided)
    cut.replace_all_uses_with(new)
    cut.graph.erase_node(cut)


def _resized(cut: Node, value: Node, dim: int, parts: int, axis: str) -> bool:
    """A piece of an expanded or constant tensor: the same with another size."""
    expands = value.target is aten.expand.default
    sizes = list(cast(Sequence[Any], value.args[1 if expands else 0]))
    if expands:
        source, expanded = meta.one_tensor(cast(Node, value.args[0])), meta.one_tensor(value)
        at = dim - len(expanded.shape) + len(source.shape)
        if sizes[dim] == -1 or (at >= 0 and source.shape[at] != 1):
            return False
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
    return size // parts if size % parts == 0 else Extent(size, ((axis, parts),))
