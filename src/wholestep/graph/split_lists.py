"""Splits ops over lists of tensors into one op for each group of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from .. import _torch
from . import meta
from .nodes import redirect
from .op_kinds import is_list_op


def split_lists(node: Node, groups: Sequence[list[int]]) -> tuple[list[Node], dict[Node, tuple[Node, int]]]:
    """Replace the list op `node` by one op for each group of positions. Returns these ops, and for each new getitem of
    a tensor the op and the position in it that it reads. The old nodes have no readers left.
    """
    graph, length, ops = node.graph, sum(len(g) for g in groups), list[Node]()
    with graph.inserting_before(node):
        for group in groups:
            args = tuple(_cut(a, group, length) for a in node.args)
            kwargs = {name: _cut(a, group, length) for name, a in node.kwargs.items()}
            new = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            _describe(new, node, group, length)
            ops.append(new)
    place = {i: (new, at) for new, group in zip(ops, groups, strict=True) for at, i in enumerate(group)}
    picked, positions = dict[Node, Node](), dict[Node, tuple[Node, int]]()

    def repick(item: Node, outer: int | None) -> None:
        new, at = place[cast(int, item.args[1])]
        with graph.inserting_before(item):
            source = new
            if outer is not None:
                source = graph.create_node("call_function", _torch.GETITEM, (new, outer), name="getitem")
                meta.copy_origin(item, source)
                meta.set_value(source, meta.value(new)[outer])
            again = graph.create_node("call_function", _torch.GETITEM, (source, at), name=item.name)
        meta.copy(item, again)
        picked[item], positions[again] = again, (new, at)

    for pick in node.users:
        if isinstance(meta.value(pick), (list, tuple)):
            for item in pick.users:
                repick(item, cast(int, pick.args[1]))
        else:
            repick(pick, None)
    redirect(picked)
    return ops, positions


def lists_of(node: Node) -> list[list[Node]]:
    """The lists of tensors, all of one length, that an op over lists takes; empty for other ops."""
    if not is_list_op(node.target):
        return []
    filled = [cast(list[Any], a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple)) and a]
    lists = [list(a) for a in filled if all(isinstance(n, Node) for n in a)]
    return lists if lists and len({len(a) for a in filled}) == 1 else []


def _cut(value: Any, group: list[int], length: int) -> Any:
    """A list of `length` cut to the positions in `group`; any other value as it is."""
    entries = _opened(value)
    return [entries[i] for i in group] if entries and len(entries) == length else value


def _opened(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, (list, tuple)) else []


def _describe(new: Node, node: Node, group: list[int], length: int) -> None:
    """Give `new` the metadata of `node`, cut to the positions in `group`."""
    value, tensors, computes = meta.value(node), meta.tensors(node), meta.computes(node)
    meta.copy(node, new)
    nested = any(isinstance(v, (list, tuple)) for v in _opened(value))
    outputs: list[Any] = _opened(value) if nested else [value]
    parts = [_cut(output, group, length) for output in outputs]
    meta.set_value(new, tuple(parts) if nested else parts[0])
    keep: list[int] = []
    at = 0
    for output in outputs:
        size = len(_opened(output)) if isinstance(output, (list, tuple)) else 1
        keep += _cut(list(range(at, at + size)), group, length)
        at += size
    meta.set_tensors(new, [tensors[i] for i in keep])
    meta.set_computes(new, tuple(computes[i] for i in keep) if computes else None)
