"""Moves the wait of each collective to just before the first node that reads its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..graph.graph import LocalGraph, Role
from ..graph.nodes import is_wait
from ..graph.op_kinds import FREE
from .base import InPlace


@dataclass(frozen=True)
class SinkWaits(InPlace):
    """Moves waits behind arithmetic that does not read their results. Bitwise the same.

    Views move with their wait. So does the addition to a gradient that an earlier call left: it would close the
    bucket of the reduction.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move the waits of `local` down."""
        deferred = set[Node]()
        accumulated = {node for gradient, node in local.placeholders() if gradient.role is Role.GRAD}

        def place_before(reader: Node, node: Node) -> None:
            if node in deferred:
                deferred.remove(node)
                for operand in node.all_input_nodes:
                    place_before(reader, operand)
                reader.prepend(node)

        for node in list(local.graph.nodes):
            reads = set(node.all_input_nodes)
            accumulates = bool(reads & accumulated) and reads <= deferred | accumulated
            if accumulates:
                accumulated.add(node)
            if is_wait(node) or (node.target in FREE and reads <= deferred) or (accumulates and reads & deferred):
                deferred.add(node)
                continue
            for operand in node.all_input_nodes:
                place_before(node, operand)
        return local
