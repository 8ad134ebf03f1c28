"""Rows that are sent to the ranks of their groups, and back: an all-to-all of as many as ranks count while they run.

For each sort of rows, ranks gather how many each has of each group, and the host reads once how many it sends and
receives. Rows arrive in the order of the ranks that sent them, and are sorted by group. Programs state the shapes of
groups of equal size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor
from ..graph.nodes import add_call
from ..graph.op_kinds import COUNTS_ROWS, priced_like
from ..layout import has_extent
from ..mesh import Mesh
from ..rules.aten.rows_in_groups import inverse_rows, received_groups, sent_rows
from . import rank_ops

aten = torch.ops.aten
funcol = torch.ops._c10d_functional


# -- functions of local graphs --------------------------------------------------------------------------
def counts_of_groups(of: Tensor, groups: int) -> Tensor:
    """How many of the sorted rows are of each group."""
    return torch.searchsorted(of, torch.arange(groups + 1, device=of.device, dtype=of.dtype)).diff()


@priced_like(COUNTS_ROWS)
def rows_by_rank(counts_here: Tensor, counts: Tensor, first: int, count: int) -> list[list[int]]:
    """How many rows the rank sends to each one, and receives from each, by its counts and those of all."""
    ranks, groups = counts.shape[0] // counts_here.shape[0], counts_here.shape[0]
    each = -(-groups // ranks)
    sent = torch.cat([counts_here, counts_here.new_zeros(each * ranks - groups)]).view(ranks, each).sum(1)
    received = counts.view(ranks, groups).narrow(1, first, count).sum(1)
    return cast("list[list[int]]", torch.stack([sent, received]).tolist())


def order_by_group(
    counts: Tensor, first: int, count: int, groups: int, received: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The order by group of rows that are ordered by rank, then by group."""
    here = counts.view(-1, groups).narrow(1, first, count)
    of = torch.arange(count, device=counts.device, dtype=dtype).repeat(here.shape[0])
    return torch.repeat_interleave(of, here.reshape(-1), output_size=sum(received)).argsort(stable=True)


def groups_in_order(
    counts: Tensor, first: int, count: int, groups: int, received: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The group of each row that is received, in order."""
    here, of = counts.view(-1, groups), torch.arange(first, first + count, device=counts.device, dtype=dtype)
    return torch.repeat_interleave(of, here.narrow(1, first, count).sum(0), output_size=sum(received))


# -- their nodes ----------------------------------------------------------------------------------------------
def with_rows_sent(graph: Graph, mesh: Mesh) -> None:
    """Write what ranks do to send rows."""
    exchanges = dict[Node, _Exchange]()
    for node in [n for n in graph.nodes if n.target in (sent_rows, received_groups)]:
        *back_and_rows, of, first, count, groups, axis = node.args
        with graph.inserting_before(node):
            exchange = exchanges.get(of) or _Exchange(graph, mesh, of, first, count, groups, axis)
            exchanges[of] = exchange
            new = exchange.rows(*back_and_rows) if back_and_rows else exchange.groups_of_rows()
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@dataclass
class _Exchange:
    """Rows sorted by groups `of`, along `axis`."""

    graph: Graph
    mesh: Mesh
    of: Node
    first: Any
    count: Any
    groups: int
    axis: str
    orders: list[Node] = field(default_factory=list[Node])

    def __post_init__(self) -> None:
        of, ranks = one_tensor(self.of), self.mesh.axis_size(self.axis)
        each = contiguous([self.groups], replace(of, dtype=torch.int64))
        every = contiguous([self.groups * ranks], each)
        counts = self._call(counts_of_groups, (self.of, self.groups), each)
        self.counts = self._call(funcol.all_gather_into_tensor.default, (counts, ranks, self.axis), every)
        self.counts = self._call(funcol.wait_tensor.default, (self.counts,), every)
        split = self._call(rows_by_rank, (counts, self.counts, self.first, self.count), None, None)
        self.splits = [self._call(operator.getitem, (split, i), None) for i in (0, 1)]

    def rows(self, back: bool, x: Node) -> Node:
        """`x` at the ranks of its groups, or `back`."""
        tensor = contiguous(one_tensor(x).shape, one_tensor(x))
        if not self.orders:
            order = self._counted(order_by_group, torch.int64)
            self.orders = [order, self._call(inverse_rows, (order,), one_tensor(order))]
        splits = self.splits if back else self.splits[::-1]
        x = self._call(aten.index.Tensor, (x, [self.orders[1]]), tensor) if back else x
        x = self._call(rank_ops.contiguous, (x,), tensor)
        x = self._call(funcol.all_to_all_single.default, (x, *splits, self.axis), tensor)
        x = self._call(funcol.wait_tensor.default, (x,), tensor)
        return x if back else self._call(aten.index.Tensor, (x, [self.orders[0]]), tensor)

    def groups_of_rows(self) -> Node:
        """The group of each row that is received."""
        return self._counted(groups_in_order, one_tensor(self.of).dtype)

    def _counted(self, target: Any, dtype: torch.dtype) -> Node:
        args = self.counts, self.first, self.count, self.groups, self.splits[1], dtype
        return self._call(target, args, replace(one_tensor(self.of), dtype=dtype))

    def _call(self, target: Any, args: tuple[Any, ...], *tensors: TensorMeta | None) -> Node:
        new = add_call(self.graph, target, args, one_tensor(self.of), self.of)
        meta.set_tensors(new, tensors)
        meta.set_ranked(new, has_extent(args))
        meta.set_strided(new, False)
        return new
