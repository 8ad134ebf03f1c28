"""Merges collectives of one kind along one axis: many small ones cost more to start than to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph, node_at, operands
from ..graph.meta import TensorMeta
from ..graph.ops import CARRIED, FREE, READS_A_PART, costs
from ..graph.storage import shares
from ..graph.verify import is_wait
from ..partition.collectives import contiguous
from .base import InPlace

funcol = torch.ops._c10d_functional
GATHER, SCATTER = funcol.all_gather_into_tensor.default, funcol.reduce_scatter_tensor.default
REDUCE = funcol.all_reduce.default
KINDS = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": REDUCE}
SUMS = (SCATTER, REDUCE)


@dataclass(frozen=True)
class Bucket(InPlace):
    """Merges all-gathers of stored tensors, reduce-scatters and all-reduces, those of one kind along one axis.

    Hierarchical collectives are bucketed stage by stage: the second stage reuses the first stage's bucket.

    A bucket closes once it holds `most_bytes`, the first of each kind once it holds `first_bytes`: that sets the wire
    going early, as DDP does. Gathers for the forward and for the backward stay apart, and those of updated parameters
    stay with what their gradients waited for. A reduction waits for the last gradient of its bucket, and no longer than
    until the first of them is needed. Gathers and reduce-scatters are bitwise the same; an all-reduce may add the ranks
    in another order. `kinds` leaves collectives of other kinds alone. Gathers and reduce-scatters of `alone_bytes` or
    more are left alone too: they would be copied into a bucket or out of it. Where `most_bytes` is None, sizes are
    those that `SizeBuckets` decided.
    """

    most_bytes: int | None = 25 << 20
    first_bytes: int = 1 << 20
    kinds: tuple[str, ...] = tuple(KINDS)
    alone_bytes: int | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    @staticmethod
    def sized(kind: str) -> Bucket:
        """Of one kind, with the sizes that `SizeBuckets` decided."""
        return Bucket(None, kinds=(kind,))

    @property
    def must_follow(self) -> tuple[str, ...]:
        """What decides the sizes."""
        return ("SizeBuckets",) if self.most_bytes is None else ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Merge the collectives of `local`: those of several hops first, then each by itself that is left."""
        if self.most_bytes is None:
            assert local.sizes is not None, "SizeBuckets came before"
            sums = self.kinds == ("all_reduce",)
            most = local.sizes.summed_bytes if sums else local.sizes.bucket_bytes
            return replace(self, most_bytes=most, first_bytes=local.sizes.first_bytes,
                           alone_bytes=None if sums else local.sizes.alone_bytes).change(local)  # fmt: skip
        fixed = sum(axis.size > 1 for axis in local.mesh.axes) == 1
        done = set[Node]()
        for several in (False,) if fixed else (True, False):
            groups = self._groups(local.graph, several, done)
            place = {node: i for i, node in enumerate(local.graph.nodes)}
            for group in groups:
                if len(group) > 1:
                    done.update(_merge(local.graph, group, fixed, place))
        return local

    def _groups(self, graph: Graph, several: bool, done: set[Node]) -> list[list[list[Node]]]:
        """Collectives to be merged, each with its further hops if `several`, in the order of their places. What is left
        alone with all of its hops becomes `done`.
        """
        open_groups, closed, kinds = dict[Any, _Group](), list[list[list[Node]]](), set[Any]()
        wanted = {KINDS[kind] for kind in self.kinds}
        backward, after = False, dict[Node, frozenset[Node]]()
        for node in graph.nodes:
            backward = backward or meta.is_backward(node)
            after[node] = frozenset({node}) if is_wait(node) else together([after[n] for n in node.all_input_nodes])
            if is_wait(node):
                for key in [k for k, g in open_groups.items() if node_at(node, 0) in g.lasts and not g.ahead]:
                    closed.append(open_groups.pop(key).chains)
            if node.target not in wanted or node in done or node_at(node, 0).target is join_rows:
                continue
            head, hops = _head(node), hops_from(node) if several else [node]
            if head.target not in wanted or (several and (len(hops) == 1 or head is not node)):
                continue
            key = _key(hops, backward, after[node])
            whole_bytes = max(made_by(one).size_bytes for one in (*hops, node_at(node, 0)))
            if node.target is not REDUCE and self.alone_bytes is not None and whole_bytes >= self.alone_bytes:
                kinds.add(key)
                done.update(hops)
                continue
            group = open_groups.setdefault(key, _Group(ahead=_ahead(node)))
            group.chains.append(hops)
            group.lasts.add(hops[-1])
            group.bytes += whole_bytes
            assert self.most_bytes is not None, "as given, or as decided"
            most = self.most_bytes if key in kinds else min(self.first_bytes, self.most_bytes)
            if group.bytes >= most and (group.ahead or node.target is not GATHER):
                closed.append(open_groups.pop(key).chains)
                kinds.add(key)
        return closed + [g.chains for g in open_groups.values()]


