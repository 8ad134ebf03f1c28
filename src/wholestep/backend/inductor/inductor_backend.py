"""Runs a bound graph through TorchInductor: by regions, or collectives and all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ... import _torch
from ...errors import BackendError, first_line, shown
from ...graph import meta
from ...graph.graph import Input
from ...graph.nodes import communicates, function_of, is_wait, node_at, operands
from ...graph.sizes_in_graph import record_of, sizes_among
from ...partition.host_copies import HOST_COPIES
from ...partition.rank_ops import drawn
from ...passes.bucket import outline
from ...passes.fused_products import FUSED
from ...rules.registry import is_random
from ...sizes import SizeFloat, SizeGuards, SizeInt
from ..eager import eager
from ..protocol import NodeClock, Run
from ..tensorize_numbers import as_tensors
from .aliases import without_aliases
from .regions import CompiledRegions, in_regions
from .sized_regions import symbolic_fake

Scope = Literal["region", "whole"]
_IN_PYTHON = (drawn, *FUSED, *HOST_COPIES, torch.ops.aten._local_scalar_dense.default)
_OPTIONS = {"fallback_random": True, "reorder_for_locality": False}
"""Random ops draw what eager mode draws, in its order."""


@dataclass(frozen=True)
class Inductor:
    """The backend `inductor`: TorchInductor compiles the arithmetic of a step.

    Args:
        scope: `"region"` compiles what lies between collectives, equal layers once. `"whole"` compiles the step as one
            function with its collectives.

    Example:
        >>> step = wholestep.compile(train_step, backend=wholestep.Inductor(scope="whole"))
    """

    scope: Scope = "region"
    name = "inductor"
    fused_optimizers = True
    in_place_buffers = False
    splits_steps = False
    recordable = True

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise BackendError(f"Inductor(scope={shown(self.scope)})", "'region' or 'whole'", "correct the name")

    @property
    def times_nodes(self) -> bool:
        """See `Backend`: a function that is compiled with its collectives has no nodes to time."""
        return self.scope == "region"

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """Compile `graph` for inputs like `example_inputs`.

        What Inductor cannot compile (fused optimizers, copies between devices, numbers read by the host) runs as under
        `eager`, and with the scope `region` what communicates does too; all of it in the order of the graph.
        """
        _find_compilers(example_inputs)
        as_tensors(graph, written_out=True)
        without_aliases(graph, self._apart)
        try:
            record = record_of(graph)
            values = _fakes(graph, example_inputs, record)
            _insert_shapes(graph, values)
            with _torch.kernels_built_together():
                regions = CompiledRegions(_compile, record)
                compiled = in_regions(graph, self._apart, values, regions, self.scope == "region")
            return eager(compiled, clock)
        except BackendError:
            raise
        except Exception as error:
            found = f"Inductor cannot compile this graph: {first_line(error)}"
            raise BackendError(found, next_step='use backend="eager"') from error

    def _apart(self, node: Node) -> bool:
        if node.target in _IN_PYTHON or _torch.runs_fused_optimizer(node.target):
            return True
        if any(given.target is _IN_PYTHON[-1] for given in operands(node)):
            return True  # a number that is in the graph of Inductor is a constant
        if any(isinstance(size, SizeFloat) for size in sizes_among([node.args, node.kwargs])):
            return True  # a float is no input of Inductor's
        return self.scope == "region" and (communicates(node) or is_wait(node))


def _find_compilers(example_inputs: Sequence[Any]) -> None:
    """Raise BackendError where a compiler is missing that Inductor would look for later."""
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if devices == {"cpu"} and not (shutil.which("g++") or shutil.which("clang++")):
        found = "backend 'inductor' needs a C++ compiler and found none"
        raise BackendError(found, "g++ or clang++ on the PATH", 'install one, or use backend="eager"')
    if "cuda" in devices and not _torch.has_triton():
        found = "backend 'inductor' needs Triton on a GPU and found none"
        needed = "the package triton, and a GPU that it supports"
        raise BackendError(found, needed, 'install it, or use backend="eager"')


def _compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    random = sum(is_random(node) for node in module.graph.nodes)
    return _torch.inductor_compile(module, inputs, {**_OPTIONS, "reorder_for_peak_memory": random < 2})


def _fakes(graph: Graph, inputs: Sequence[Any], record: SizeGuards | None) -> dict[Node, Any]:
    """What each node makes, without its values; with symbols for sizes, in an environment of their own."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    symbols = None if record is None else record.symbols.apart(dict(zip(record.dims, record.now, strict=True)))

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return values[leaf]
        return symbols.symbolic(leaf) if symbols is not None and isinstance(leaf, SizeInt) else leaf

    with _torch.fake_mode() if symbols is None else symbols.mode as mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                value, made = next(given), meta.tensor(node)
                if symbols is not None and made is not None and sizes_among([made.shape, made.stride]):
                    values[node] = symbolic_fake(made, symbols)
                else:
                    values[node] = mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
            elif node.op == "call_function":
                args, kwargs = map_aggregate((node.args, node.kwargs), value_of)  # pyright: ignore[reportGeneralTypeIssues]  # of fx, untyped
                function = function_of(node)
                if function is drawn:
                    _, function, *args = cast(Sequence[Any], args)
                values[node] = function(*args, **cast(dict[str, Any], kwargs))
    return values


def _insert_shapes(graph: Graph, values: dict[Node, Any]) -> None:
    """Shapes that are looked up when a program runs are known once it is a rank's own."""
    for node in [n for n in graph.nodes if n.target is outline]:
        shape = tuple(values[node_at(node, 0)].shape)
        for user in list(node.users):
            user.args = map_arg(user.args, lambda n, node=node, shape=shape: shape if n is node else n)  # pyright: ignore[reportUnknownLambdaType]
        graph.erase_node(node)
