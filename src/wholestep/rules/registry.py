"""Finds the rule of a call: by name, by the pointwise tag, or index by index for list ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from .families import BY_NAME, base_name, elementwise, indexed
from .rule import BoundRule


def rule_for(node: Node) -> BoundRule | None:
    """The rule of `node` on its global shapes, or None when wholestep has none: its inputs are then made whole."""
    name = base_name(node)
    if name in BY_NAME:
        return BY_NAME[name](node)
    if not _torch.is_op(node.target):
        return None
    if name.startswith(("foreach_", "fused_")):
        return indexed(node) if _one_for_each(node) else None
    return elementwise(node) if torch.Tag.pointwise in node.target.tags else None


def _one_for_each(node: Node) -> bool:
    """True when every output has the shape that the entries at its place broadcast to (fused ops: or counts)."""
    lists = [a for a in node.args if isinstance(a, (list, tuple)) and any(isinstance(x, Node) for x in a)]
    shapes = [_broadcast(entries) for entries in zip(*lists, strict=False)]
    made = [m.shape for m in meta.tensors(node) if m is not None]
    fused = base_name(node).startswith("fused_")
    return (
        bool(made and shapes)
        and len(made) % len(shapes) == 0
        and all(shape == shapes[i % len(shapes)] or (fused and not shape) for i, shape in enumerate(made))
    )


def _broadcast(entries: Sequence[object]) -> tuple[int, ...] | None:
    """The shape that tensors broadcast to; None where one is missing."""
    given = [meta.tensor(n) if isinstance(n, Node) else None for n in entries]
    shapes = [m.shape for m in given if m]
    return None if None in given else tuple(cast(torch.Size, torch.broadcast_shapes(*shapes)))


def is_random(node: Node) -> bool:
    """True for an op that draws from the random number generator."""
    return _torch.is_op(node.target) and torch.Tag.nondeterministic_seeded in node.target.tags
