"""Runs a bound graph through TorchInductor: arithmetic between collectives is compiled, these stay where they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import BackendError
from ..graph.graph import Input
from ..graph.nodes import function_of, is_collective, is_wait, node_at
from ..partition.rank_ops import drawn, to_device, to_host
from ..passes.bucket import outline
from ..rules.registry import is_random
from .eager import eager
from .gloo.exchange import gather, swap
from .protocol import NodeClock, Run
from .subgraphs import in_segments
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

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """See `Backend`."""
        return inductor(graph, example_inputs, clock)


def inductor(graph: Graph, example_inputs: Sequence[Any], clock: NodeClock | None = None) -> Run:
    """Compile `graph` for inputs like `example_inputs`.

    What communicates, waits or moves between devices runs as it does under `eager`, in the order of the graph; each
    stretch between is one compiled function.

    Raises:
        BackendError: there is no C++ compiler, or Inductor refuses the graph.
    """
    if all(not (isinstance(t, torch.Tensor) and t.is_cuda) for t in example_inputs) and not (
        shutil.which("g++") or shutil.which("clang++")
    ):
        raise BackendError(
            "backend 'inductor' needs a C++ compiler and found none",
            "g++ or clang++ on the PATH",
            'install one, or use backend="eager"',
        )
    if readers := as_tensors(graph, written_out=True):
        raise BackendError(
            f"Inductor cannot compile this graph: {readers[0]} takes a scheduled number as a Python number",
            "an optimizer that computes with tensors",
            'use backend="eager"',
        )
    try:
        with torch.no_grad():
            values = _fakes(graph, example_inputs)
            _settle_shapes(graph, values)
            return eager(in_segments(graph, _apart, values, _compile), clock)
    except BackendError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(f"Inductor cannot compile this graph: {text}", next_step='use backend="eager"') from error


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


def _settle_shapes(graph: Graph, values: dict[Node, Any]) -> None:
    """Shapes that are looked up when a program runs are known once it is a rank's own."""
    for node in [n for n in graph.nodes if n.target is outline]:
        shape = tuple(values[node_at(node, 0)].shape)
        for user in list(node.users):
            user.args = _replaced(user.args, node, shape)
        graph.erase_node(node)


def _replaced(value: Any, node: Node, shape: tuple[int, ...]) -> Any:
    if isinstance(value, (list, tuple)):
        opened = [_replaced(item, node, shape) for item in cast(Sequence[Any], value)]
        return opened if isinstance(value, list) else tuple(opened)
    return shape if value is node else value
