"""The part of a program that ranks at one coordinate of the axis of owners run: each updates what it owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..errors import GraphError
from . import meta
from .nodes import add_empty, add_node, is_collective, is_wait

F = TypeVar("F", bound=Callable[..., Any])
_PICKS_OWN: set[object] = set()
_ASKS_OWNER: set[object] = set()


def picks_own(function: F) -> F:
    """Marks a function of local graphs whose first argument lists values of several owners: each rank has its own."""
    _PICKS_OWN.add(function)
    return function


def asks_owner(function: F) -> F:
    """Marks a function of local graphs that reads an owned value on its owner, and only its shape on other ranks."""
    _ASKS_OWNER.add(function)
    return function


def check_owners(graph: Graph) -> None:
    """Raise GraphError, which names the node, if a rank would read what another one owns, or not take part in a
    collective that others start.
    """
    for node in graph.nodes:
        at = meta.owner(node)
        if at is not None and (is_collective(node) or is_wait(node)):
            raise GraphError(f"%{node.name} runs on the ranks at {at} alone", "a collective of all ranks")
        if node.op != "call_function" or node.target in _PICKS_OWN or node.target in _ASKS_OWNER:
            continue
        other = next((n for n in node.all_input_nodes if meta.owner(n) not in (None, at)), None)
        if other is not None:
            where = "on all ranks" if at is None else f"at {at}"
            problem = f"%{node.name} runs {where} and reads %{other.name}, which only {meta.owner(other)} has"
            raise GraphError(problem, "a value that each rank that reads it has", "report this", meta.source_line(node))


def of_owner(graph: Graph, coordinate: int) -> Graph:
    """A copy with the calls of all ranks, and of those at `coordinate` of the axis of owners. What others own and the
    step creates is empty here.
    """
    new, twins = Graph(), dict[Node, Node]()

    def is_here(node: Node) -> bool:
        return meta.owner(node) in (None, coordinate)

    def read(source: Node) -> Node:
        here = twins.get(source)
        if here is None or (source.op == "placeholder" and source not in ends and not is_here(source)):
            here = twins[source] = _memory(new, source, [0] if source in ends else list(meta.one_tensor(source).shape))
        return here

    ends = {n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes}
    for node in graph.nodes:
        if node.op == "call_function" and not is_here(node):
            continue
        args: tuple[Any, ...] = node.args
        if node.target in _PICKS_OWN:
            args = ([n for n in args[0] if is_here(n)], *args[1:])
        copied = add_node(new, node.op, node.target, map_arg(args, read), map_arg(node.kwargs, read), node.name)
        meta.copy(node, copied)
        if is_here(node):
            meta.set_owner(copied, None)
        twins[node] = copied
    return new


def _memory(graph: Graph, origin: Node, shape: list[Any]) -> Node:
    new = add_empty(graph, meta.contiguous(shape, meta.one_tensor(origin)), origin, "elsewhere")
    meta.set_owner(new, None)
    return new
