"""Calls on lists of tensors (foreach, fused): which entries of their operands each of their results belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from . import meta
from .graph import node_at
from .op_kinds import is_list_op


class ListCalls:
    """The calls of a graph that make lists, entry by entry, from lists of the same length.

    `made` has these calls, and what picks one of the several lists that a call makes, each with its call; `items` what
    picks an entry: the call and the place.
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
        """The entry of the first list that `node`, a picked result, was made from; None for other nodes."""
        if node not in self.items:
            return None
        call, index = self.items[node]
        entry = first_list(call)[index]
        return entry if isinstance(entry, Node) else None


def first_list(call: Node) -> Sequence[Any]:
    """The operand that says how many entries there are."""
    return next(cast(Sequence[Any], a) for a in call.args if isinstance(a, (list, tuple)))


def _makes_lists(node: Node) -> bool:
    return (
        is_list_op(node.target)
        and any(isinstance(a, (list, tuple)) and a for a in node.args)
        and bool(meta.tensors(node))
    )
