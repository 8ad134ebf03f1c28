"""Decomposes ops into smaller ops that can be sharded: a mean becomes a sum and a division.

Planning decomposes an op that would otherwise need unsharded operands. Results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..tuning import TUNING
from . import meta
from .call_keys import place_in
from .decompositions import EXPANSIONS
from .graph import TrainGraph
from .nodes import add_call, copy_node, drop_dead, node_at, operands
from .sizes_in_graph import symbols_in, with_plain_sizes, without_size_nodes
from .verify import check_train_graph

ROUNDS = TUNING.expand_rounds
_expands: dict[Any, bool] = {}  # by op, arguments and outputs: a trace says it


def can_expand(node: Node) -> bool:
    """Return whether `node` has a decomposition for its arguments."""
    if node.target not in EXPANSIONS:
        return False
    cache, key = place_in(_expands, node)
    if key not in cache:
        cache[key] = _decomposition(node) is not None
    return cache[key]


def expandable(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that have a decomposition, and the products whose dims a view among `nodes` merges."""
    candidates: dict[Node, None] = {}
    for node in nodes:
        candidates |= {node: None} if can_expand(node) else dict.fromkeys(_products_of(node))
    return list(candidates)


def expand(graph: TrainGraph, names: Collection[str]) -> TrainGraph:
    """Decompose the nodes called `names`, which may include nodes of a decomposition."""
    for _ in range(ROUNDS):
        if not any(node.name in names for node in graph.graph.nodes):
            break
        graph = _expand_once(graph, names)
    return graph


def _expand_once(graph: TrainGraph, names: Collection[str]) -> TrainGraph:
    new, at, merged = Graph(), dict[Node, Any](), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node.op == "output":
            new.output(map_arg(node.args[0], at.__getitem__))
        elif node.name in names and _factors(node) is not None:
            product, at[node] = _write_unmerged(node, new, at)
            merged[node] = product
        elif (node.target in _VIEWS and (unmerged := merged.get(node.all_input_nodes[0]))
              and _shape(node) == meta.one_tensor(unmerged).shape):  # fmt: skip
            at[node] = unmerged  # the view splits the merged dims again
        elif node.name in names and (body := _decomposition(node)) is not None:
            at[node] = _inline(node, body, new, at)
        elif _torch.is_getitem(node.target) and isinstance(at[node_at(node, 0)], (list, tuple)):
            at[node] = at[node_at(node, 0)][cast(int, node.args[1])]
        else:
            at[node] = copy_node(node, new, at.__getitem__)
    if merged:
        drop_dead(new)
    present, ends = {*new.nodes}, {node.name: end for node, end in at.items()}
    losses = tuple(ends[name].name for name in graph.losses if ends.get(name) in present)
    expanded = replace(graph, graph=new, losses=losses)
    check_train_graph(expanded)
    return expanded


def _decomposition(node: Node) -> Graph | None:
    """Return the traced decomposition of `node`; None if there is none for its arguments."""
    make = EXPANSIONS.get(node.target)
    if make is None:
        return None
    metas = list(map(meta.one_tensor, operands(node)))
    if not all(tensor.numel for tensor in metas):
        return None  # amax fails for empty tensors
    symbols = symbols_in((node.args, node.kwargs, [(tensor.shape, tensor.stride) for tensor in metas]))
    with (mode := _torch.fake_mode() if symbols is None else symbols.mode):
        shapes = [(_symbolic(m.shape, symbols), _symbolic(m.stride, symbols), m) for m in metas]
        fakes = [torch.empty_strided(n, step, dtype=m.dtype, device=m.device) for n, step, m in shapes]

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        arguments = _symbolic((node.args, dict(node.kwargs)), symbols)
        args, kwargs = map_arg(arguments, lambda _: cast(Any, next(rest)))
        out: Any = make(*args, **kwargs)
        return cast(tuple[Any, ...], out) if isinstance(out, tuple) else (out,)

    try:
        with mode, torch.no_grad():
            body = _torch.trace_plain(run, fakes)
    except NotImplementedError:
        return None
    if symbols is not None:
        without_size_nodes(body, symbols)
        with_plain_sizes(body, symbols)
    return body


def _symbolic(value: Any, symbols: _torch.Symbols | None) -> Any:
    return value if symbols is None else symbols.symbolic(value)


def _inline(node: Node, body: Graph, new: Graph, at: dict[Node, Any]) -> Any:
    """Copy `body` in place of `node`; return its result, a node or a tuple of nodes."""
    inner: dict[Node, Any] = {}
    feed = iter(operands(node))
    for part in body.nodes:
        if part.op == "placeholder":
            inner[part] = at[next(feed)]
        elif part.op == "output":
            outputs = [inner[p] if isinstance(p, Node) else p for p in cast(Sequence[Any], part.args[0])]
            several = len(outputs) > 1 or isinstance(meta.value(node), (tuple, list))
            return tuple(outputs) if several else outputs[0]
        else:
            args, kwargs = map_arg((part.args, part.kwargs), inner.__getitem__)
            copied = new.create_node("call_function", part.target, args, kwargs, name=f"{node.name}__{part.name}")
            meta.copy(part, copied)
            meta.copy_origin(node, copied)
            meta.set_part_of(copied, meta.part_of(node))
            inner[part] = copied
    raise AssertionError("a traced graph ends in an output")


aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _products_of(view: Node) -> Iterator[Node]:
    """Yield the products that read `view`, which merges dims, and can be rewritten over the original dims."""
    for user in view.users if view.target in _VIEWS or _is_transpose(view) else ():
        if user.target is aten.bmm.default and _factors(user) is not None:
            yield user
        elif _is_transpose(user):
            yield from _products_of(user)


def _factors(product: Node) -> list[tuple[Node, bool]] | None:
    """Return both operands before their dims were merged, each with whether it was transposed since, or None."""
    if product.target is not aten.bmm.default:
        return None
    candidates = [_before(node_at(product, 0)), _before(node_at(product, 1))]
    if None in candidates:
        return None
    sources = cast(list[tuple[Node, bool]], candidates)
    leads = {_shape(node)[:-2] for node, _ in sources}
    return sources if len(leads) == 1 else None


def _write_unmerged(product: Node, new: Graph, at: dict[Node, Node]) -> tuple[Node, Node]:
    """Rewrite a `bmm` over merged dims (batch and heads of hand-written attention) as a `matmul` over the original
    dims; return it and a view of its result with merged dims. A sharded dim cannot be merged behind another dim. Over
    the original dims the product can be sharded along any of them, and the views around it disappear.
    """
    left, right = (
        _transposed(node, transposed, at[node], new, product) for node, transposed in _factors(product) or ()
    )
    tensor = meta.one_tensor(product)
    shape = (*meta.one_tensor(left).shape[:-1], meta.one_tensor(right).shape[-1])
    unmerged = _part(new, aten.matmul.default, (left, right), meta.contiguous(shape, tensor), product, "product")
    return unmerged, _part(new, aten.view.default, (unmerged, list(tensor.shape)), tensor, product, "merged")


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
