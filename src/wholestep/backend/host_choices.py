"""Choices between old and new state, made by the host where it knows the flag at once: on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.nodes import node_at, operands
from ..passes.reinplace import WHERE_INTO, aliased, inplace_form

aten = torch.ops.aten


def with_host_choices(graph: Graph) -> Graph:
    """`graph`, bound to a rank, with choices that write nothing where the old value stays.

    An update that is one op with an in-place form is not computed then either, and needs no memory of its own.
    """
    known: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.target is not WHERE_INTO or meta.one_tensor(node).device != "cpu":
            continue
        flag, old, new = (node_at(node, i) for i in range(3))
        if meta.one_tensor(flag).shape:
            continue
        if flag not in known:
            with graph.inserting_after(flag):
                known[flag] = graph.call_function(bool, (flag,))
        inplace = _in_place(new, old) if node.prev is new and set(new.users) == {node} else None
        node.target, node.args, node.kwargs = unless, (known[flag], aten.copy_.default, old, new), {}
        if inplace is not None:
            node.args, node.kwargs = (known[flag], inplace, *new.args), dict(new.kwargs)
            graph.erase_node(new)
    return graph


def unless(skipped: bool, update: Callable[..., Tensor], old: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `old`, which `update` writes into unless it is `skipped`."""
    return old if skipped else update(old, *args, **kwargs)


def _in_place(new: Node, old: Node) -> Any:
    """Return the op that computes `new` in the memory of `old`; None if there is none or it reads that memory twice."""
    if not _torch.is_op(new.target) or not new.args or new.args[0] is not old or meta.tensor(new) != meta.tensor(old):
        return None
    others = operands(new)[1:]
    return None if any(_root(other) is _root(old) for other in others) else inplace_form(new.target)


def _root(node: Node) -> Node:
    """Return the node whose storage `node` may share."""
    while (source := aliased(node)) is not None:
        node = source
    return node
