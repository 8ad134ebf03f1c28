"""Rows that are sent to the ranks of their groups, and back: an all-to-all of as many as ranks count while they run.

For each sort of rows, ranks gather how many each has of each group, and the host reads once how many it sends and
receives. Rows arrive in the order of the ranks that sent them, and are sorted by group. Programs state the shapes of
groups of equal size. Or the host reads nothing: each rank sends to each as many as it may have for it at most, of which
the last are zeros, and sorts these behind all that have groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor
from ..graph.nodes import add_call, reached
from ..graph.op_kinds import COUNTS_ROWS, priced_like
from ..mesh import Mesh
from ..rules.aten.rows_in_groups import inverse_rows, most_rows, received_groups, sent_rows
from . import rank_ops

aten = torch.ops.aten
funcol = torch.ops._c10d_functional


# -- functions of local graphs --------------------------------------------------------------------------
def counts_of_groups(of: Tensor, groups: int) -> Tensor:
    """How many of the sorted rows are of each group."""
    return torch.searchsorted(of, torch.arange(groups + 1, device=of.device, dtype=of.dtype)).diff()


@priced_like(COUNTS_ROWS)
def rows_by_rank(counts_here: Tensor, counts: Tensor, first: int, count: int) -> Tensor:
    """How many rows the rank sends to each one, and receives from each, by its counts and those of all."""
    ranks, groups = counts.shape[0] // counts_here.shape[0], counts_here.shape[0]
    each = -(-groups // ranks)
    sent = torch.cat([counts_here, counts_here.new_zeros(each * ranks - groups)]).view(ranks, each).sum(1)
    received = counts.view(ranks, groups).narrow(1, first, count).sum(1)
    return torch.stack([sent, received]).cpu()


def numbers_of(counts: Tensor, row: int) -> list[int]:
    """A row of counts, which the host has."""
    return cast("list[int]", counts[row].tolist())


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


def readers_of(node: Node) -> list[Node]:
    """What reads a value, or numbers of it that are read again where they are needed."""
    return [n for user in node.users for n in (user, *(user.users if user.target is numbers_of else ()))]


def places_in_room(of: Tensor, groups: int, ranks: int, room: int) -> Tensor:
    """The places of sorted rows in what is sent, where each rank has `room`."""
    each = -(-groups // ranks)
    starts = torch.searchsorted(of, torch.arange(ranks, device=of.device, dtype=of.dtype) * each)
    to = of.long() // each
    return to * room + torch.arange(of.shape[0], device=of.device) - starts[to]


def in_room(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """`x` at these places among so many rows, the others zeros."""
    return x.new_zeros((rows, *x.shape[1:])).index_copy(0, places, x)


def own_groups_in_room(counts: Tensor, first: int, count: int, groups: int, room: int) -> Tensor:
    """For each place in what comes, which of the groups of the rank the row is of; `count` where there is none."""
    ends = counts.view(-1, groups).narrow(1, first, count).cumsum(1)
    places = torch.arange(room, device=counts.device).expand(ends.shape[0], room).contiguous()
    return torch.searchsorted(ends, places, right=True).view(-1)


def groups_from_first(groups_here: Tensor, first: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Groups in order, those of the rank before another that stands for none."""
    return ((groups_here.sort().values + first) % groups).to(dtype)


def stable_order(groups: Tensor) -> Tensor:
    """The places of rows by group, and within one as they come."""
    return groups.argsort(stable=True)


# -- their nodes ----------------------------------------------------------------------------------------------
def with_rows_sent(graph: Graph, mesh: Mesh) -> None:
    """Write what ranks do to send rows."""
    exchanges, sizes = dict[Node, _Exchange](), dict[str, int]()
    nodes = [n for n in graph.nodes if n.target in (sent_rows, received_groups)]
    there = [n for n in nodes if n.args[-1] and n.args[0] is not True]
    between = reached((user for n in there for user in n.users), lambda n: n.users, lambda n: n not in nodes)
    for node in nodes:
        *back_and_rows, of, first, count, groups, axis, apart = node.args
        with graph.inserting_before(node):
            exchange = exchanges.get(of) or _Exchange(graph, mesh, of, first, count, groups, axis, apart)
            exchanges[of] = exchange
            new = exchange.rows(*back_and_rows) if back_and_rows else exchange.groups_of_rows()
        sizes |= {rows[0]: exchange.received} if (rows := meta.rows(node)) else {}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in between:
        name, dims = meta.rows(node) or ("", ())
        pairs = zip(meta.tensors(node), dims, strict=False)
        resized = [
            t and meta.with_shape(t, (*t.shape[:d], sizes[name], *t.shape[d + 1 :])) if d is not None else t
            for t, d in pairs
        ]
        meta.set_tensors(node, resized or meta.tensors(node))


