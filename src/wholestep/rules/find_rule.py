"""The rule of a node of a graph, as planning and partitioning both see it."""

from __future__ import annotations

from torch.fx import Node

from .. import _torch
from .registry import rule_for
from .rule import BoundRule
from .testing.discover import discover

_KNOWN = ("aten", "prims", "wholestep", "_c10d_functional")


def find_rule(node: Node) -> BoundRule | None:
    """The rule of `node` on its global shapes; ops of other libraries that nobody wrote one for are tried out."""
    known = _torch.is_op(node.target) and node.target.namespace in _KNOWN
    return rule_for(node, None if known or _torch.is_getitem(node.target) else discover)
