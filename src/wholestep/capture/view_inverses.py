"""The inverses of views: a tensor in which what a view shows has become something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node

from ..graph import meta

aten = torch.ops.aten

Put = Callable[[Callable[..., Node], Node, Node, Node], Node]
"""(call, view, source, new) -> `source` with `new` where it is seen through `view`; `call` adds a node to the graph."""


def _as_it_is(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return new


def _reshaped(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    shape = list(meta.value(source).shape)
    try:
        return call(aten.view.default, new, shape)
    except RuntimeError:  # `new` does not lie in memory as the view did
        return call(aten.view.default, call(aten.clone.default, new, memory_format=torch.contiguous_format), shape)


def _permuted_back(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    order = [dim % len(_given(view, 1)) for dim in _given(view, 1)]
    return call(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


def _again(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return call(view.target, new, *view.args[1:])


def _squeezed(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return call(aten.squeeze.dim, new, _given(view, 1))


def _scattered(target: Any) -> Put:
    def put(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
        return call(target, source, new, *view.args[1:], **view.kwargs)

    return put


def _sections(view: Node) -> tuple[int, list[int]]:
    """The dim that a split cuts, and the lengths of its parts."""
    whole = cast(Node, view.args[0])
    dim = int(cast(Any, whole.kwargs.get("dim", whole.args[2] if len(whole.args) > 2 else 0)))
    return dim, [int(part.shape[dim]) for part in meta.value(whole)]


def _section(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    dim, lengths = _sections(view)
    index = cast(int, view.args[1])
    start = sum(lengths[:index])
    return call(aten.slice_scatter.default, source, new, dim, start, start + lengths[index])


def _row(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    whole = cast(Node, view.args[0])
    dim = whole.kwargs.get("dim", whole.args[1] if len(whole.args) > 1 else 0)
    return call(aten.select_scatter.default, source, new, dim, view.args[1])


def _given(view: Node, index: int) -> Any:
    return view.args[index]


VIEWS: dict[Any, Put] = {
    aten.detach.default: _as_it_is,
    aten.alias.default: _as_it_is,
    aten.lift_fresh.default: _as_it_is,
    aten.view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _squeezed,
    aten.t.default: _again,
    aten.transpose.int: _again,
    aten.permute.default: _permuted_back,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default),
}
"""Views of one tensor as one tensor."""

PIECES: dict[Any, Put] = {
    aten.split.Tensor: _section,
    aten.split_with_sizes.default: _section,
    aten.unbind.int: _row,
}
"""Views of one tensor as several; the view is the node that picks one."""
