"""Microseconds that one node of a local graph takes: arithmetic of products, bytes of the rest."""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import operands
from ..graph.ops import VIEWS
from .machine import Machine

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.linear.default}
_FREE = VIEWS | {aten.detach.default, aten.alias.default}


def node_us(node: Node, machine: Machine) -> float:
    """Microseconds of one call node on one rank, at least those of a launch; views and picks of items are free."""
    if node.op != "call_function" or node.target in _FREE or _torch.is_getitem(node.target):
        return 0.0
    moved = sum(_bytes(n) for n in {*operands(node), node})
    return machine.launch_us + max(flops(node) / machine.flops_per_us, moved / machine.memory_bytes_per_us)


def flops(node: Node) -> float:
    """Multiplications and additions of a product, a convolution or attention (two; 2.5 times that backward)."""
    made, name = meta.tensors(node), str(node.target)
    shapes = [s.shape for n in operands(node) if (s := meta.tensor(n)) is not None]
    if node.target in _PRODUCTS and made[0] is not None:
        return 2.0 * prod(made[0].shape) * shapes[-2][-1]
    if "attention" in name and len(shapes) >= 3:
        batch, length, width = prod(shapes[0][:-2]), shapes[0][-2], shapes[0][-1]
        return 4.0 * batch * length * shapes[1][-2] * width * (2.5 if "backward" in name else 1.0)
    if "convolution" in name and len(shapes) >= 2:
        backward = "backward" in name
        data, weight = (shapes[0], shapes[2]) if backward else (made[0].shape if made[0] else (), shapes[1])
        return 2.0 * prod(data[:1] + data[2:]) * prod(weight) * (2 if backward else 1)
    return 0.0


def _bytes(node: Node) -> int:
    return sum(m.size_bytes for m in meta.tensors(node) if m is not None)
