"""What a program does to be exact where its batch is padded.

It puts constants at padded positions, where what reads them would mix other values in, and draws random numbers for the
longest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import add_node, copy_graph, node_at, operands
from ..graph.verify import check_train_graph
from ..sizes import most

aten = torch.ops.aten


@dataclass(frozen=True)
class Fill:
    """`value` at the padded positions of a dim of operand number `operand` of a node."""

    node: str
    operand: int
    dim: int
    value: float


@dataclass(frozen=True)
class Draw:
    """A node draws the `dims` of its result, which are padded, for the `longest` length."""

    node: str
    dims: tuple[int, ...]
    longest: int


LIKE = (
    aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype, aten.normal_functional.default, aten.uniform.default, aten.exponential.default,
)  # fmt: skip
"""Random ops that read the shape of their operand alone."""
FUSED = aten.native_dropout.default
SIZED = (aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low)
"""Random ops with an argument `size`."""


def with_fills(train: TrainGraph, fills: Sequence[Fill | Draw], length: str, symbols: _torch.Symbols) -> TrainGraph:
    """A copy of a step with these changes. The input `length` has the number of real positions, which come first."""
    graph = copy_graph(train.graph)
    named = {node.name: node for node in graph.nodes}
    places = {spec.name: node for spec, node in zip(train.inputs, graph.find_nodes(op="placeholder"), strict=True)}
    writer = _Writer(graph, places[length], symbols, {})
    for fill in fills:
        node = named[fill.node]
        if isinstance(fill, Fill):
            writer.write(fill, node)
        else:
            writer.draw(fill, node)
    filled = replace(train, graph=graph)
    check_train_graph(filled)
    return filled


@dataclass(frozen=True)
class _Writer:
    """Inserts nodes. `masks` of padded positions, by size, number of dims behind, and device: each is made once."""

    graph: Graph
    length: Node
    symbols: _torch.Symbols
    masks: dict[tuple[Any, ...], Node]

    def write(self, fill: Fill, node: Node) -> None:
        """Fill an operand of a node."""
        operand = operands(node)[fill.operand]
        beyond = self._beyond(fill, node, operand)
        filled = self._call(node, f"{node.name}__filled", aten.masked_fill.Scalar, operand, beyond, fill.value)
        number = iter(range(len(operands(node))))

        def put(argument: Node) -> Node:
            return filled if next(number) == fill.operand else argument

        node.args, node.kwargs = map_arg((node.args, node.kwargs), put)

    def draw(self, how: Draw, node: Node) -> None:
        """Draw for the longest length, and take what is of this one."""
        if node.target is FUSED:
            return self._draw_mask(how, node)
        shape = list(meta.one_tensor(node).shape)
        size = self._longest(how, shape)
        if node.target in LIKE:
            empty = self._call(node, f"{node.name}__longest", aten.new_empty.default, node.args[0], size)
            args = (empty, *node.args[1:])
        else:
            place = _torch.position_of(node.target, "size")
            args = tuple(size if i == place else argument for i, argument in enumerate(node.args))
        drawn = self._call(node, f"{node.name}__drawn", node.target, *args, **node.kwargs)
        node.replace_all_uses_with(self._used(how, node, drawn, shape))
        self.graph.erase_node(node)
        return None

    def _draw_mask(self, how: Draw, node: Node) -> None:
        """Dropout whose kernel draws the mask, too: it makes one of ones for the longest length."""
        source, rate = node_at(node, 0), cast(float, node.args[1])
        shape = list(meta.one_tensor(source).shape)
        size = self._longest(how, shape)
        ones = self._call(node, f"{node.name}__longest", aten.new_ones.default, source, size)
        both = self._call(node, f"{node.name}__drawn", FUSED, ones, *node.args[1:])
        mask = self._used(how, node, self._call(node, f"{node.name}__mask", _torch.GETITEM, both, 1), shape)
        masked = self._call(node, f"{node.name}__kept", aten.mul.Tensor, source, mask)
        masked = self._call(node, f"{node.name}__scaled", aten.mul.Scalar, masked, 1 / (1 - rate) if rate < 1 else 0.0)
        for item in list(node.users):
            item.replace_all_uses_with((masked, mask)[cast(int, item.args[1])])
            self.graph.erase_node(item)
        self.graph.erase_node(node)

    def _longest(self, how: Draw, shape: Sequence[int]) -> list[int]:
        """The shape that is drawn. One more: a part is cut out for each length, the longest too, so that its strides
        are alike for all.
        """
        return [most(how.longest, n) + 1 if dim in how.dims else n for dim, n in enumerate(shape)]

    def _used(self, how: Draw, node: Node, drawn: Node, shape: Sequence[int]) -> Node:
        for dim in how.dims:
            drawn = self._call(node, f"{node.name}__used_{dim}", aten.slice.Tensor, drawn, dim, 0, shape[dim])
        return drawn

    def _beyond(self, fill: Fill, before: Node, operand: Node) -> Node:
        """True at the padded positions of the dim."""
        tensor = meta.one_tensor(operand)
        size, behind = tensor.shape[fill.dim], len(tensor.shape) - 1 - fill.dim
        key = (getattr(size, "text", size), behind, tensor.device)
        if key not in self.masks:
            name = f"{before.name}__beyond_{fill.operand}"
            device = torch.device(tensor.device)
            mask = self._call(before, f"{name}_places", aten.arange.default, size, device=device, pin_memory=False)
            mask = self._call(before, name, aten.ge.Tensor, mask, self.length)
            for _ in range(behind):
                mask = self._call(before, f"{name}_dim", aten.unsqueeze.default, mask, -1)
            self.masks[key] = mask
        return self.masks[key]

    def _call(self, before: Node, name: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(before):
            new = add_node(self.graph, "call_function", target, args, kwargs, name)
        values, named = map_arg((self.symbols.symbolic(args), kwargs), meta.value)
        with self.symbols.mode, torch.no_grad():
            meta.set_value(new, target(*values, **named))
        meta.copy_origin(before, new)
        return new