@dataclass
class _Exchange:
    """Rows sorted by groups `of`, along `axis`. `received`: how many a rank has room for, or has of equal groups."""

    graph: Graph
    mesh: Mesh
    of: Node
    first: Any
    count: Any
    groups: int
    axis: str
    apart: int
    orders: list[Node] = field(default_factory=list[Node])

    def __post_init__(self) -> None:
        of, ranks = one_tensor(self.of), self.mesh.axis_size(self.axis)
        self.received = of.shape[0]
        each = contiguous([self.groups], replace(of, dtype=torch.int64))
        every = contiguous([self.groups * ranks], each)
        counts = self._call(counts_of_groups, (self.of, self.groups), each)
        self.counts = self._call(funcol.all_gather_into_tensor.default, (counts, ranks, self.axis), every)
        self.counts = self._call(funcol.wait_tensor.default, (self.counts,), every)
        if self.apart:
            room = most_rows(of.shape[0], self.apart, self.groups, ranks)
            self.received, self.splits = room * ranks, [[room] * ranks] * 2
            args = self.counts, self.first, self.count, self.groups, room
            self.own = self._call(own_groups_in_room, args, contiguous([self.received], each))
            args = self.of, self.groups, ranks, room
            self.places = self._call(places_in_room, args, replace(of, dtype=torch.int64))
            return
        args, both = (counts, self.counts, self.first, self.count), contiguous([2, ranks], replace(each, device="cpu"))
        split = self._call(rows_by_rank, args, both)
        self.splits = [self._call(numbers_of, (split, i), None) for i in (0, 1)]

    def rows(self, back: bool, x: Node) -> Node:
        """`x` at the ranks of its groups, or `back`."""
        here = contiguous(one_tensor(x).shape, one_tensor(x))
        there = contiguous((self.received, *here.shape[1:]), here)
        if not self.orders:
            order = self._order()
            self.orders = [order, self._call(inverse_rows, (order,), one_tensor(order))]
        splits = self.splits if back else self.splits[::-1]
        x = self._call(aten.index.Tensor, (x, [self.orders[1]]), there) if back else x
        if self.apart and not back:
            x = self._call(in_room, (x, self.places, self.received), there)
        x = self._call(rank_ops.contiguous, (x,), one_tensor(x))
        x = self._call(funcol.all_to_all_single.default, (x, *splits, self.axis), there)
        x = self._call(funcol.wait_tensor.default, (x,), there)
        if back:
            return self._call(aten.index.Tensor, (x, [self.places]), here) if self.apart else x
        return self._call(aten.index.Tensor, (x, [self.orders[0]]), there)

    def _order(self) -> Node:
        if self.apart:
            return self._call(stable_order, (self.own,), one_tensor(self.own))
        return self._counted(order_by_group, torch.int64)

    def groups_of_rows(self) -> Node:
        """The group of each row that is received."""
        dtype = one_tensor(self.of).dtype
        if self.apart:
            args = self.own, self.first, self.groups, dtype
            return self._call(groups_from_first, args, replace(one_tensor(self.own), dtype=dtype))
        return self._counted(groups_in_order, dtype)

    def _counted(self, target: Any, dtype: torch.dtype) -> Node:
        args = self.counts, self.first, self.count, self.groups, self.splits[1], dtype
        return self._call(target, args, replace(one_tensor(self.of), dtype=dtype))

    def _call(self, target: Any, args: tuple[Any, ...], tensor: TensorMeta | None) -> Node:
        new = add_call(self.graph, target, args, one_tensor(self.of), self.of)
        meta.set_tensors(new, (tensor,))
        meta.set_strided(new, False)
        return new
