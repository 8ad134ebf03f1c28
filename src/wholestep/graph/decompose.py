"""Decomposes ops into smaller ops that can be sharded: a mean becomes a sum and a division.

Planning decomposes an op that would otherwise need unsharded operands. Results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..tuning import TUNING
from . import meta, unmerge_matmul
from .decompositions import EXPANSIONS
from .graph import TrainGraph
from .nodes import copy_node, drop_dead, node_at, operands
from .sizes_in_graph import symbols_in, with_plain_sizes, without_size_nodes
from .verify import check_train_graph

ROUNDS = TUNING.expand_rounds


def can_expand(node: Node) -> bool:
    """Return whether `node` has a decomposition for its arguments."""
    return _decomposition(node) is not None


def expandable(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that have a decomposition, and the products whose dims a view among `nodes` merges."""
    candidates: dict[Node, None] = {}
    for node in nodes:
        candidates |= {node: None} if can_expand(node) else dict.fromkeys(unmerge_matmul.products_of(node))
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
        elif node.name in names and unmerge_matmul.factors(node) is not None:
            product, at[node] = unmerge_matmul.write(node, new, at)
            merged[node] = product
        elif (first := next(iter(node.all_input_nodes), node)) in merged and unmerge_matmul.undoes(node, merged[first]):
            at[node] = merged[first]
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
