"""Nodes of a graph: what they read and do, and copies of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..layout import OfOwner
from . import meta
from .op_kinds import collective_kind

COLLECTIVES = "_c10d_functional"
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_mutating(node: Node) -> bool:
    """Return whether an op writes into an input."""
    target = node.target
    return _torch.is_op(target) and target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]  # asked often


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that a call of an op is given, by name."""
    names = (argument.name for argument in _torch.schema_of(node.target).arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def written(node: Node) -> list[Node]:
    """Return what an op writes into."""
    bound, arguments = arguments_of(node), _torch.schema_of(node.target).arguments
    values = [bound.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    lists = [cast("list[Any]", value) if isinstance(value, list) else [value] for value in values]
    return [value for items in lists for value in items if isinstance(value, Node)]


def communicates(node: Node) -> bool:
    """Return whether ranks exchange data in a node: a collective, or what does the work of one."""
    return collective_kind(node.target) is not None


def is_collective(node: Node) -> bool:
    """Return whether a node starts a collective, for which a wait waits."""
    return getattr(node.target, "namespace", "") == COLLECTIVES and node.target is not _WAIT


def ranks_in_ring(node: Node) -> int:
    """Return the number of ranks of an exchange in which each sends all that it has to one other; else 0."""
    if collective_kind(node.target) != "all_to_all" or len(node.args) < 4 or isinstance(node.args[2], Node):
        return 0
    parts = cast("Sequence[Any]", node.args[2])
    ranked = all(isinstance(part, OfOwner) for part in parts)
    to_one = ranked and sum(type(n) is not int or n > 0 for n in (part.numbers[0] for part in parts)) == 1
    return len(parts) * to_one


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return node.target is _WAIT


def operands(node: Node) -> list[Node]:
    """Return every node that `node` reads, in argument order, with repeats and the entries of lists."""
    nodes: list[Node] = []
    args, kwargs = node.args, node.kwargs
    for argument in (*args, *kwargs.values()) if kwargs else args:
        if type(argument) is Node:
            nodes.append(argument)
        elif isinstance(argument, (list, tuple)):  # faster than `map_arg`, which copies the list
            for entry in cast("Sequence[Any]", argument):
                if type(entry) is Node:
                    nodes.append(entry)
                elif isinstance(entry, (list, tuple, dict, slice)):
                    map_arg(cast(Any, entry), nodes.append)
        elif isinstance(argument, (dict, slice)):
            map_arg(argument, nodes.append)
    return nodes


def reached(
    starts: Iterable[Node], step: Callable[[Node], Iterable[Node]] = operands, where: Callable[[Node], bool] = bool
) -> set[Node]:
    """Calls to which a walk comes from `starts`, themselves included, by `step`; it stops in front of calls for which
    `where` is false.
    """
    reached_nodes, todo = set[Node](), list(starts)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in reached_nodes and where(node):
            reached_nodes.add(node)
            todo += step(node)
    return reached_nodes


def move_up(graph: Graph, nodes: Iterable[Node], also: Callable[[Node], bool]) -> None:
    """Move calls of a graph up, behind the last of what they read, with what they read that `also` is true of."""
    place = {node: number for number, node in enumerate(graph.nodes)}

    def raised(node: Node) -> None:
        for operand in filter(also, node.all_input_nodes):
            raised(operand)
        computed = [operand for operand in node.all_input_nodes if operand.op != "placeholder"]
        if computed:
            last = max(computed, key=place.__getitem__)
            last.append(node)
            place[node] = place[last]

    for node in nodes:
        raised(node)


def cone(node: Node, outside: Container[Node]) -> list[Node]:
    """`node` and all nodes that it depends on, without `outside`, in dependency order."""
    ordered: dict[Node, None] = {}
    todo = [(node, False)]
    while todo:
        at, complete = todo.pop()
        if complete:
            ordered[at] = None
        elif at not in ordered and at not in outside:
            todo.append((at, True))
            todo += [(n, False) for n in operands(at)]
    return list(ordered)


def node_at(node: Node, position: int) -> Node:
    """Return the argument `position` of `node`, a node."""
    operand: Any = node.args[position]  # `cast` is a call
    return operand


def function_of(node: Node) -> Callable[..., Any]:
    """Return the function that a call node calls."""
    return cast(Callable[..., Any], node.target)


def copy_graph(graph: Graph) -> Graph:
    """Return a copy with the same names and metadata."""
    return copy_with(graph)[0]


def copy_with(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy, and a dict from each node of `graph` to its copy."""
    new, twins = Graph(), dict[Node, Node]()
    copy_nodes(graph.nodes, new, twins)
    for node, twin in twins.items():
        if twin.name != node.name:  # fx gives none the name of a builtin, as `sum`
            _torch.rename(twin, node.name)
    return new, twins


def copy_nodes(nodes: Iterable[Node], graph: Graph, twins: dict[Node, Node]) -> None:
    """Append copies of nodes to `graph` that read those in `twins`, and add them there."""
    for node in nodes:
        twins[node] = copy_node(node, graph, twins.__getitem__)


def copy_node(node: Node, graph: Graph, twin: Callable[[Node], Node]) -> Node:
    """Append a copy of `node` to `graph` that reads `twin(operand)`. `Graph.node_copy` takes three times as long."""
    args, kwargs = map_arg(node.args, twin), map_arg(node.kwargs, twin)
    new = add_node(graph, node.op, node.target, args, kwargs, node.name)
    meta.copy(node, new)
    return new


def ends_of(graph: Graph) -> list[Node]:
    """Return the nodes that a graph returns."""
    return operands(next(iter(reversed(graph.nodes))))


def drop_dead(graph: Graph, stays: Callable[[Node], bool] = meta.is_kept) -> None:
    """Erase calls that nothing reads but those that stay; `Graph.eliminate_dead_code` checks the graph each time."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not stays(node):
            graph.erase_node(node)


def redirect(moved: Mapping[Node, Node]) -> None:
    """Replace all uses of each key of `moved` by its value, transitively. `Node.replace_all_uses_with` visits all
    operands of a reader per replacement: quadratic for the thousands of an output or a foreach optimizer.
    """

    def final(node: Node) -> Node:
        while node in moved:
            node = moved[node]
        return node

    for reader in {reader: None for old in moved for reader in old.users}:
        reader.args, reader.kwargs = map_arg(reader.args, final), map_arg(reader.kwargs, final)


def add_call(graph: Graph, target: Any, args: Any, tensor: meta.TensorMeta, origin: Node, name: str = "") -> Node:
    """A call whose result is `tensor`, with the module and source line of `origin`."""
    name = name or str(getattr(target, "__name__", target)).split(".")[0]
    node = add_node(graph, "call_function", target, args, {}, name)
    meta.copy(origin, node)
    meta.set_computes(node, None)
    meta.set_value(node, None)
    meta.set_tensors(node, (tensor,))
    return node


def add_empty(graph: Graph, tensor: meta.TensorMeta, origin: Node, name: str) -> Node:
    """Memory of the shape of a value that is not there: only its shape is read."""
    args = (list(tensor.shape),)
    node = add_call(graph, torch.ops.aten.empty.memory_format, args, tensor, origin, f"{origin.name}_{name}")
    node.kwargs = {"dtype": tensor.dtype, "device": torch.device(tensor.device)}
    return node


def add_node(graph: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> Node:
    """Like `Graph.create_node`, without its search for symbolic numbers, which takes most of its time, and warns."""
    node = graph.create_node(op, target, name=name)
    _torch.set_operands(node, args, kwargs)
    return node


def name_in_order(graph: Graph, inputs: Sequence[str]) -> None:
    """Give nodes readable names: `inputs` for placeholders, other nodes are named by their op and numbered in order."""
    counts: dict[str, int] = {}

    def fresh(base: str) -> str:
        base = _identifier(base)
        counts[base] = counts.get(base, -1) + 1
        name = f"{base}_{counts[base]}" if counts[base] else base
        return name if counts[base] == 0 or name not in counts else fresh(name)

    placeholders = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            _torch.rename(node, fresh(next(placeholders)))
            node.target = node.name
        elif node.op == "call_function":
            _torch.rename(node, fresh(getattr(node.target, "__name__", "op").split(".")[0]))
        else:
            _torch.rename(node, node.op)


@cache
def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_") or "v"
    return f"v{name}" if name[0].isdigit() else name
