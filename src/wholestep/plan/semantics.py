"""Finds losses and layers whose gradients differ between per-rank and global semantics, with the user's line."""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import node_at
from ..graph.op_kinds import is_batch_norm_in_training
from .propagation_inputs import moving

aten = torch.ops.aten
_SCALE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten._to_copy.default,
    aten.add.Tensor,
}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_SUMMED = "summed loss", "the gradient is averaged over ranks: 1/ranks of what one device computes on the whole batch"
_WEIGHTED = "weighted mean", "each rank divides by its own count: ranks with fewer tokens weigh more for each token"
_CLASS_WEIGHTED = "class-weighted mean", "each rank divides by the weight of its own batch"


def differences(graph: TrainGraph) -> tuple[str, ...]:
    """One sentence for each way in which per-rank gradients differ from those of one device on the whole batch."""
    found: dict[str, None] = {}
    by_name = {node.name: node for node in graph.graph.nodes}
    for name in graph.losses:
        reason = _loss_reason(by_name[name], graph)
        if reason:
            node, (kind, effect) = reason
            found[f"{kind} at {meta.source_line(node) or '%' + node.name}: {effect}"] = None
    training = [n for n in by_name.values() if is_batch_norm_in_training(n.target) and True in n.args]
    if training:
        where = meta.source_line(training[0]) or "%" + training[0].name
        found[f"batch norm at {where}: each rank normalizes over its own batch, one device over the whole"] = None
    return tuple(found)


def _packet(node: Node) -> object:
    return getattr(node.target, "_overloadpacket", None)


def _loss_reason(loss: Node, graph: TrainGraph) -> tuple[Node, tuple[str, str]] | None:
    """Why the gradient of this loss depends on how the batch is sharded, by the reduction that ends it."""
    node, seen = loss, 0
    while isinstance(node, Node) and seen < 16:  # pyright: ignore[reportUnnecessaryIsInstance]  # a list ends it too
        seen += 1
        if node.target in _SUMS:
            return node, _SUMMED
        if node.target is aten.div.Tensor and node.args[1] in moving(graph):
            return node, _WEIGHTED
        if _packet(node) is aten.nll_loss_forward:
            if node.args[3] == 2:
                return node, _SUMMED
            return None if node.args[2] is None else (node, _CLASS_WEIGHTED)
        if node.target not in _SCALE and not _torch.is_getitem(node.target):
            return None
        node = node_at(node, 0)
    return None
