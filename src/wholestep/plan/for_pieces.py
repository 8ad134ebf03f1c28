"""Rewrites of a step that is computed piece by piece: what all pieces need must not depend on more than it has to.

Random numbers depend on shapes alone, so that those of the whole batch are drawn before its pieces are computed. The
weight of all targets of a loss depends on the targets alone, so that it is known before the forward.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.meta import TensorMeta
from ..graph.nodes import copy_graph, drop_dead, node_at
from ..graph.op_kinds import packet_name
from ..rules.registry import is_random

aten = torch.ops.aten
_BY_SHAPE = frozenset({
    "rand_like", "randn_like", "randint_like", "normal_functional", "uniform", "exponential", "geometric", "cauchy",
    "log_normal", "random",
})  # fmt: skip
DRAWN_INTO = {aten.empty_like.default: aten.empty.memory_format, aten.ones_like.default: aten.ones.default}
"""Factories by shape whose results random ops read, and the same by sizes."""
NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_MEAN = 1


def for_pieces(graph: TrainGraph) -> TrainGraph:
    """`graph` with random ops that read nothing of the batch but its size, and losses whose targets are counted apart.

    Example: dropout draws a mask and applies it.
    """
    new = copy_graph(graph.graph)
    for node in [n for n in new.nodes if n.op == "call_function"]:
        if node.target is aten.bernoulli.p or packet_name(node.target) in _BY_SHAPE:
            node.args = (_call(node, node, aten.empty_like.default, node.args[0]), *node.args[1:])
            if node.target is aten.bernoulli.p:
                _as_booleans(node)
        elif node.target is aten.native_dropout.default and node.args[2] is True:
            _split_dropout(node)
        elif node.target in NLL:
            count_targets(node)
    drop_dead(new)
    return replace(graph, graph=new)


def is_drawn_into(node: Node) -> bool:
    """Return whether random numbers are drawn in place of what a node makes: for all pieces at once."""
    return node.target in DRAWN_INTO and bool(node.users) and all(map(is_random, node.users))


def _call(before: Node, template: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call in front of `before`, with the origin of `like`."""
    name = f"{template.name}__{target.__name__.split('.')[0]}"
    with before.graph.inserting_before(before):
        new = before.graph.create_node("call_function", target, args, kwargs, name=name)
    meta.copy(template, new)
    meta.recompute_value(new)
    return new


def _as_booleans(node: Node) -> None:
    """Keep a draw of zeros and ones as booleans: all of it is in memory while pieces are computed."""
    first = node.next
    bits = _call(first, node, aten._to_copy.default, node, dtype=torch.bool)
    numbers = _call(first, node, aten._to_copy.default, bits, dtype=meta.one_tensor(node).dtype)
    node.replace_all_uses_with(numbers, delete_user_cb=lambda user: user is not bits)


def _split_dropout(node: Node) -> None:
    """Draw the mask from a tensor of ones, and multiply by it, as the kernel of `native_dropout` does."""
    source, share = node_at(node, 0), float(str(node.args[1]))
    node.args = (_call(node, node, aten.ones_like.default, source), *node.args[1:])
    for item in [user for user in node.users if user.args[1] == 0]:
        masked = _call(item, item, aten.mul.Tensor, source, _call(item, item, operator.getitem, node, 1))
        out = _call(item, item, aten.mul.Scalar, masked, 1 / (1 - share) if share < 1 else 0.0)
        item.replace_all_uses_with(out)


def count_targets(node: Node) -> None:
    """Compute the second result, the weight of all targets, from the targets. Only the backward of a mean reads it."""
    item = next((user for user in node.users if _torch.is_getitem(user.target) and user.args[1] == 1), None)
    if item is None:
        return
    tensor = meta.one_tensor(item)
    backward = ("nll_loss_backward", "nll_loss2d_backward")
    if all(packet_name(user.target) in backward and user.args[4:5] != (_MEAN,) for user in item.users):
        new = _call(item, item, aten.zeros.default, [], dtype=tensor.dtype, device=torch.device(tensor.device))
    else:
        new = _weight_of_targets(item, node, tensor)
    item.replace_all_uses_with(new)


def _weight_of_targets(item: Node, loss: Node, tensor: TensorMeta) -> Node:
    target, weight, _, ignored = loss.args[1:5]
    counts = _call(item, item, aten.ne.Scalar, target, ignored)
    if weight is None:
        return _call(item, item, aten.sum.default, counts, dtype=tensor.dtype)
    classes = _call(item, item, aten.mul.Tensor, target, counts)  # ignore_index is often outside [0, classes)
    weights = _call(item, item, aten.index.Tensor, weight, [classes])
    return _call(item, item, aten.sum.default, _call(item, item, aten.mul.Tensor, weights, counts))
