"""Microseconds that one node of a local graph takes: arithmetic of products, bytes of the rest."""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import operands
from ..graph.ops import VIEWS
from .speeds import Speeds, Work

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.linear.default}
_FREE = VIEWS | {aten.detach.default, aten.alias.default}


def node_us(node: Node, speeds: Speeds) -> float:
    """Microseconds of one call node on one rank, at least those of a launch; views and picks of items are free."""
    made = work(node)
    return speeds.work_us(made) if made else 0.0


def work(node: Node) -> Work | None:
    """What one call node does; None for what takes no time."""
    if node.op != "call_function" or node.target in _FREE or _torch.is_getitem(node.target):
        return None
    moved = sum(_bytes(n) for n in {*operands(node), node})
    made = next((m for m in meta.tensors(node) if m is not None), None)
    dtype = str(made.dtype).removeprefix("torch.") if made else "float32"
    backward = "backward" in str(node.target)
    return Work(moved, flops(node), dtype, _matmul(node), _attention(node), _is_causal(node), backward)


def flops(node: Node) -> float:
    """Multiplications and additions of a product, a convolution or attention (two; 2.5 times that backward)."""
    made, name, shapes = meta.tensors(node), str(node.target), _shapes(node)
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


def _matmul(node: Node) -> tuple[int, int, int, int] | None:
    made, shapes = meta.tensors(node), _shapes(node)
    if node.target not in _PRODUCTS or made[0] is None:
        return None
    batched = node.target in (aten.bmm.default, aten.baddbmm.default)
    batch, rest = (made[0].shape[0], made[0].shape[1:]) if batched else (1, made[0].shape)
    return batch, prod(rest[:-1]), rest[-1], shapes[-2][-1]


def _attention(node: Node) -> tuple[int, int, int, int, int] | None:
    """(batch, heads, queries, keys, width): a backward is given the gradient of its output first."""
    shapes, name = _shapes(node), str(node.target)
    first = 1 if "backward" in name else 0
    if "attention" not in name or len(shapes) < first + 3 or len(shapes[first]) != 4:
        return None
    (batch, heads, queries, width), keys = shapes[first], shapes[first + 1][-2]
    return batch, heads, queries, keys, width


def _is_causal(node: Node) -> bool:
    if "attention" not in str(node.target):
        return False
    names = [a.name for a in _torch.schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get("is_causal") is True


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [s.shape for n in operands(node) if (s := meta.tensor(n)) is not None]


def _bytes(node: Node) -> int:
    return sum(m.size_bytes for m in meta.tensors(node) if m is not None)
