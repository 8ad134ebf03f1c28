"""Runs a bound graph through TorchInductor: arithmetic between collectives is compiled, these stay where they are."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import BackendError, first_line
from ..graph import meta
from ..graph.graph import Input
from ..graph.nodes import function_of, is_collective, is_wait, node_at, operands
from ..partition.rank_ops import drawn, to_device, to_host
from ..passes.bucket import outline
from ..rules.registry import is_random
from .eager import eager
from .gloo.exchange import gather, swap
from .protocol import NodeClock, Run
from .tensorize_numbers import as_tensors

_APART = (gather, swap, drawn, to_device, to_host)
_OPTIONS = {"fallback_random": True, "reorder_for_locality": False}
"""Random ops draw what eager mode draws, in its order."""


@dataclass(frozen=True)
class Inductor:
    """The backend `inductor`: TorchInductor compiles the arithmetic between collectives."""

    name = "inductor"
    fused_optimizers = False
    in_place_buffers = False
    splits_steps = False
    times_nodes = True
    recordable = True

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """Compile `graph` for inputs like `example_inputs`: each stretch between collectives is one function.

        What communicates, waits or moves between devices runs as it does under `eager`, in the order of the graph.
        """
        if all(not (isinstance(t, torch.Tensor) and t.is_cuda) for t in example_inputs) and not (
            shutil.which("g++") or shutil.which("clang++")
        ):
            found = "backend 'inductor' needs a C++ compiler and found none"
            raise BackendError(found, "g++ or clang++ on the PATH", 'install one, or use backend="eager"')
        if readers := as_tensors(graph, written_out=True):
            found = f"Inductor cannot compile this graph: {readers[0]} takes a scheduled number as a Python number"
            raise BackendError(found, "an optimizer that computes with tensors", 'use backend="eager"')
        try:
            values = _fakes(graph, example_inputs)
            _insert_shapes(graph, values)
            return eager(in_segments(graph, _apart, values, _compile), clock)
        except BackendError:
            raise
        except Exception as error:
            found = f"Inductor cannot compile this graph: {first_line(error)}"
            raise BackendError(found, next_step='use backend="eager"') from error


def _apart(node: Node) -> bool:
    return node.op == "call_function" and (node.target in _APART or is_collective(node) or is_wait(node))


def _compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    random = sum(is_random(node) for node in module.graph.nodes)
    return _torch.inductor_compile(module, inputs, {**_OPTIONS, "reorder_for_peak_memory": random < 2})


def _fakes(graph: Graph, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What each node makes, without its values."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    with _torch.fake_mode() as mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                value = next(given)
                values[node] = mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)  # pyright: ignore
                function = function_of(node)
                if function is drawn:
                    _, function, *args = cast(Sequence[Any], args)
                values[node] = function(*args, **cast(dict[str, Any], kwargs))
    return values


Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def _insert_shapes(graph: Graph, values: dict[Node, Any]) -> None:
    """Shapes that are looked up when a program runs are known once it is a rank's own."""
    for node in [n for n in graph.nodes if n.target is outline]:
        shape = tuple(values[node_at(node, 0)].shape)
        for user in list(node.users):
            user.args = map_arg(user.args, lambda n, node=node, shape=shape: shape if n is node else n)  # pyright: ignore[reportUnknownLambdaType]
        graph.erase_node(node)


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
        else:
            joins = node.op == "call_function" and not apart(node) and not _torch.is_getitem(node.target)
            first = found[-1][0] if found else node  # what picks from a node that runs by itself begins its stretch
            if not joins or not found or first.op != "call_function" or apart(first) or _torch.is_getitem(first.target):
                found.append([])
            stretch = found[-1]
        stretch.append(node)
        home[node] = stretch
    return found


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
