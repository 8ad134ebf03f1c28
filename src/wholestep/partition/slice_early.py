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
    known = _torch.is_op(value.target) and torch.Tag.pointwise in value.target.tags
    shrinks = any(meta.size_bytes(given) > meta.size_bytes(value) for given in operands(value))
    if shrinks or (not known and value.target not in _COPIES):
        return False
    shape, slices = meta.one_tensor(value).shape, dict[Node, Node]()
    with cut.graph.inserting_before(cut):
        for given in operands(value):
            found = meta.one_tensor(given)
            at = dim - len(shape) + len(found.shape)
            if at < 0 or found.shape[at] != shape[dim]:
                continue
            length = meta.one_tensor(cut).shape[dim]
            made = replace(found, shape=(*found.shape[:at], length, *found.shape[at + 1 :]))
            args = (given, at, parts, axis)
            slices[given] = add_call(cut.graph, take_chunk, args, made, given, f"{given.name}_piece")
            meta.set_strided(slices[given], True)
        new = copy_node(value, cut.graph, lambda given: slices.get(given, given))
    _replace(cut, new, strided=True)
    return True


def _replace(cut: Node, new: Node, strided: bool) -> None:
    """Let `new` be the piece that `cut` is."""
    found, shape = meta.one_tensor(new), meta.one_tensor(cut).shape
    made = replace(found, shape=shape) if new.target is aten.expand.default else meta.with_shape(found, shape)
    meta.set_tensors(new, (made,))
    meta.set_strided(new, strided)
    cut.replace_all_uses_with(new)
    cut.graph.erase_node(cut)


def _resized(cut: Node, value: Node, dim: int, parts: int, axis: str) -> bool:
    """A piece of an expanded or constant tensor: the same with another size."""
    expands = value.target is aten.expand.default
    sizes = list(cast(Sequence[Any], value.args[1 if expands else 0]))
    if expands:
        found, whole = meta.one_tensor(cast(Node, value.args[0])), meta.one_tensor(value)
        at = dim - len(whole.shape) + len(found.shape)
        if sizes[dim] == -1 or (at >= 0 and found.shape[at] != 1):
            return False
    sizes[dim] = _piece_of(sizes[dim], axis, parts)
    with cut.graph.inserting_before(cut):
        new = copy_node(value, cut.graph, lambda given: given)
    new.args = (value.args[0], sizes) if expands else (sizes, *value.args[1:])
    meta.set_ranked(new, has_extent(sizes))
    _replace(cut, new, strided=meta.is_strided(cut))
    return True


def _piece_of(size: int | Extent, axis: str, parts: int) -> int | Extent:
    if isinstance(size, Extent):
        return Extent(size.size, (*size.axes, (axis, parts)))
    return size // parts if size % parts == 0 else Extent(size, ((axis, parts),))
