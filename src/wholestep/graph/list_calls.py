"""Calls on lists of tensors (foreach, fused optimizers), and the operand entry of each entry of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from . import meta
from .nodes import node_at
from .op_kinds import is_list_op


class ListCalls:
    """The calls of a graph that compute lists entry by entry from lists of the same length.

    `made` maps each such call, and each getitem of one of several result lists, to the call. `items` maps each getitem
    of an entry to the call and the place of the entry.
    """

    def __init__(self, graph: Graph) -> None:
        self.made: dict[Node, Node] = {}
        self.items: dict[Node, tuple[Node, int]] = {}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if _makes_lists(node):
                self.made[node] = node
            elif _torch.is_getitem(node.target) and node_at(node, 0) in self.made:
                call = self.made[node_at(node, 0)]
                if isinstance(meta.value(node), (list, tuple)):
                    self.made[node] = call
                else:
                    self.items[node] = call, cast(int, node.args[1])

    def source(self, node: Node) -> Node | None:
        """The entry of the first operand list that `node`, an entry of a result, follows from; None for other nodes."""
        if node not in self.items:
            return None
        call, index = self.items[node]
        entry = first_list(call)[index]
        return entry if isinstance(entry, Node) else None


def first_list(call: Node) -> Sequence[Any]:
    """The first operand that is a list."""
    return next(cast(Sequence[Any], a) for a in call.args if isinstance(a, (list, tuple)))


def _makes_lists(node: Node) -> bool:
    return (
        is_list_op(node.target)
        and any(isinstance(a, (list, tuple)) and a for a in node.args)
        and bool(meta.tensors(node))
    )
