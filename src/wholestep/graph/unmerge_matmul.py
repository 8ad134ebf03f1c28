"""Rewrites `bmm` over merged dims (batch and heads of hand-written attention) as `matmul` over the original dims.

A sharded dim cannot be merged behind another dim. Over the original dims the product can be sharded along any of
them, and the views around it disappear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from . import meta
from .nodes import add_call, node_at

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def products_of(view: Node) -> Iterator[Node]:
    """Yield the products that read `view`, which merges dims, and can be rewritten over the original dims."""
    for user in view.users if view.target in _VIEWS or _is_transpose(view) else ():
        if user.target is aten.bmm.default and factors(user) is not None:
            yield user
        elif _is_transpose(user):
            yield from products_of(user)


def factors(product: Node) -> list[tuple[Node, bool]] | None:
    """Return both operands before their dims were merged, each with whether it was transposed since, or None."""
    if product.target is not aten.bmm.default:
        return None
    candidates = [_before(node_at(product, 0)), _before(node_at(product, 1))]
    if None in candidates:
        return None
    sources = cast(list[tuple[Node, bool]], candidates)
    leads = {_shape(node)[:-2] for node, _ in sources}
    return sources if len(leads) == 1 else None


def write(product: Node, new: Graph, at: dict[Node, Node]) -> tuple[Node, Node]:
    """Insert the product over the original dims, and a view of its result with merged dims; return both."""
    left, right = (_transposed(node, transposed, at[node], new, product) for node, transposed in factors(product) or ())
    tensor = meta.one_tensor(product)
    shape = (*meta.one_tensor(left).shape[:-1], meta.one_tensor(right).shape[-1])
    unmerged = _part(new, aten.matmul.default, (left, right), meta.contiguous(shape, tensor), product, "product")
    return unmerged, _part(new, aten.view.default, (unmerged, list(tensor.shape)), tensor, product, "merged")


def undoes(view: Node, unmerged: Node) -> bool:
    """Return whether `view` splits the merged dims of the result `unmerged` again."""
    return view.target in _VIEWS and _shape(view) == meta.one_tensor(unmerged).shape


def _before(node: Node) -> tuple[Node, bool] | None:
    transposed = False
    while _is_transpose(node):
        node, transposed = node_at(node, 0), not transposed
    if node.target not in _VIEWS:
        return None
    source = node_at(node, 0)
    have, want = _shape(source), _shape(node)
    merges = len(want) == 3 and len(have) > 3 and have[-2:] == want[-2:] and prod(have[:-2]) == want[0]
    return (source, transposed) if merges else None


def _is_transpose(node: Node) -> bool:
    if node.target is not aten.transpose.int or len(_shape(node)) != 3:
        return False
    return {cast(int, d) % 3 for d in node.args[1:3]} == {1, 2}


def _transposed(source: Node, transposed: bool, twin: Node, new: Graph, origin: Node) -> Node:
    if not transposed:
        return twin
    plain = meta.one_tensor(source)
    *lead, rows, columns = range(len(plain.shape))
    order = [*lead, columns, rows]
    swapped = replace(plain, shape=tuple(plain.shape[d] for d in order), stride=tuple(plain.stride[d] for d in order))
    return _part(new, aten.transpose.int, (twin, -2, -1), swapped, origin, f"{source.name}_t")


def _part(new: Graph, target: Any, args: Any, tensor: meta.TensorMeta, origin: Node, name: str) -> Node:
    part = add_call(new, target, args, tensor, origin, f"{origin.name}__{name}")
    meta.set_part_of(part, meta.part_of(origin))
    return part


def _shape(node: Node) -> tuple[int, ...]:
    tensor = meta.tensor(node)
    return tensor.shape if tensor else ()
