"""Runs a bound graph through TorchInductor, by regions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ... import _torch
from ...errors import BackendError, first_line
from ...graph import meta
from ...graph.graph import Input
from ...graph.messages import POINT_TO_POINT, RECEIVES, SENDS, complete
from ...graph.nodes import communicates, ends_of, function_of, is_wait, node_at, operands
from ...graph.region import ByPiece, region_of
from ...graph.sizes_in_graph import record_of, sizes_among
from ...partition.accumulators import ACCUMULATORS
from ...partition.host_copies import HOST_COPIES
from ...partition.rank_ops import drawn
from ...passes.bucket import outline
from ...passes.fused_products import FUSED
from ...rules.registry import is_random
from ...sizes import SizeFloat, SizeGuards, SizeInt
from ..eager import eager, op_by_op
from ..protocol import NodeClock, Run, RunBody
from ..tensorize_numbers import as_tensors
from .aliases import without_aliases
from .bodies import Bodies, keep_own_memory
from .regions import CompiledRegions, in_regions
from .sized_regions import symbolic_fake

_IN_PYTHON = (
    drawn, *FUSED, *HOST_COPIES, *ACCUMULATORS, *POINT_TO_POINT, complete, torch.ops.aten._local_scalar_dense.default,
)  # fmt: skip
_OPTIONS = {"fallback_random": True, "reorder_for_locality": False}
"""Random ops draw what eager mode draws, in its order."""


@dataclass(frozen=True)
class Inductor:
    """The backend `inductor`: TorchInductor compiles what lies between the collectives of a step, equal layers once.

    Example:
        >>> step = wholestep.compile(train_step, backend=wholestep.Inductor())
    """

    name = "inductor"
    fused_optimizers = True
    in_place_buffers = False
    splits_steps = False
    times_nodes = True
    recordable = True

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """Compile `graph` for inputs like `example_inputs`.

        What Inductor cannot compile (fused optimizers, copies between devices, numbers read by the host) runs as under
        `eager`, and what communicates does too; all of it in the order of the graph.
        """
        _find_compilers(example_inputs)
        keep_own_memory(graph)
        as_tensors(graph, written_out=True)
        without_aliases(graph, self._apart)
        try:
            record = record_of(graph)
            fakes = _Fakes(record, self._apart)
            values = fakes.of(graph, example_inputs)
            _insert_shapes(graph, values)
            with _torch.kernels_built_together():
                regions = CompiledRegions(_compile, record)
                compiled = in_regions(graph, self._apart, values, regions)
                fakes.bodies.compile(regions)
            return eager(compiled, clock, fakes.body)
        except BackendError:
            raise
        except Exception as error:
            problem = f"Inductor cannot compile this graph: {first_line(error)}"
            raise BackendError(problem, next_step='use backend="eager"') from error

    def _apart(self, node: Node) -> bool:
        if node.target in _IN_PYTHON or region_of(node) or _torch.runs_fused_optimizer(node.target):
            return True
        if any(operand.target is _IN_PYTHON[-1] for operand in operands(node)):
            return True  # a number that is in the graph of Inductor is a constant
        if any(isinstance(size, SizeFloat) for size in sizes_among([node.args, node.kwargs])):
            return True  # a float is no input of Inductor's
        return communicates(node) or is_wait(node)


def _find_compilers(example_inputs: Sequence[Any]) -> None:
    """Raise BackendError where a compiler is missing that Inductor would look for later."""
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if devices == {"cpu"} and not (shutil.which("g++") or shutil.which("clang++")):
        problem = "backend 'inductor' needs a C++ compiler and found none"
        raise BackendError(problem, "g++ or clang++ on the PATH", 'install one, or use backend="eager"')
    if "cuda" in devices and not _torch.has_triton():
        problem = "backend 'inductor' needs Triton on a GPU and found none"
        needed = "the package triton, and a GPU that it supports"
        raise BackendError(problem, needed, 'install it, or use backend="eager"')


def _compile(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    random = sum(is_random(node) for node in module.graph.nodes)
    return _torch.inductor_compile(module, inputs, {**_OPTIONS, "reorder_for_peak_memory": random < 2})


class _Fakes:
    """What nodes make, without values; with symbols for sizes, in an environment of their own. The bodies of regions
    run on fakes, too, which shows the inputs that they are called with.
    """

    def __init__(self, record: SizeGuards | None, apart: Callable[[Node], bool]) -> None:
        self._record, sizes = record, {} if record is None else dict(zip(record.dims, record.now, strict=True))
        self._symbols = None if record is None else record.symbols.apart(sizes)
        self.bodies = Bodies(apart, self._run)

    def of(self, graph: Graph, inputs: Sequence[Any]) -> dict[Node, Any]:
        """Of the nodes of a program with inputs like these."""
        symbols = self._symbols
        with _torch.fake_mode() if symbols is None else symbols.mode as mode:

            def fake(node: Node, value: Any) -> Any:
                traced = meta.tensor(node)
                if symbols is not None and traced is not None and sizes_among([traced.shape, traced.stride]):
                    return symbolic_fake(traced, symbols)
                return mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value

            nodes = [node for node in graph.nodes if node.op == "placeholder"]
            return self._run(graph, [fake(node, value) for node, value in zip(nodes, inputs, strict=True)])

    def body(self, graph: Graph) -> RunBody:
        """What runs the body of a region. What follows from symbols runs op by op there."""
        return self.bodies.of(graph) if self._record is None else op_by_op(graph)

    def _run(self, graph: Graph, inputs: Sequence[Any], piece: int = 0) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        remaining = iter(inputs)

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return values[leaf]
            if isinstance(leaf, ByPiece):
                return leaf.values[piece]
            symbols = self._symbols
            return symbols.symbolic(leaf) if symbols is not None and isinstance(leaf, SizeInt) else leaf

        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "call_function":
                args, kwargs = map_aggregate((node.args, node.kwargs), value_of)  # pyright: ignore[reportGeneralTypeIssues]  # of fx, untyped
                function = self._function(node)
                if function is drawn:
                    _, function, *args = cast(Sequence[Any], args)
                values[node] = function(*args, **cast(dict[str, Any], kwargs))
        return values

    def _function(self, node: Node) -> Callable[..., Any]:
        if region := region_of(node):
            return self._on_fakes(region.body)
        return _ON_FAKES.get(node.target) or function_of(node)

    def _on_fakes(self, graph: Graph) -> RunBody:
        if self._record is None:
            return self.bodies.of(graph).on_fakes

        def run(inputs: list[Any], piece: int) -> list[Any]:
            values = self._run(graph, list(inputs), piece)
            return [values[node] for node in ends_of(graph)]

        return run


def _received(shape: Sequence[int], dtype: torch.dtype, device: str, *_: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _arrived(message: torch.Tensor | None) -> torch.Tensor | None:
    return message


_ON_FAKES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(SENDS, lambda *args: None), **dict.fromkeys(RECEIVES, _received), complete: _arrived,
}  # fmt: skip


def _insert_shapes(graph: Graph, values: dict[Node, Any]) -> None:
    """Shapes that are looked up when a program runs are known once it is a rank's own."""
    for node in [n for n in graph.nodes if n.target is outline]:
        shape = tuple(values[node_at(node, 0)].shape)
        for user in list(node.users):
            user.args = map_arg(user.args, lambda n, node=node, shape=shape: shape if n is node else n)  # pyright: ignore[reportUnknownLambdaType]
        graph.erase_node(node)