@dataclass
class _Group:
    """`ahead`: gathers of what rests on the rank, which may start at any time. `lasts`: each one's last hop."""

    ahead: bool
    chains: list[list[Node]] = field(default_factory=list[list[Node]])
    lasts: set[Node] = field(default_factory=set[Node])
    bytes: int = 0


def together(sets: Sequence[frozenset[Node]]) -> frozenset[Node]:
    """Their union: the largest itself where it has all of the others, so that many nodes share one set."""
    distinct = list({id(one): one for one in sets}.values())
    largest = max(distinct, key=len, default=frozenset[Node]())
    return largest if len(distinct) < 2 or all(one <= largest for one in distinct) else largest.union(*distinct)


def _ahead(node: Node) -> bool:
    chain = chain_of(node) if node.target is GATHER else None
    return chain is not None and not any(is_wait(n) for n in chain)  # gathered over another axis before: it waits


def hops_from(node: Node) -> list[Node]:
    """`node`, and the collectives along further axes that take its result as it is, each the only reader of the last:
    gathers after a gather, sums after a sum.
    """
    hops = [node]
    while (after := _next_hop(hops[-1])) is not None:
        hops.append(after)
    return hops


def _next_hop(node: Node) -> Node | None:
    wait = _only_user(node)
    after = _only_user(wait) if wait is not None and is_wait(wait) else None
    alike = next((kinds for kinds in ((GATHER,), SUMS) if node.target in kinds), ())
    return after if after is not None and after.target in alike else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _head(node: Node) -> Node:
    """The first of the hops of which `node` is one."""
    while is_wait(wait := node_at(node, 0)) and _next_hop(node_at(wait, 0)) is node:
        node = node_at(wait, 0)
    return node


def chain_of(node: Node) -> list[Node] | None:
    """The nodes between the inputs of the graph and `node`, in order; None when others read them or it needs more."""
    chain: list[Node] = []
    at = node
    while at.op == "call_function":
        chain.insert(0, at)
        given = operands(at)
        if len(given) != 1 or (at is not node and len(at.users) != 1):
            return None
        at = given[0]
    return chain if at.op == "placeholder" else None


@dataclass(frozen=True)
class Carried:
    """Bytes that a step's collectives carry, of whole tensors: of what they reduce, along one axis or several, and of
    the parameters that are gathered more than once, each counted once.
    """

    reduced_bytes: int
    again_bytes: int


def carried_by(local: LocalGraph) -> Carried:
    """Counted in the graph. `again_bytes` is 0 where they are less than half of what is gathered: a few that are needed
    in several layouts are not gathered again to hold less.
    """
    sizes, again, reduced = dict[Node, int](), dict[Node, int](), 0
    for node in local.graph.nodes:
        if node.target in SUMS and _head(node) is node:
            reduced += made_by(node_at(node, 0)).size_bytes
        if _ahead(node):
            rests = node_at((chain_of(node) or [node])[0], 0)
            (again if rests in sizes else sizes)[rests] = made_by(hops_from(node)[-1]).size_bytes
    most = sum(again.values())
    return Carried(reduced, most if 2 * most >= sum(sizes.values()) else 0)


def _key(hops: Sequence[Node], backward: bool, after: frozenset[Node]) -> tuple[Any, ...]:
    """What collectives must share to be merged."""
    calls = tuple((hop.target, *hop.args[1:]) for hop in hops)
    gathers = hops[0].target is GATHER
    return (*calls, made_by(hops[0]).dtype, *((backward if _ahead(hops[0]) else after,) if gathers else ()))


