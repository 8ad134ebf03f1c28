"""Merges collectives of one kind along one axis: many small ones cost more to start than to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Bucket(InPlace):
    """Gathers of what rests on the rank, reduce-scatters and all-reduces, those of one kind along one axis, merged.

    A bucket closes once it holds `most_bytes`, the first of each kind once it holds `first_bytes`: that sets the wire
    going early, as DDP does. Gathers for the forward and for the backward stay apart, and those of updated parameters
    stay with what their gradients waited for. A reduction waits for the last gradient of its bucket, and no longer than
    until the first of them is needed. Gathers and reduce-scatters are bitwise the same; an all-reduce may add the ranks
    in another order. `kinds` leaves collectives of other kinds alone. Gathers and reduce-scatters of `alone_bytes` or
    more are left alone too: they would be copied into a bucket or out of it.
    """

    most_bytes: int = 25 << 20
    first_bytes: int = 1 << 20
    kinds: tuple[str, ...] = tuple(KINDS)
    alone_bytes: int | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Merge the collectives of `local`."""
        graph = local.graph
        fixed = sum(axis.size > 1 for axis in local.mesh.axes) == 1
        groups = self._groups(graph)
        place = {node: i for i, node in enumerate(graph.nodes)}
        for group in groups:
            if len(group) > 1:
                _merge(graph, group, fixed, place)
        return local

    def _groups(self, graph: Graph) -> list[list[Node]]:
        """Collectives to be merged, in the order of their places."""
        open_groups, done, kinds = dict[Any, _Group](), list[list[Node]](), set[Any]()
        wanted = {KINDS[kind] for kind in self.kinds}
        backward, after = False, dict[Node, frozenset[Node]]()
        for node in graph.nodes:
            backward = backward or meta.is_backward(node)
            after[node] = frozenset({node}) if is_wait(node) else together([after[n] for n in operands(node)])
            if is_wait(node):
                for key in [k for k, g in open_groups.items() if node_at(node, 0) in g.nodes and not g.ahead]:
                    done.append(open_groups.pop(key).nodes)
            key = _key(node, backward, after[node]) if node.target in wanted else None
            if key is None:
                continue
            whole_bytes = max(made_by(node).size_bytes, made_by(node_at(node, 0)).size_bytes)
            if node.target is not REDUCE and self.alone_bytes is not None and whole_bytes >= self.alone_bytes:
                kinds.add(key)
                continue
            group = open_groups.setdefault(key, _Group(ahead=_ahead(node)))
            group.nodes.append(node)
            group.bytes += whole_bytes
            most = self.most_bytes if key in kinds else min(self.first_bytes, self.most_bytes)
            if group.bytes >= most and (group.ahead or node.target is not GATHER):
                done.append(open_groups.pop(key).nodes)
                kinds.add(key)
        return done + [g.nodes for g in open_groups.values()]


@dataclass
class _Group:
    """`ahead`: gathers of what rests on the rank, which may start at any time."""

    ahead: bool
    nodes: list[Node] = field(default_factory=list[Node])
    bytes: int = 0


def together(sets: Sequence[frozenset[Node]]) -> frozenset[Node]:
    """Their union: the largest itself where it has all of the others, so that many nodes share one set."""
    largest = max(sets, key=len, default=frozenset[Node]())
    return largest if all(one <= largest for one in sets) else largest.union(*sets)


def _ahead(node: Node) -> bool:
    chain = chain_of(node) if node.target is GATHER else None
    return chain is not None and not any(is_wait(n) for n in chain)  # gathered over another axis before: it waits


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
    """Bytes that a step's collectives carry, of whole tensors: of what they reduce, and of the parameters that are
    gathered more than once, each counted once.
    """

    reduced_bytes: int
    again_bytes: int


def carried_by(local: LocalGraph) -> Carried:
    """Counted in the graph. `again_bytes` is 0 where they are less than half of what is gathered: a few that are needed
    in several layouts are not gathered again to hold less.
    """
    sizes, again, reduced = dict[Node, int](), dict[Node, int](), 0
    for node in local.graph.nodes:
        if node.target in (SCATTER, REDUCE):
            reduced += made_by(node_at(node, 0)).size_bytes
        chain = chain_of(node) if node.target is GATHER else None
        if chain:
            rests = node_at(chain[0], 0)
            (again if rests in sizes else sizes)[rests] = made_by(node).size_bytes
    most = sum(again.values())
    return Carried(reduced, most if 2 * most >= sum(sizes.values()) else 0)


def _key(node: Node, backward: bool, after: frozenset[Node]) -> tuple[Any, ...] | None:
    """What collectives must share to be merged; None for one that is left alone."""
    if node_at(node, 0).target is join_rows:
        return None
    if node.target is GATHER:
        return (GATHER, *node.args[1:], made_by(node).dtype, backward if _ahead(node) else after)
    return (node.target, *node.args[1:], made_by(node).dtype)


def _merge(graph: Graph, group: Sequence[Node], fixed: bool, place: Mapping[Node, int]) -> None:
    """One collective in place of several, and a piece of it at each wait. `fixed`: shapes are alike on all ranks;
    `place` has an order in which waits stand.
    """
    kind, first = cast(Any, group[0].target), group[0]
    ahead = _ahead(first)
    at = first if ahead else group[-1]
    for node in group if ahead else ():
        for part in (chain_of(node) or ())[:-1]:
            at.prepend(part)
    parts = 1 if kind is REDUCE else cast(int, first.args[1] if kind is GATHER else first.args[2])
    given = [node_at(node, 0) for node in group]
    numel = sum(made_by(n).numel for n in given)
    length = {GATHER: numel * parts, SCATTER: numel // parts, REDUCE: numel}[kind]
    like = made_by(given[0])
    with graph.inserting_before(at):
        joined = add_call(graph, join_rows, (given, 1 if kind is GATHER else parts), contiguous([numel], like), first)
        shapes: list[Any] = [
            made_by(n).shape if fixed else add_call(graph, outline, (n,), made_by(n), first) for n in given
        ]
        whole = add_call(graph, kind, (joined, *first.args[1:]), contiguous([length], like), first)
    waits = [next(u for u in node.users if is_wait(u)) for node in group]
    with graph.inserting_before(min(waits, key=place.__getitem__)):
        waited = add_call(graph, funcol.wait_tensor.default, (whole,), made_by(whole), first)
    cut = part_of_gather if kind is GATHER else part_of_scatter
    for number, (node, wait) in enumerate(zip(group, waits, strict=True)):
        with graph.inserting_before(wait):
            new = add_call(graph, cut, (waited, shapes, number, parts), made_by(wait), wait)
        wait.replace_all_uses_with(new)
        graph.erase_node(wait)
        graph.erase_node(node)


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
