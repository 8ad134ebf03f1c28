"""Finds the rule of a call: by name, by the pointwise tag, or index by index for list ops."""

from __future__ import annotations

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
    """True when every output has the shape of its entry in the first list."""
    first = node.args[0]
    if not isinstance(first, (list, tuple)) or not first:
        return False
    shapes = [m.shape if m else None for m in (meta.tensor(n) for n in first if isinstance(n, Node))]
    made = [m.shape for m in meta.tensors(node) if m is not None]
    return (
        bool(made)
        and len(made) % len(shapes) == 0
        and all(shape == shapes[i % len(shapes)] or not shape for i, shape in enumerate(made))
    )


def is_random(node: Node) -> bool:
    """True for an op that draws from the random number generator."""
    return _torch.is_op(node.target) and torch.Tag.nondeterministic_seeded in node.target.tags
