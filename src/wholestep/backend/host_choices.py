"""Choices between old and new state, made by the host where it knows the flag at once: on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.nodes import is_collective, is_mutating, is_wait, node_at, operands
from ..passes.reinplace import WHERE_INTO, aliased, fresh_form, inplace_form

aten = torch.ops.aten


def with_host_choices(graph: Graph) -> Graph:
    """`graph`, bound to a rank, with choices that write nothing where the old value stays.

    An update that is one op with an in-place form is not computed then either. An update of several ops, the first of
    which has an in-place form, is computed in the memory of the old value unless that stays.
    """
    host_flags: dict[Node, Node] = {}
    choices = graph.find_nodes(op="call_function", target=WHERE_INTO)
    uses = _Uses(graph) if choices else None
    for node in choices:
        if uses is None or meta.one_tensor(node).device != "cpu":
            continue
        flag, old, new = (node_at(node, i) for i in range(3))
        if meta.one_tensor(flag).shape:
            continue
        if flag not in host_flags:
            with graph.inserting_after(flag):
                host_flags[flag] = graph.call_function(bool, (flag,))
        inplace = _in_place(new, old) if node.prev is new and set(new.users) == {node} else None
        node.target, node.args, node.kwargs = unless, (host_flags[flag], _copied, old, new), {}
        if inplace is None:
            uses.begin_in_place(host_flags[flag], node, old, new)
        else:
            node.args, node.kwargs = (host_flags[flag], inplace, *new.args), dict(new.kwargs)
            graph.erase_node(new)
    return graph


def unless(skipped: bool, update: Callable[..., Tensor], old: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `old`, which `update` writes into unless it is `skipped`."""
    return old if skipped else update(old, *args, **kwargs)


def updated(
    skipped: bool, inplace: Callable[..., Tensor], fresh: Callable[..., Tensor], old: Tensor, *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return an op's result: in the memory of `old`, or in memory of its own if the old value stays."""
    return fresh(old, *args, **kwargs) if skipped else inplace(old, *args, **kwargs)


def _copied(old: Tensor, new: Tensor) -> Tensor:
    return old if new is old else old.copy_(new)


CHOICES = frozenset({unless, updated})
"""Functions that write into their second operand."""


class _Uses:
    """Where the nodes of a graph stand, and when the memory that each one makes is read."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.readers: dict[Node, list[Node]] = {}
        for node in self.order:
            for operand in operands(node) if node.op == "call_function" else ():
                self.readers.setdefault(root_of(operand), []).append(node)
                if is_collective(node):  # reads until it is waited for
                    self.readers[root_of(operand)] += [user for user in node.users if is_wait(user)]

    def begin_in_place(self, skipped: Node, choice: Node, old: Node, new: Node) -> None:
        """Let the first op of an update write into `old`, where nothing reads the old value afterwards.

        What overwrites the new value after the choice, where its memory was its own, gets memory of its own.
        """
        first = root_of(new)
        inplace, order = _in_place(first, old), self.order
        if inplace is None or order[first] < order[node_at(skipped, 0)]:
            return
        if any(order[node] > order[first] for node in self.readers[root_of(old)] if node is not choice):
            return
        fresh: dict[Node, Any] = {}
        after = [n for n in self.readers.get(first, ()) if order[n] > order[choice] and is_mutating(n)]
        for node in sorted(dict.fromkeys(after), key=order.__getitem__):
            if not _writes_first(node) and any(_reaches(operand, first, fresh) for operand in operands(node)):
                return
            if _reaches(operands(node)[0], first, fresh):
                functional = fresh_form(node.target)
                fresh[node] = functional if functional and inplace_form(functional) is node.target else None
        if None in fresh.values():
            return
        for node, target in fresh.items():
            node.target = target
        first.args = cast(Any, (skipped, inplace, first.target, *first.args))
        first.target = updated


def _reaches(node: Node, first: Node, fresh: Mapping[Node, object]) -> bool:
    """True for a node in the memory of `first`; what is in `fresh` has memory of its own."""
    source: Node | None = node
    while source is not None and source is not first and source not in fresh:
        source = aliased(source)
    return source is first


def _writes_first(node: Node) -> bool:
    """True for a mutating op that writes into its first operand alone."""
    packet: Any = getattr(node.target, "_overloadpacket", None)
    return bool(packet) and packet.__name__.endswith("_") and not packet.__name__.startswith("_")


def _in_place(new: Node, old: Node) -> Any:
    """Return the op that computes `new` in the memory of `old`; None if there is none or it reads that memory twice."""
    if not _torch.is_op(new.target) or not new.args or new.args[0] is not old or meta.tensor(new) != meta.tensor(old):
        return None
    return None if any(root_of(other) is root_of(old) for other in operands(new)[1:]) else inplace_form(new.target)


def root_of(node: Node) -> Node:
    """Return the node whose storage `node` may share."""
    while (source := aliased(node)) is not None:
        node = source
    return node
