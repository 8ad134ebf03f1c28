"""Marks the dims of a step that are cut as a dim of the batch is, so that rows may be shared unequally."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.meta import TensorMeta
from ..graph.nodes import node_at, operands
from ..graph.ops import COMPLETE
from ..layout import Layout
from ..rules.call import Call
from ..rules.cut_in_units import output_units
from ..rules.find_rule import call_kind, find_rule, known_kind
from ..rules.registry import CallKind
from ..sizes import in_units, text_of, unit_of, whole


def mark_units(graph: TrainGraph, rest: Mapping[str, Layout]) -> None:
    """Note at each dim that follows from a cut dim of the batch between which places it is cut. Changes no number.

    A search plans one graph many times: nodes whose operands have the marks of the plan before keep theirs, and the
    rule that is cached with them.
    """
    live, changed = set[Node](), set[Node]()
    marked = dict[CallKind, list[TensorMeta | None]]()
    for spec, node in graph.placeholders():
        layout, tensor = rest[spec.name], meta.tensor(node)
        if spec.role is Role.BATCH and layout.is_sharded and tensor is not None:
            sizes = (whole(n) if not by else in_units(n, 1) for n, by in zip(tensor.shape, layout.dims, strict=True))
            _note(node, meta.tensors(node), [replace(tensor, shape=tuple(sizes))], changed)
            live.add(node)
        elif _has_units(node):
            _note(node, meta.tensors(node), _unmarked(node), changed)
    for node in graph.graph.nodes if live or changed else ():
        if node.op != "call_function":
            continue
        inputs = operands(node)
        if any(operand in changed for operand in inputs):
            meta.set_known_rule(node, None)
        if node.target not in COMPLETE and any(operand in live for operand in inputs):
            if known_kind(node) is None:
                _mark(node, changed, marked)
            live |= {node} if _has_units(node) else set()
        elif _has_units(node):
            meta.set_known_rule(node, None)
            _note(node, meta.tensors(node), _unmarked(node), changed)


def _has_units(node: Node) -> bool:
    for tensor in meta.tensors(node):
        if tensor is not None:
            for n in tensor.shape:
                if unit_of(n) is not None:
                    return True
    return False


def _unmarked(node: Node) -> list[TensorMeta | None]:
    return [tensor and replace(tensor, shape=tuple(map(whole, tensor.shape))) for tensor in meta.tensors(node)]


def _note(
    node: Node, before: Sequence[TensorMeta | None], tensors: Sequence[TensorMeta | None], changed: set[Node]
) -> None:
    """Give `node` these `tensors`; it has `changed` if its marks are not those of `before`."""
    meta.set_tensors(node, tensors)
    if [*map(_marks, tensors)] != [*map(_marks, before)]:
        changed.add(node)


def _marks(tensor: TensorMeta | None) -> tuple[Hashable, ...]:
    units = () if tensor is None else map(unit_of, tensor.shape)
    return tuple(None if unit is None else text_of(unit) for unit in units)


def _mark(node: Node, changed: set[Node], marked: dict[CallKind, list[TensorMeta | None]]) -> None:
    """Mark the outputs of a call that reads what is marked; `marked` are those of such calls."""
    before = meta.tensors(node)
    if _has_units(node):
        meta.set_tensors(node, _unmarked(node))
    if _torch.is_getitem(node.target):
        _note(node, before, meta.tensors(node_at(node, 0))[meta.picked(node)], changed)
        return
    meta.set_known_rule(node, None)
    rule, kind = find_rule(node), call_kind(node)
    if kind not in marked:
        tensors = marked[kind] = list(meta.tensors(node))
        for number, shape in (output_units(rule, Call.of(node)) if rule else {}).items():
            tensors[number] = (tensor := tensors[number]) and replace(tensor, shape=shape)
    _note(node, before, marked[kind], changed)
