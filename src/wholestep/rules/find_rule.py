"""Finds the rule of a graph node, for planning and partitioning alike."""

from __future__ import annotations

from torch.fx import Node

from .. import _torch
from .registry import rule_for
from .rule import BoundRule
from .testing.discover import discover

_KNOWN = ("aten", "prims", "wholestep", "_c10d_functional")


def find_rule(node: Node) -> BoundRule | None:
    """The rule of `node` on its global shapes; ops of other libraries without a rule go through discovery."""
    known = _torch.is_op(node.target) and node.target.namespace in _KNOWN
    return rule_for(node, None if known or _torch.is_getitem(node.target) else discover)
