"""Inverses of view ops: compute the new value of a tensor from the new value of a view of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node

from ..graph import meta

aten = torch.ops.aten

Put = Callable[[Callable[..., Node], Node, Node, Node], Node]
"""(call, view, source, new) -> `source` with the elements of `view` replaced by `new`; `call` inserts a node."""


def _unchanged(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return new


def _reshaped(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    shape = list(meta.value(source).shape)
    try:
        return call(aten.view.default, new, shape)
    except RuntimeError:  # the strides of `new` do not allow a view
        return call(aten.view.default, call(aten.clone.default, new, memory_format=torch.contiguous_format), shape)


def _permuted_back(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    dims: Any = view.args[1]
    order = [dim % len(dims) for dim in dims]
    return call(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


def _same_view(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return call(view.target, new, *view.args[1:])


def _squeezed(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return call(aten.squeeze.dim, new, view.args[1])


def _scattered(target: Any) -> Put:
    def put(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
        return call(target, source, new, *view.args[1:], **view.kwargs)

    return put


def _sections(view: Node) -> tuple[int, list[int]]:
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


VIEWS: dict[Any, Put] = {
    aten.detach.default: _unchanged,
    aten.alias.default: _unchanged,
    aten.lift_fresh.default: _unchanged,
    aten.view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _squeezed,
    aten.t.default: _same_view,
    aten.transpose.int: _same_view,
    aten.permute.default: _permuted_back,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default),
}
"""Inverses of ops that return one view."""

PIECES: dict[Any, Put] = {aten.split.Tensor: _section, aten.split_with_sizes.default: _section, aten.unbind.int: _row}
"""Inverses of ops that return several views; `view` is the getitem node."""
