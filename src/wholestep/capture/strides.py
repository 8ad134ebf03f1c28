"""Rewrites `as_strided` so that it depends on the elements of its operand only, not on the storage.

`as_strided` addresses the storage: its offset counts from the start of the storage, and its strides may leave the
operand. A rank's operand is a shard or a view of a gathered tensor, with another storage. So each call becomes a view
of a contiguous tensor that contains all elements read, with an offset relative to that tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.meta import overlaps, span
from ..graph.nodes import add_node, arguments_of, node_at

aten = torch.ops.aten
_SCATTER = aten.as_strided_scatter.default
_TARGETS = (aten.as_strided.default, aten.as_strided_copy.default, _SCATTER)


def count_from_tensors(graph: Graph) -> None:
    """Rewrite every `as_strided` of the graph; refuse views of memory outside of the tensors of the step."""
    for node in [n for n in graph.nodes if n.target in _TARGETS]:
        call = _call(node)
        if call is not None and not call.is_plain:
            node.replace_all_uses_with(_rewritten(node, call))
            graph.erase_node(node)


@dataclass(frozen=True)
class _Call:
    """An `as_strided` call: `size` and `stride`, from element `start` of `source` in memory order."""

    source: Node
    tensor: Tensor
    size: list[int]
    stride: list[int]
    start: int
    absolute: bool

    @property
    def is_plain(self) -> bool:
        return not self.absolute and self.start == 0 and self.tensor.is_contiguous()


def _call(node: Node) -> _Call | None:
    """Return a node's view relative to the nearest tensor that contains it; None if no tensor was recorded."""
    source, values = node_at(node, 0), arguments_of(node)
    have = meta.value(source)
    if not isinstance(have, Tensor):
        return None
    size, stride, offset = list(values["size"]), list(values["stride"]), values.get("storage_offset")
    position = have.storage_offset() if offset is None else offset
    extent = span(size, stride)
    around: Node | None = source
    while around is not None:
        tensor = meta.value(around)
        start = position - tensor.storage_offset() if extent else 0
        if _is_dense(tensor) and start >= 0 and start + extent <= tensor.numel():
            return _Call(around, tensor, size, stride, start, offset is not None)
        around = _viewed(around) if node.target is not _SCATTER else None
    where = f"{have.numel()} elements of a tensor of shape {tuple(have.shape)} and strides {tuple(have.stride())}"
    raise CaptureError(
        f"as_strided of size {tuple(size)}, strides {tuple(stride)} and offset {position} leaves the {where}",
        "as_strided views inside a tensor without gaps",
        "call as_strided on the tensor that has these elements, or on `.contiguous()` of it",
        meta.source_line(node),
    )


def _viewed(view: Node) -> Node | None:
    if view.op != "call_function" or not view.all_input_nodes:
        return None
    source = view.all_input_nodes[0]
    if _torch.is_getitem(view.target):
        return _viewed(source) if source.op == "call_function" else None
    return source if is_view(view) and isinstance(meta.value(source), Tensor) else None


def is_view(node: Node) -> bool:
    """Return whether an op returns a view of its operand."""
    schema = _torch.schema_of(node.target) if _torch.is_op(node.target) else None
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps and overlaps."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return span(shape, stride) == tensor.numel() and not overlaps(shape, stride)


def insert_call(before: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert a call before a node, with its source line."""
    with before.graph.inserting_before(before):
        node = add_node(before.graph, "call_function", target, args, kwargs, None)
    meta.copy_origin(before, node)
    meta.recompute_value(node)
    return node


def _rewritten(node: Node, call: _Call) -> Node:
    add = partial(insert_call, node)
    order = sorted(range(call.tensor.dim()), key=lambda d: (call.tensor.shape[d] > 1, -call.tensor.stride(d)))
    contiguous = call.source
    if not call.tensor.is_contiguous():
        contiguous = add(aten.permute.default, contiguous, order)
    rows, end = contiguous, call.start + span(call.size, call.stride)
    if call.start:
        rows = add(aten.view.default, contiguous, [call.tensor.numel()])
    part = add(aten.slice.Tensor, rows, 0, call.start, end) if call.start else rows
    if node.target is not _SCATTER:
        view = add(aten.as_strided.default, part, call.size, call.stride)
        copied = node.target is aten.as_strided_copy.default
        return add(aten.clone.default, view, memory_format=torch.contiguous_format) if copied else view
    scattered = add(_SCATTER, part, node.args[1], call.size, call.stride)
    if call.start:
        scattered = add(aten.slice_scatter.default, rows, scattered, 0, call.start, end)
        scattered = add(aten.view.default, scattered, list(meta.value(contiguous).shape))
    if contiguous is not call.source:
        scattered = add(aten.permute.default, scattered, [order.index(d) for d in range(len(order))])
    return scattered
