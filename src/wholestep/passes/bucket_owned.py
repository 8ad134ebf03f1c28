"""Merges exchanges with owners: sums of gradients on the way to them, and what they send back, each in few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal, cast

import torch
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.meta import TensorMeta, one_tensor
from ..graph.nodes import add_call, is_wait, node_at, reached
from ..partition.owned_rows import (
    add_parts,
    add_sums,
    join_by_owner,
    own_row,
    places,
    start_spread,
    start_sums,
)
from .base import InPlace

funcol = torch.ops._c10d_functional


@dataclass(frozen=True)
class BucketOwned(InPlace):
    """Merges the `sums` that go to owners, or what owners `spread`, into buckets of the sizes of `SizeBuckets`.

    A sum starts once the last gradient of its bucket exists; a bucket closes where the first result is needed. Bitwise
    the same.
    """

    kind: Literal["sums", "spread"] = "sums"

    must_follow: ClassVar[tuple[str, ...]] = ("SizeBuckets",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Merge the exchanges of `local`."""
        if not local.owner_axis:
            return local
        sizes = local.sizes
        assert sizes is not None, "SizeBuckets came before"
        if self.kind == "spread":
            _read_last(local.graph)
        for group in self._groups(local.graph, sizes.bucket_bytes, min(sizes.first_bytes, sizes.bucket_bytes)):
            if len(group) > 1:
                _merge(local.graph, group)
        return local

    def _groups(self, graph: Graph, most: int, first: int) -> list[list[_Exchange]]:
        """Exchanges to merge, in program order. The first bucket of sums is small, so that the link starts early."""
        opened, closed, seen = dict[Any, list[_Exchange]](), list[list[_Exchange]](), set[Any]()
        for node in graph.nodes:
            if is_wait(node):
                for key in [k for k, g in opened.items() if any(member.sent is node_at(node, 0) for member in g)]:
                    closed.append(opened.pop(key))
            exchange = exchange_at(node)
            if exchange is None or exchange.is_sum != (self.kind == "sums"):
                continue
            group = opened.setdefault(exchange.key, [])
            group.append(exchange)
            limit = most if exchange.key in seen or not exchange.is_sum else first
            if sum(one_tensor(n).size_bytes for member in group for n in member.pieces) >= limit:
                closed.append(opened.pop(exchange.key))
                seen.add(exchange.key)
        return [*closed, *opened.values()]


@dataclass
class _Exchange:
    """One exchange with owners: its row, the collective, the wait, the sum of what came (`ends` is what parts are cut
    of), and for each piece the node that cuts it.
    """

    row: Node
    sent: Node
    wait: Node
    end: Node
    op: str
    pieces: list[Node] = field(default_factory=list[Node])
    owners: list[int] = field(default_factory=list[int])
    parts: list[Node] = field(default_factory=list[Node])

    @property
    def is_sum(self) -> bool:
        """True on the way to owners."""
        return self.row.target is join_by_owner

    @property
    def axis(self) -> str:
        """The axis of owners."""
        return str(self.sent.args[-1])

    @property
    def ranks(self) -> int:
        """Number of ranks on it."""
        return len(cast(Sequence[Any], self.sent.args[1]))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for exchanges that can be merged."""
        return self.is_sum, self.axis, self.op, one_tensor(self.row).dtype


def exchange_at(node: Node) -> _Exchange | None:
    """The exchange with owners that `node` starts."""
    if node.target is not funcol.all_to_all_single.default:
        return None
    row = node_at(node, 0)
    if row.target not in (join_by_owner, own_row):
        return None
    wait = next(user for user in node.users if is_wait(user))
    pieces = list(cast("Sequence[Node]", row.args[0]))
    if row.target is own_row:
        owners = [cast(int, meta.owner(piece)) for piece in pieces]
        return _Exchange(row, node, wait, wait, "", pieces, owners, list(wait.users))
    end = next(user for user in wait.users if user.target is add_parts)
    owners = list(cast("Sequence[int]", row.args[1]))
    return _Exchange(row, node, wait, end, str(end.args[2]), pieces, owners, list(end.users))


def _read_last(graph: Graph) -> None:
    """Move what reads what owners spread behind all else, in its order: so that several owners may have sent before."""
    waits = ((node, exchange_at(node_at(node, 0))) for node in graph.nodes if is_wait(node))
    late = reached((node for node, sent in waits if sent and not sent.is_sum), attrgetter("users"))
    end = next(iter(reversed(graph.nodes)))
    for node in [node for node in graph.nodes if node in late]:
        end.prepend(node)


def _merge(graph: Graph, group: Sequence[_Exchange]) -> None:
    """One exchange in place of `group`: it starts where the last one did, and is waited for where the first one was."""
    pieces = [n for exchange in group for n in exchange.pieces]
    owners = [at for exchange in group for at in exchange.owners]
    first, last, ranks = group[0], group[-1], group[0].ranks
    before = {node: i for i, node in enumerate(graph.nodes)}

    def call(target: Callable[..., Any], args: tuple[Any, ...], tensor: TensorMeta, origin: Node) -> Node:
        return add_call(graph, target, args, tensor, origin)

    with graph.inserting_before(last.sent):
        start = start_sums if first.is_sum else start_spread
        sent = start(call, pieces, owners, ranks, first.axis)
    wait = min((exchange.wait for exchange in group), key=before.__getitem__)
    with graph.inserting_before(wait):
        received = add_call(graph, funcol.wait_tensor.default, (sent,), one_tensor(sent), sent)
        row = add_sums(call, received, ranks, first.op) if first.is_sum else received
    sizes, starts = places(pieces, owners, ranks)
    at = iter(zip(owners, starts, strict=True))
    for exchange in group:
        for part in exchange.parts:
            owner, start = next(at)
            start = start if exchange.is_sum else sum(sizes[:owner]) + start  # behind the parts of owners before
            part.args = (row, start, part.args[2])
        for old in dict.fromkeys((exchange.end, exchange.wait, exchange.sent, exchange.row)):
            graph.erase_node(old)
