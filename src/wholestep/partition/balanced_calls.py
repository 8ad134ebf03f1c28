"""Calls of causal attention for which ranks exchange queries, so that all attend to as many keys.

Everywhere else a rank has contiguous tokens. For these calls it gets an early and a late part of the queries
(`layout.dealt`), and sends back what it computes. The backward reads what the forward had, and what that computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.meta import contiguous, one_tensor, with_shape
from ..graph.nodes import node_at, operands
from ..layout import Layout, OfOwner, dealt, resolve, shared
from ..plan.balanced_queries import Queries, queries_of
from ..plan.plan import Plan
from . import rank_ops
from .collectives import Emitter

aten = torch.ops.aten
funcol = torch.ops._c10d_functional


@dataclass
class BalancedCalls:
    """Writes such calls. `dealt`: what ranks have after an exchange, by the value of the step and its layout."""

    emit: Emitter
    plan: Plan
    dealt: dict[tuple[Node, Layout], Node] = field(default_factory=dict[tuple[Node, Layout], Node])

    def __post_init__(self) -> None:
        self.names = frozenset(self.plan.options.balanced)

    def queries(self, node: Node) -> Queries | None:
        """The queries of a call that are exchanged."""
        return queries_of(node, self.plan.decisions[node.name], self.plan.mesh) if node.name in self.names else None

    def operands(self, node: Node, arguments: list[Node]) -> list[Node]:
        """`arguments`, the operands of a call, with the queries that a rank gets."""
        queries, out = self.queries(node), list(arguments)
        if queries is None:
            return out
        for i, dim in queries.operands.items():
            key = operands(node)[i], self.plan.decisions[node.name].operands[i]
            if key not in self.dealt:
                self.dealt[key] = self._exchange(arguments[i], dim, queries, back=False)
            out[i] = self.dealt[key]
        return out

    def result(self, new: Node, node: Node) -> Node:
        """`new`, a call on the queries that a rank gets, or what is picked of its results. These are sent back to the
        ranks whose tokens they are; if balanced calls alone read them, that is dead.
        """
        source, place = (node_at(node, 0), meta.picked(node).start) if _torch.is_getitem(node.target) else (node, 0)
        if (queries := self.queries(source)) is None:
            return new
        tensors, rows = list(meta.tensors(new)), resolve(_rows(queries), self.plan.mesh.coordinate(0))
        for i, dim in queries.outputs.items():
            if 0 <= i - place < len(tensors) and (tensor := tensors[i - place]) is not None:
                tensors[i - place] = with_shape(tensor, (*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]))
        meta.set_tensors(new, tensors)
        if source is node or place not in queries.outputs:
            return new
        self.dealt[node, self.plan.decisions[node.name].outputs[0]] = new
        return self._exchange(new, queries.outputs[place], queries, back=True)

    def _exchange(self, node: Node, dim: int, queries: Queries, back: bool) -> Node:
        """Send a rank's piece to those that get parts of it, or back. What comes is in the order of tokens, and what
        comes back in that of ranks.
        """
        ranks, axis, rest = range(queries.parts), queries.axis, one_tensor(node).shape
        rest, last = (*rest[:dim], *rest[dim + 1 :]), 2 * queries.parts - 1
        each = [[shared(queries.size, queries.parts, piece, to) for to in ranks] for piece in ranks]
        parts = [OfOwner(axis, tuple(each[rank][to][i] for rank in ranks)) for to in ranks for i in (0, 1)]
        there = [OfOwner(axis, tuple(sum(each[rank][to]) for rank in ranks)) for to in ranks]
        here = [OfOwner(axis, tuple(sum(each[piece][rank]) for rank in ranks)) for piece in ranks]
        by_token = [*range(0, last, 2), *range(last, 0, -2)]
        by_rank = sorted(range(last + 1), key=by_token.__getitem__)
        own = ([_rows(queries)], [0]) if back else ([parts[i] for i in by_token], by_rank)
        node = self._call(rank_ops.rows_in_parts, (node, dim, *own), (one_tensor(node).shape[dim], *rest), node)
        splits = (there, here) if back else (here, there)
        shape = (sum(resolve(splits[0], self.plan.mesh.coordinate(0))), *rest)
        node = self._call(funcol.all_to_all_single.default, (node, *splits, axis), shape, node)
        node = self._call(funcol.wait_tensor.default, (node,), shape, node)
        if back:
            node = self._call(rank_ops.rows_in_parts, (node, 0, parts, by_token), shape, node)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        node = self._call(aten.permute.default, (node, order), [shape[d] for d in order], node)
        meta.set_strided(node, True)
        return node

    def _call(self, target: Any, args: tuple[Any, ...], shape: Sequence[int], node: Node) -> Node:
        new = self.emit.call(target, args, contiguous(shape, one_tensor(node)), node)
        meta.set_strided(new, False)
        return new


def _rows(queries: Queries) -> OfOwner:
    """How many queries a rank gets."""
    parts = [dealt(queries.size, queries.parts, rank) for rank in range(queries.parts)]
    return OfOwner(queries.axis, tuple(early[1] + late[1] for early, late in parts))
