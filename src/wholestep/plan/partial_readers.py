"""The readers of a value, which decide where a partial value is reduced: at once, or after ops that shrink it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ..graph import meta
from ..graph.nodes import operands
from ..graph.op_kinds import VIEWS
from ..rules.find_rule import find_rule


def reads(user: Node, node: Node) -> bool:
    """True if `user` reads values of `node`, not only its shape."""
    rule = find_rule(user) if user.op == "call_function" else None
    return rule is None or any(n is node and i not in rule.by_shape for i, n in enumerate(operands(user)))


def shrinks(node: Node) -> bool:
    """True if all readers of `node` are linear in it, and their results together are smaller than `node`.

    Example: the expert weights chosen for tokens are far larger than their products with the tokens.
    """
    made, total = meta.tensor(node), 0
    for user, given in _readers(node):
        if not _passes(user, given):
            return False
        total += sum(found.numel for found in meta.tensors(user) if found)
    return made is not None and 0 < total < made.numel


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes that read the values of `node`, each with the view that it reads."""
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user, node


def _passes(user: Node, given: Node) -> bool:
    """True if `user` passes partial values of `given` alone through."""
    rule = find_rule(user) if user.op == "call_function" else None
    if rule is None:
        return False
    places = frozenset(i for i, n in enumerate(operands(user)) if n is given)
    return any(through.operands == places for group in rule.groups for through in group.partial)
