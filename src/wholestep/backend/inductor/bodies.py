"""Bodies that run for each piece of a batch, of loops and of blocks of stages, compiled by regions.

What a body makes of a piece follows from its inputs and from numbers of the piece. A pass over fakes goes through all
pieces in the order of the program: pieces for which every value has one shape share a form of the body, which is
compiled. What is called with other inputs than the fakes runs op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ...graph.nodes import copy_graph, ends_of
from ...partition.accumulators import ACCUMULATORS, add_up, keep_piece
from ..eager import op_by_op
from ..protocol import RunBody
from ..tensorize_numbers import as_tensors
from .aliases import has_numbers_of_pieces, without_aliases
from .regions import CompiledRegions, in_regions

Fakes = Callable[[Graph, Sequence[Any], int], dict[Node, Any]]
"""What each node of a graph makes of these inputs for a piece, without values."""


@dataclass
class Bodies:
    """The bodies of a program by their graphs."""

    apart: Callable[[Node], bool]
    fakes: Fakes
    by_graph: dict[Graph, _Body] = field(default_factory=dict["Graph", "_Body"])

    def of(self, graph: Graph) -> _Body:
        """The body with this graph, which several parts of a stage may run."""
        if graph not in self.by_graph:
            self.by_graph[graph] = _Body(graph, self)
        return self.by_graph[graph]

    def compile(self, regions: CompiledRegions) -> None:
        """Compile every form that the fakes have shown."""
        for body in self.by_graph.values():
            body.compile(regions)

    def runs_apart(self, node: Node) -> bool:
        """True for nodes of a body that are not compiled: also those with a number for each piece."""
        return self.apart(node) or has_numbers_of_pieces(node)


class _Body:
    """`forms`: what fakes have shown of the pieces with the same shapes, and what runs those."""

    def __init__(self, graph: Graph, bodies: Bodies) -> None:
        self._bodies, self._plain = bodies, op_by_op(graph)
        self._graph = copy_graph(graph)
        keep_own_memory(self._graph)
        as_tensors(self._graph, written_out=True)
        without_aliases(self._graph, bodies.runs_apart)
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._totals = {n for n in placeholders if n.users and all(u.target in ACCUMULATORS for u in n.users)}
        self._read = [number for number, node in enumerate(placeholders) if node not in self._totals]
        self._forms: dict[Hashable, dict[Node, Any]] = {}
        self._of_piece: dict[int, tuple[Hashable, Hashable]] = {}
        self._compiled: dict[Hashable, RunBody] = {}

    def on_fakes(self, inputs: Sequence[Any], piece: int) -> list[Any]:
        """What the body makes of fakes."""
        fakes = list(inputs)
        values = self._bodies.fakes(self._graph, fakes, piece)
        form = tuple(_about(value) for node, value in values.items() if node not in self._totals)
        self._forms.setdefault(form, values)
        self._of_piece[piece] = form, self._about(fakes)
        return [values[node] for node in ends_of(self._graph)]

    def compile(self, regions: CompiledRegions) -> None:
        """Compile each form."""
        for form, values in self._forms.items():
            graph = in_regions(self._graph, self._bodies.runs_apart, values, regions)
            self._compiled[form] = op_by_op(graph)
        self._forms = {}

    def __call__(self, inputs: list[Any], piece: int) -> list[Any]:
        """Run it for a piece."""
        form, about = self._of_piece[piece]
        run = self._compiled[form] if self._about(inputs) == about else self._plain
        return run(inputs, piece)

    def _about(self, inputs: Sequence[Any]) -> Hashable:
        return tuple(_about(inputs[number]) for number in self._read)


def keep_own_memory(graph: Graph) -> None:
    """Let accumulators copy what they begin with: two values that a compiled function returns may be one."""
    for node in graph.nodes:
        if node.target in (add_up, keep_piece):
            node.args = (*node.args[:-1], False)


def _about(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_about, cast(Sequence[Any], value)))
    return type(value).__name__
