"""Where per-rank and global semantics would give different gradients: said once, with the user's line."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import Role, TrainGraph, node_at

aten = torch.ops.aten
_SCALE = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten._to_copy.default,
    aten.add.Tensor,
}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_BATCH_NORM = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")


def differences(graph: TrainGraph) -> tuple[str, ...]:
    """Sentences about what per-rank gradients do otherwise than one device on the whole batch would."""
    found: dict[str, None] = {}
    by_name = {node.name: node for node in graph.graph.nodes}
    for name in graph.losses:
        reason = _loss_reason(by_name[name], graph)
        if reason:
            found[f"{reason[0]} at {meta.source_line(reason[1]) or '%' + reason[1].name}: {reason[2]}"] = None
    norms = [
        n for n in by_name.values() if any(k in str(n.target) for k in _BATCH_NORM) and "backward" not in str(n.target)
    ]
    training = [n for n in norms if True in n.args and not any(k in str(n.target) for k in ("no_training",))]
    if training:
        where = meta.source_line(training[0]) or "%" + training[0].name
        found[f"batch norm at {where}: each rank normalizes over its own batch, one device over the whole"] = None
    return tuple(found)


def _loss_reason(loss: Node, graph: TrainGraph) -> tuple[str, Node, str] | None:
    """Why the gradient of this loss depends on how the batch is cut, by the reduction that ends it."""
    node, seen = loss, 0
    while isinstance(node, Node) and seen < 16:  # pyright: ignore[reportUnnecessaryIsInstance]  # a list ends it too
        seen += 1
        if node.target in _SUMS:
            return (
                "summed loss",
                node,
                "the gradient is averaged over ranks: 1/ranks of what one device computes on the whole batch",
            )
        if node.target is aten.div.Tensor and isinstance(node.args[1], Node) and _depends_on_batch(node.args[1], graph):
            return (
                "weighted mean",
                node,
                "each rank divides by its own count: ranks with fewer tokens weigh more for each token",
            )
        if getattr(node.target, "_overloadpacket", None) is aten.nll_loss_forward:
            if node.args[3] == 2:
                return (
                    "summed loss",
                    node,
                    "the gradient is averaged over ranks: 1/ranks of what one device computes on the whole batch",
                )
            if node.args[2] is not None:
                return ("class-weighted mean", node, "each rank divides by the weight of its own batch")
            return None
        if node.target not in _SCALE and "getitem" not in str(node.target):
            return None
        node = node_at(node, 0)
    return None


def _depends_on_batch(node: Node, graph: TrainGraph) -> bool:
    batch = {n for given, n in graph.placeholders() if given.role is Role.BATCH}
    todo, seen = [node], set[Node]()
    while todo:
        at = todo.pop()
        if at in batch:
            return True
        if at not in seen:
            seen.add(at)
            todo += at.all_input_nodes
    return False
