"""Marks the dims of a step that are cut as a dim of the batch is, so that rows may be shared unequally."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import node_at, operands
from ..graph.ops import COMPLETE
from ..layout import Layout
from ..rules.call import Call
from ..rules.cut_in_units import output_units
from ..rules.find_rule import find_rule
from ..sizes import in_units, unit_of, whole


def mark_units(graph: TrainGraph, rest: Mapping[str, Layout]) -> None:
    """Note at each dim that follows from a cut dim of the batch between which places it is cut. Changes no number."""
    live: set[Node] = set()
    for given, node in graph.placeholders():
        layout, found = rest[given.name], meta.tensor(node)
        if given.role is Role.BATCH and layout.is_sharded and found is not None:
            pairs = zip(found.shape, layout.dims, strict=True)
            meta.set_tensors(node, [meta.with_sizes(found, tuple(in_units(n, 1) if by else n for n, by in pairs))])
            live.add(node)
    for node in graph.graph.nodes:
        given = operands(node) if node.op == "call_function" else ()
        if _has_units(node) and node not in live:  # of another plan
            meta.set_known_rule(node, None)
            meta.set_tensors(node, [m and meta.with_sizes(m, tuple(map(whole, m.shape))) for m in meta.tensors(node)])
        if node.target not in COMPLETE and any(one in live for one in given):
            _mark(node)
            live |= {node} if _has_units(node) else set()


def _has_units(node: Node) -> bool:
    return any(found is not None and any(unit_of(n) is not None for n in found.shape) for found in meta.tensors(node))


def _mark(node: Node) -> None:
    """Mark the outputs of a call that reads what is marked."""
    made = list(meta.tensors(node))
    if _torch.is_getitem(node.target):
        made = list(meta.tensors(node_at(node, 0))[meta.picked(node)])
    else:
        meta.set_known_rule(node, None)
        rule = find_rule(node)
        for number, shape in (output_units(rule, Call.of(node)) if rule else {}).items():
            found = made[number]
            made[number] = None if found is None else meta.with_sizes(found, shape)
    meta.set_tensors(node, made)
