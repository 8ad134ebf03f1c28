"""Marks the dims of a step that are cut as a dim of the batch is, so that rows may be shared unequally."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

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
from ..rules.find_rule import find_rule, is_known
from ..sizes import in_units, text_of, unit_of, whole


def mark_units(graph: TrainGraph, rest: Mapping[str, Layout]) -> None:
    """Note at each dim that follows from a cut dim of the batch between which places it is cut. Changes no number.

    A search plans one graph many times: nodes whose operands have the marks of the plan before keep theirs, and the
    rule that is cached with them.
    """
    live, changed = set[Node](), set[Node]()
    for given, node in graph.placeholders():
        layout, found = rest[given.name], meta.tensor(node)
        if given.role is Role.BATCH and layout.is_sharded and found is not None:
            sizes = (whole(n) if not by else in_units(n, 1) for n, by in zip(found.shape, layout.dims, strict=True))
            _note(node, meta.tensors(node), [meta.with_sizes(found, tuple(sizes))], changed)
            live.add(node)
        elif _has_units(node):
            _note(node, meta.tensors(node), _unmarked(node), changed)
    for node in graph.graph.nodes if live or changed else ():
        if node.op != "call_function":
            continue
        given = operands(node)
        if any(one in changed for one in given):
            meta.set_known_rule(node, None)
        if node.target not in COMPLETE and any(one in live for one in given):
            if not is_known(node):
                _mark(node, changed)
            live |= {node} if _has_units(node) else set()
        elif _has_units(node):
            meta.set_known_rule(node, None)
            _note(node, meta.tensors(node), _unmarked(node), changed)


def _has_units(node: Node) -> bool:
    for found in meta.tensors(node):
        if found is not None:
            for n in found.shape:
                if unit_of(n) is not None:
                    return True
    return False


def _unmarked(node: Node) -> list[TensorMeta | None]:
    return [made and meta.with_sizes(made, tuple(map(whole, made.shape))) for made in meta.tensors(node)]


def _note(
    node: Node, before: Sequence[TensorMeta | None], made: Sequence[TensorMeta | None], changed: set[Node]
) -> None:
    """Give `node` the tensors `made`; it has `changed` if its marks are not those of `before`."""
    meta.set_tensors(node, made)
    if [*map(_marks, made)] != [*map(_marks, before)]:
        changed.add(node)


def _marks(found: TensorMeta | None) -> tuple[Hashable, ...]:
    units = () if found is None else map(unit_of, found.shape)
    return tuple(None if unit is None else text_of(unit) for unit in units)


def _mark(node: Node, changed: set[Node]) -> None:
    """Mark the outputs of a call that reads what is marked."""
    before = meta.tensors(node)
    if _has_units(node):
        meta.set_tensors(node, _unmarked(node))
    made = list(meta.tensors(node))
    if _torch.is_getitem(node.target):
        made = list(meta.tensors(node_at(node, 0))[meta.picked(node)])
    else:
        meta.set_known_rule(node, None)
        rule = find_rule(node)
        for number, shape in (output_units(rule, Call.of(node)) if rule else {}).items():
            found = made[number]
            made[number] = None if found is None else meta.with_sizes(found, shape)
    _note(node, before, made, changed)
