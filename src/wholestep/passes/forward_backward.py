"""Tells the forward and the backward of a step from what depends on complete gradients."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, reached
from ..partition.accumulators import ACCUMULATORS
from ..partition.batch_dependent import batch_dependent
from .base import meets_stages


def forward_backward(local: LocalGraph, later_stages: bool = True) -> tuple[set[Node], set[Node]]:
    """The nodes that depend on the batch or on random numbers; and the nodes of the forward and the backward.

    The latter are the batch-dependent nodes that do not depend on complete gradients, their operands, and the
    collectives on them; with `later_stages` also the later stages of hierarchical collectives.
    """
    varying = batch_dependent(local)
    gradients, communicated = set[Node](), set[Node]()
    todo: list[Node] = []
    for node in local.graph.nodes:
        if node.op == "call_function" and carries_stages(local, node):
            todo.append(node)
            continue
        if node.op != "call_function" or node not in varying:
            continue
        inputs = [n for n in node.all_input_nodes if n in varying]
        piece = _torch.is_getitem(node.target) or meta.value(node) is None
        if meta.is_batch_invariant(node) or (piece and all(n in gradients for n in inputs)):
            gradients.add(node)
        elif (
            meta.value(node) is not None
            or _sums_pieces(node, communicated)
            or (is_collective(node) and (later_stages or not communicated.issuperset(inputs)))
        ):
            todo.append(node)
        elif is_wait(node) or communicated.issuperset(inputs):
            communicated.add(node)
    return varying, reached(todo)


def carries_stages(local: LocalGraph, node: Node) -> bool:
    """True for what moves the pieces of the batch from stage to stage, which has a place in the forward and backward
    even where nothing reads it.
    """
    return meets_stages(local, node) and not is_collective(node)


def _sums_pieces(node: Node, communicated: Collection[Node]) -> bool:
    """True for what adds up a value of a piece that ranks have not exchanged: it frees that value."""
    return node.target in ACCUMULATORS and not any(operand in communicated for operand in node.all_input_nodes)
