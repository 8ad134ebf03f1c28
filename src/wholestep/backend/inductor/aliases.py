"""Takes aliases out of a bound graph, so that no two inputs of a compiled region share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ... import _torch
from ...graph.nodes import is_mutating, is_wait, operands
from ...graph.region import ByPiece
from ...graph.storage import UNMARKED_VIEWS, always_shares
from ...passes.reinplace import fresh_form

aten = torch.ops.aten
_COPIES_AT_NEED = (aten.reshape.default, aten.contiguous.default)


def viewed(node: Node) -> Node | None:
    """The operand that `node` is a view of; None for everything that computes or writes, and for views that differ
    between pieces, which are made by themselves.
    """
    if has_numbers_of_pieces(node):
        return None
    if node.op != "call_function" or is_mutating(node) or is_wait(node) or node.target in _COPIES_AT_NEED:
        return None
    if _torch.is_getitem(node.target):
        source = operands(node)[0]
        return source if viewed(source) is not None else None
    if not _torch.is_op(node.target):
        return operands(node)[0] if always_shares(node.target) else None
    marked = any(result.alias_info is not None for result in _torch.schema_of(node.target).returns)
    return operands(node)[0] if marked or node.target in UNMARKED_VIEWS else None


def root_of(node: Node) -> Node:
    """What `node` is a view of, or itself."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def without_aliases(graph: Graph, apart: Callable[[Node], bool]) -> None:
    """Undo what `Reinplace` did to temporaries; what reads an input after it was written reads the input by its name.

    Nodes for which `apart` holds stay as they are.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not is_mutating(node) or apart(node):
            continue
        target = node.kwargs.get("out", node.args[0])
        if not isinstance(target, Node) or len(_torch.schema_of(node.target).returns) != 1:
            continue
        functional = None if root_of(target).op == "placeholder" or "out" in node.kwargs else fresh_form(node.target)
        if functional is not None:
            node.target = functional
        else:
            node.replace_all_uses_with(target)


def has_numbers_of_pieces(node: Node) -> bool:
    """True if an argument has a value for each piece."""
    todo: list[Any] = [*node.args, *node.kwargs.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, ByPiece):
            return True
        todo += cast("list[Any]", value) if isinstance(value, (list, tuple)) else ()
    return False
