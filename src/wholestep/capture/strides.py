"""Says of every view by strides which elements it reads, wherever its tensor lies in memory.

`as_strided` counts in memory: from the start of the storage where it is given an offset, and past the ends of its
tensor where its strides lead there. A rank holds a piece of that tensor, or a view of what it gathered: other memory.
So each becomes a view of a tensor that has all that it reads, row by row in memory, counted from where that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.graph import node_at
from ..graph.meta import overlaps

aten = torch.ops.aten
_SCATTER = aten.as_strided_scatter.default
_TARGETS = (aten.as_strided.default, aten.as_strided_copy.default, _SCATTER)


def count_from_tensors(graph: Graph) -> None:
    """Rewrite every view by strides so that it depends on the elements of its tensor alone.

    Raises:
        CaptureError: one reads or writes memory that belongs to no tensor of the step.
    """
    for node in [n for n in graph.nodes if n.target in _TARGETS]:
        call = _call(node)
        if call is not None and not call.is_plain:
            made = _Writer(graph, node).write(call)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


@dataclass(frozen=True)
class _Call:
    """A view by strides: `size` and `stride`, from element `start` of `source` in the order of memory."""

    source: Node
    whole: Tensor
    size: list[int]
    stride: list[int]
    start: int
    absolute: bool

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last."""
        return _extent(self.size, self.stride)

    @property
    def is_plain(self) -> bool:
        """True where it counts from the first element of a tensor whose elements lie row by row."""
        return not self.absolute and self.start == 0 and self.whole.is_contiguous()


def _call(node: Node) -> _Call | None:
    """What a node reads, of the nearest tensor that has all of it; None where a trace recorded no tensor."""
    source, given = node_at(node, 0), [a.name for a in _torch.schema_of(node.target).arguments]
    values = {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    have = meta.value(source)
    if not isinstance(have, Tensor):
        return None
    size, stride = list(cast(Sequence[int], values["size"])), list(cast(Sequence[int], values["stride"]))
    offset = cast("int | None", values.get("storage_offset"))
    at = have.storage_offset() if offset is None else offset
    reach = _extent(size, stride)
    around: Node | None = source
    while around is not None:
        whole = meta.value(around)
        start = at - whole.storage_offset() if reach else 0
        if _is_dense(whole) and start >= 0 and start + reach <= whole.numel():
            return _Call(around, whole, size, stride, start, offset is not None)
        around = _seen(around) if node.target is not _SCATTER else None
    where = f"{have.numel()} elements of a tensor of shape {tuple(have.shape)} and strides {tuple(have.stride())}"
    raise CaptureError(
        f"as_strided of size {tuple(size)}, strides {tuple(stride)} and offset {at} leaves the {where}",
        "views by strides that stay inside a tensor without gaps",
        "call as_strided on the tensor that has these elements, or on `.contiguous()` of it",
        meta.source_line(node),
    )


def _seen(view: Node) -> Node | None:
    """The tensor that a view shows."""
    if view.op != "call_function" or not view.all_input_nodes:
        return None
    source = view.all_input_nodes[0]
    if _torch.is_getitem(view.target):
        return _seen(source) if source.op == "call_function" else None
    shows = _torch.is_op(view.target) and any(r.alias_info is not None for r in _torch.schema_of(view.target).returns)
    shows = shows and not _torch.schema_of(cast(Any, view.target)).is_mutable
    return source if shows and isinstance(meta.value(source), Tensor) else None


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _is_dense(tensor: Tensor) -> bool:
    """True where the elements fill a stretch of memory, each in a place of its own."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return _extent(shape, stride) == tensor.numel() and not overlaps(shape, stride)


class _Writer:
    """New nodes in the place of one."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def write(self, call: _Call) -> Node:
        """The node that makes what the old one made."""
        order = sorted(range(call.whole.dim()), key=lambda d: (call.whole.shape[d] > 1, -call.whole.stride(d)))
        turned = call.source
        if not call.whole.is_contiguous():
            turned = self.add(aten.permute.default, turned, order)
        rows, end = turned, call.start + call.reach
        if call.start:
            rows = self.add(aten.view.default, turned, [call.whole.numel()])
        part = self.add(aten.slice.Tensor, rows, 0, call.start, end) if call.start else rows
        if self.node.target is aten.as_strided.default:
            return self.add(aten.as_strided.default, part, call.size, call.stride)
        if self.node.target is aten.as_strided_copy.default:
            view = self.add(aten.as_strided.default, part, call.size, call.stride)
            return self.add(aten.clone.default, view, memory_format=torch.contiguous_format)
        made = self.add(_SCATTER, part, self.node.args[1], call.size, call.stride)
        if call.start:
            made = self.add(aten.slice_scatter.default, rows, made, 0, call.start, end)
            made = self.add(aten.view.default, made, list(meta.value(turned).shape))
        if turned is not call.source:
            made = self.add(aten.permute.default, made, [order.index(d) for d in range(len(order))])
        return made

    def add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call before the old node, from the same place in the user's code."""
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        meta.copy_origin(self.node, made)
        meta.set_made_again(made)
        return made
