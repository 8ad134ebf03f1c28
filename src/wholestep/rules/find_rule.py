"""Finds the rule of a graph node, for planning and partitioning alike."""

from __future__ import annotations

from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.call_keys import place_in
from . import registry
from .call import Call
from .rule import BoundRule
from .testing.discover import discover

_KNOWN = ("aten", "prims", "wholestep", "_c10d_functional")


def find_rule(node: Node) -> BoundRule | None:
    """The rule of `node` on its global shapes, cached by its arguments; ops of other libraries may be discovered."""
    kind = call_kind(node)
    if not kind.rules:
        built_in = _torch.is_op(node.target) and node.target.namespace in _KNOWN
        fallback = None if built_in or _torch.is_getitem(node.target) else discover
        kind.rules = (registry.bind_rule(Call.of(node), fallback),)
    return kind.rules[0]


def call_kind(node: Node) -> registry.CallKind:
    """One object for all calls with the arguments and outputs of `node`; its own if these cannot be hashed."""
    if (known := known_kind(node)) is not None:
        return known
    cache, key = place_in(registry.bound, node)
    try:
        kind = cache[key] if key in cache else cache.setdefault(key, registry.CallKind())
    except TypeError:  # an argument that cannot be hashed
        kind = registry.CallKind()
    meta.set_known_rule(node, (kind, registry.bound, node.args, node.kwargs))
    return kind


def known_kind(node: Node) -> registry.CallKind | None:
    """The kind of `node` that was found before, if it has the same arguments still, and the table the same rules."""
    kind, bound, args, kwargs = meta.known_rule(node) or (None,) * 4
    return kind if bound is registry.bound and args is node.args and kwargs is node.kwargs else None
