"""Sizes in a graph: symbolic numbers of a trace become numbers that know their expression, and get their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .. import _torch
from ..sizes import SizeFloat, SizeGuards, SizeInt, evaluate, evaluator, in_units, unit_of
from . import meta
from .graph import TrainGraph
from .loop import with_bodies
from .meta import TensorMeta
from .nodes import copy_graph, node_at
from .op_kinds import COUNTS_ROWS
from .region import ByPiece

aten = torch.ops.aten
_ALL = (0, sys.maxsize)


def without_size_nodes(graph: Graph, symbols: _torch.Symbols) -> None:
    """Put symbolic numbers where the nodes of a trace read them; drop the nodes that compute them."""
    sizes = {node: value for node in graph.nodes if symbols.owns(value := meta.value(node))}
    for node in graph.nodes if sizes else ():
        if node not in sizes:
            _replace(node, lambda leaf: sizes.get(leaf, leaf) if isinstance(leaf, Node) else leaf)
    for node in reversed(sizes):
        graph.erase_node(node)
    for node in list(graph.nodes):
        if _is_whole(node):
            node.replace_all_uses_with(node_at(node, 0))
            graph.erase_node(node)


def _is_whole(node: Node) -> bool:
    """Return whether a node is a slice `[:]`: torch records those of symbolic dims only."""
    bounds = node.args[2:] if node.target is aten.slice.Tensor else ()
    return [type(bound) for bound in bounds] in ([int] * 2, [int] * 3) and bounds in (_ALL, (*_ALL, 1))


def with_plain_sizes(graph: Graph, symbols: _torch.Symbols) -> None:
    """Make symbolic numbers among arguments ints that know their expression."""
    for node in graph.nodes:
        _replace(node, partial(symbols.plain, own_name=node.target in COUNTS_ROWS))


def symbols_in(value: Any) -> _torch.Symbols | None:
    """Return the symbols that a number inside nested lists and dicts follows from; None if there is none."""
    numbers = sizes_among(value)
    return numbers[0].guards.symbols if numbers else None


def record_of(graph: Graph) -> SizeGuards | None:
    """Return the sizes that a bound graph, or the shape of an input of it, follows from; None if there are none."""
    for node in graph.nodes:
        shapes = [tensor.shape for tensor in filter(None, meta.tensors(node))] if node.op == "placeholder" else []
        if numbers := sizes_among([node.args, node.kwargs, shapes]):
            return numbers[0].guards
    return None


def sizes_among(value: Any) -> list[SizeInt | SizeFloat]:
    """Return the numbers that follow from sizes in nested lists and dicts."""
    numbers: list[SizeInt | SizeFloat] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, (SizeInt, SizeFloat)):
            numbers.append(leaf)
        return leaf

    map_aggregate(value, note)
    return numbers


def planned_at(train: TrainGraph, sizes: Mapping[str, int], record: SizeGuards | None = None) -> TrainGraph:
    """Return a copy whose numbers have the values of these sizes; with a new record, still their expressions. Fake
    values stay those of the symbols.
    """
    graph = copy_graph(train.graph)
    value = at_sizes(graph, sizes, record)
    return replace(train, graph=graph, inputs=tuple(replace(i, meta=_filled_in(i.meta, value)) for i in train.inputs))


def at_sizes(graph: Graph, sizes: Mapping[str, int], record: SizeGuards | None = None) -> Callable[[Any], Any]:
    """Fill in the sizes of a graph and of the bodies of its loops, which it alone has: arguments, and what is recorded
    of results. Returns what fills in one number.

    With `record`, numbers keep their expressions.
    """
    texts: dict[str, None] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, (SizeInt, SizeFloat)):
            texts[leaf.text] = None
        return leaf.map(note) if isinstance(leaf, ByPiece) else leaf

    for node, _ in with_bodies(graph):
        shapes = [(tensor.shape, tensor.stride) for tensor in meta.tensors(node) if tensor is not None]
        map_aggregate(cast(Any, (node.args, node.kwargs, shapes)), note)
    values = dict(zip(texts, evaluator(list(texts), list(sizes))(*sizes.values()), strict=True))

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, ByPiece):
            by_piece = leaf.map(filled)
            alike = record is None and all(value == by_piece.values[0] for value in by_piece.values)
            return by_piece.values[0] if alike else by_piece
        if not isinstance(leaf, (SizeInt, SizeFloat)):
            return leaf
        value = values[leaf.text] if leaf.text in values else evaluate(leaf.text, sizes)
        number: Any = value if record is None else type(leaf)(value, leaf.text, record)
        unit = unit_of(cast(int, leaf))
        return number if unit is None else in_units(number, filled(unit))

    for node, _ in with_bodies(graph):
        _replace(node, filled)
        meta.set_tensors(node, [tensor and _filled_in(tensor, filled) for tensor in meta.tensors(node)])
    return filled


def _filled_in(tensor: TensorMeta, plain: Callable[[Any], Any]) -> TensorMeta:
    return replace(tensor, shape=tuple(map(plain, tensor.shape)), stride=tuple(map(plain, tensor.stride)))


def _replace(node: Node, change: Callable[[Any], Any]) -> None:
    """Change the leaves of the arguments of a node."""
    changed = False

    def visit(leaf: Any) -> Any:
        nonlocal changed
        new = change(leaf)
        changed = changed or new is not leaf
        return new

    args, kwargs = map_aggregate(cast(Any, (node.args, node.kwargs)), visit)  # pyright: ignore[reportGeneralTypeIssues]
    if changed:
        _torch.set_operands(node, args, kwargs)