def _merge(graph: Graph, group: Sequence[Sequence[Node]], fixed: bool, place: Mapping[Node, int]) -> list[Node]:
    """One collective for each hop in place of several, and a piece of the last one's result at each last wait; these
    collectives. `fixed`: shapes are alike on all ranks; `place` has an order in which waits stand.
    """
    heads, hops = [one[0] for one in group], group[0]
    first, gathers, ahead = heads[0], heads[0].target is GATHER, _ahead(heads[0])
    at = first if ahead else heads[-1]
    for node in heads if ahead else ():
        for part in (chain_of(node) or ())[:-1]:
            at.prepend(part)
    parts = prod(_parts(hop) for hop in hops)
    given = [node_at(node, 0) for node in heads]
    length, like = sum(made_by(n).numel for n in given), made_by(given[0])
    with graph.inserting_before(at):
        whole = add_call(graph, join_rows, (given, 1 if gathers else parts), contiguous([length], like), first)
        shapes: list[Any] = [
            made_by(n).shape if fixed else add_call(graph, outline, (n,), made_by(n), first) for n in given
        ]
    waits = [next(u for u in one[-1].users if is_wait(u)) for one in group]
    made: list[Node] = []
    for hop in hops:
        length = length * _parts(hop) if gathers else length // _parts(hop)
        with graph.inserting_before(at):
            whole = add_call(graph, cast(Any, hop.target), (whole, *hop.args[1:]), contiguous([length], like), hop)
        made.append(whole)
        at = min(waits, key=place.__getitem__)
        with graph.inserting_before(at):
            whole = add_call(graph, funcol.wait_tensor.default, (whole,), made_by(whole), hop)
    cut = part_of_gather if gathers else part_of_scatter
    for number, (one, wait) in enumerate(zip(group, waits, strict=True)):
        with graph.inserting_before(wait):
            new = add_call(graph, cut, (whole, shapes, number, parts), made_by(wait), wait)
        wait.replace_all_uses_with(new)
        for hop in reversed(one):
            graph.erase_node(next(iter(hop.users)))
            graph.erase_node(hop)
    return made


def _parts(hop: Node) -> int:
    """Of how many ranks a gather holds pieces, or to how many a scatter sends them."""
    return 1 if hop.target is REDUCE else cast(int, hop.args[1] if hop.target is GATHER else hop.args[2])


def add_call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], made: TensorMeta, like: Node) -> Node:
    """One call that makes `made`, at the place in the user's code of `like`."""
    name = str(getattr(target, "__name__", target)).split(".")[0]
    node = graph.create_node("call_function", target, args, name=name)
    meta.copy(like, node)
    meta.set_value(node, None)
    meta.set_tensors(node, (made,))
    return node


def made_by(node: Node) -> TensorMeta:
    """What a node that makes one tensor makes."""
    found = meta.tensor(node)
    assert found is not None, f"%{node.name} makes one tensor"
    return found


# What the graph calls. Shapes of pieces that differ between ranks along other axes are looked up when it runs.
@costs(CARRIED)
def join_rows(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row, first what goes to the first of `parts` ranks."""
    if parts == 1:
        return torch.cat([p.reshape(-1) for p in pieces])
    return torch.cat([p.reshape(parts, -1) for p in pieces], 1).reshape(-1)


@costs(FREE)
@shares("nothing")
def outline(x: Tensor) -> Tensor:
    """The shape of `x`, and nothing else of it."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _shapes(outlines: Sequence[Tensor | tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [tuple(o.shape) if isinstance(o, Tensor) else o for o in outlines]


@costs(CARRIED)
@costs(READS_A_PART)
def part_of_gather(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """One gathered tensor of several that were gathered together."""
    shape = _shapes(outlines)[number]
    return rows_of_gather(joined, outlines, number, parts).reshape(parts * shape[0], *shape[1:]).contiguous()


@costs(FREE)
@shares("view")
def rows_of_gather(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """The same where it lies: a row for each rank."""
    shapes = _shapes(outlines)
    return joined.view(parts, -1).narrow(1, sum(prod(o) for o in shapes[:number]), prod(shapes[number]))


@costs(FREE)
@shares("view")
def in_rows(x: Tensor, parts: int) -> Tensor:
    """A contiguous tensor as so many rows."""
    return x.view(parts, x.numel() // parts)


@costs(FREE)
@shares("view")
def part_of_scatter(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """One rank's piece of one tensor of several that were reduced together."""
    shapes = _shapes(outlines)
    start, shape = sum(prod(o) // parts for o in shapes[:number]), shapes[number]
    found = joined.narrow(0, start, prod(shape) // parts)
    return found.view(shape[0] // parts, *shape[1:]) if shape else found.view(())
