"""Cuts a bound graph into stretches that a compiler gets, and the nodes between them, which run as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from .. import _torch
from ..graph import meta
from ..graph.nodes import operands

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def in_segments(graph: Graph, apart: Callable[[Node], bool], values: dict[Node, Any], compile: Compile) -> Graph:
    """A graph that calls each stretch of `graph` as one compiled function, in the order that `graph` has.

    Nodes for which `apart` holds run by themselves, where they stand. `values` gives a fake of what each node makes.
    """
    whole, seen = Graph(), dict[Node, Node]()
    stretches = _stretches(graph, apart)
    for stretch in stretches:
        if len(stretch) == 1 and (stretch[0].op != "call_function" or apart(stretch[0])):
            seen[stretch[0]] = whole.node_copy(stretch[0], seen.__getitem__)
            continue
        module, taken, made = _module(stretch)
        run = compile(module, [values[node] for node in taken])
        call = whole.create_node("call_function", run, tuple(seen[node] for node in taken), name="segment")
        for i, node in enumerate(made):
            seen[node] = whole.call_function(operator.getitem, (call, i))
            meta.copy_origin(node, seen[node])
    return whole


def _stretches(graph: Graph, apart: Callable[[Node], bool]) -> list[list[Node]]:
    """Neighbours that are compiled together; a getitem goes with what it picks from."""
    found: list[list[Node]] = []
    home: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if _torch.is_getitem(node.target) and not apart(source := operands(node)[0]):
            stretch = home[source]
        elif node.op == "call_function" and not apart(node) and not _torch.is_getitem(node.target):
            if not found or found[-1][-1].op != "call_function" or apart(found[-1][0]) or _picks(found[-1][0]):
                found.append([])
            stretch = found[-1]
        else:
            found.append([])
            stretch = found[-1]
        stretch.append(node)
        home[node] = stretch
    return found


def _picks(node: Node) -> bool:
    """True for what picks from a node that runs by itself: it begins its stretch."""
    return _torch.is_getitem(node.target)


def _module(stretch: Sequence[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """The stretch as a module, what it takes, and which of its nodes others read."""
    inside = set(stretch)
    taken = list(dict.fromkeys(given for node in stretch for given in operands(node) if given not in inside))
    made = [n for n in stretch if any(user not in inside for user in n.users)]
    graph, seen = Graph(), dict[Node, Node]()
    for node in taken:
        seen[node] = graph.placeholder(node.name)
    for node in stretch:
        seen[node] = graph.node_copy(node, seen.__getitem__)
    graph.output(tuple(seen[node] for node in made))
    return GraphModule({}, graph), taken, made
