"""What reads a value, and so where a partial one is best reduced: where it is made, or behind ops that make less."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ..graph import meta
from ..graph.graph import operands
from ..graph.ops import VIEWS
from ..rules.find_rule import find_rule


def reads(user: Node, node: Node) -> bool:
    """True when `user` reads values of `node`, not only its shape."""
    rule = find_rule(user) if user.op == "call_function" else None
    return rule is None or any(n is node and i not in rule.by_shape for i, n in enumerate(operands(user)))


def shrinks(node: Node) -> bool:
    """True when every op that reads `node` is linear in it, and all of them together make less than it is.

    The weights of experts that tokens chose are the case in point: larger by far than their products with tokens.
    """
    made, total = meta.tensor(node), 0
    for user, given in _readers(node):
        if not _passes(user, given):
            return False
        total += sum(found.numel for found in meta.tensors(user) if found)
    return made is not None and 0 < total < made.numel


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """What reads the values of `node`, and the view of it that is read."""
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user, node


def _passes(user: Node, given: Node) -> bool:
    """True when partial values of `given` alone pass through."""
    rule = find_rule(user) if user.op == "call_function" else None
    if rule is None:
        return False
    places = frozenset(i for i, n in enumerate(operands(user)) if n is given)
    return any(through.operands == places for group in rule.groups for through in group.partial)
