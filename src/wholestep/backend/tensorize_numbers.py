"""Scheduled numbers (learning rates) that a graph reads into Python, kept as tensors: no compiler bakes them in."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.nodes import operands
from ..graph.op_kinds import is_list_op

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default
_SCALED: dict[Any, tuple[int, str]] = {
    **dict.fromkeys([aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor], (1, "alpha")),
    **dict.fromkeys([aten.addcdiv.default, aten.addcdiv_.default], (1, "value")),
    **dict.fromkeys([aten.addcmul.default, aten.addcmul_.default], (1, "value")),
    **dict.fromkeys([aten._foreach_add.List, aten._foreach_add_.List], (1, "alpha")),
}
"""Ops that multiply one operand by a number: which operand, and what the number is called."""


def as_tensors(graph: Graph, written_out: bool = False) -> list[str]:
    """Multiply by the tensor where an op takes the number that it holds; returns what still reads one, as text.

    The product is rounded before it is added. With `written_out`, numbers that are part of the program, such as a
    weight decay of 0.1, are multiplied by apart as well: Inductor of torch 2.11 and 2.13 computes
    `add(mm(a, b), c, alpha=0.1)` as `add(mm(a, b), c)`.
    """
    for node in list(graph.nodes):
        if node.target in _SCALED:
            position, name = _SCALED[node.target]
            factor = node.kwargs.get(name, 1)
            is_read = isinstance(factor, Node) and factor.target is _READ
            if is_read or (written_out and name == "alpha" and not isinstance(factor, Node) and factor != 1):
                value = cast(Node, factor).args[0] if is_read else factor
                _multiply(graph, node, position, value)
                node.kwargs = {key: argument for key, argument in node.kwargs.items() if key != name}
    reads = [n for n in graph.nodes if n.target is _READ]
    for node in reads:
        if not node.users:
            graph.erase_node(node)
    return [f"%{user.name} ({user.target})" for node in reads for user in node.users]


def _multiply(graph: Graph, node: Node, position: int, factor: Any) -> None:
    """Argument `position` of `node`, a tensor or a list of them, times `factor`."""
    operand = node.args[position]
    with graph.inserting_before(node):
        if isinstance(operand, Node):
            new: Any = graph.call_function(aten.mul.Tensor, (operand, factor))
            meta.copy(operand, new)
        else:
            listed = cast(list[Node], operand)
            kind = aten._foreach_mul.Tensor if isinstance(factor, Node) else aten._foreach_mul.Scalar
            product = graph.call_function(kind, (listed, factor))
            meta.set_tensors(product, tuple(meta.tensor(n) for n in listed))
            new = [graph.call_function(operator.getitem, (product, i)) for i in range(len(listed))]
            for source, item in zip(listed, new, strict=True):
                meta.copy(source, item)
    node.args = (*node.args[:position], new, *node.args[position + 1 :])


def in_single_precision(graph: Graph, numbers: set[Node]) -> None:
    """Fused optimizers on a GPU read a learning rate that is there too as a float32."""
    for node in list(graph.nodes):
        rate = node.kwargs.get("lr")
        if is_list_op(node.target) and isinstance(rate, Node) and rate in numbers:
            with graph.inserting_before(node):
                single = graph.call_function(aten._to_copy.default, (rate,), {"dtype": torch.float32})
            node.kwargs = {**node.kwargs, "lr": single}


def following(graph: Graph, numbers: set[Node]) -> set[Node]:
    """What follows from `numbers` alone, themselves included."""
    followers = set(numbers)
    for node in graph.nodes:
        sources = operands(node)
        if node.op == "call_function" and sources and all(n in followers for n in sources):
            followers.add(node)
    return followers
