"""What of a program depends on the batch."""

from __future__ import annotations

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.region import region_of
from ..rules.registry import is_random


def batch_dependent(local: LocalGraph) -> set[Node]:
    """Nodes that depend on the batch, also on what other stages send of it, on gradients of earlier calls, or on random
    numbers.
    """
    dependent = {node for spec, node in local.placeholders() if spec.role in (Role.BATCH, Role.GRAD)}
    for node in local.graph.nodes:
        is_source = region_of(node) is not None or is_random(node) or meta.is_received_of_batch(node)
        if node.op == "call_function" and (is_source or not dependent.isdisjoint(node.all_input_nodes)):
            dependent.add(node)
    return dependent
