"""Merges collectives on parameters: gathers into one, reduce-scatters into one, up to so many bytes each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph, copy_graph, node_at
from ..graph.meta import TensorMeta
from ..graph.verify import is_wait
from ..partition.collectives import contiguous
from .prefetch import chain_of

funcol = torch.ops._c10d_functional
GATHER, SCATTER = funcol.all_gather_into_tensor.default, funcol.reduce_scatter_tensor.default


@dataclass(frozen=True)
class Bucket:
    """Gathers of what rests on the rank and reduce-scatters, those of one kind along one axis, `most_bytes` at once.

    Gathers for the forward and for the backward stay apart. A reduce-scatter waits for the last gradient of its bucket,
    and no longer than until the first of them is needed. Bitwise the same.
    """

    most_bytes: int = 25 << 20

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """Merge the collectives of `local`."""
        graph = copy_graph(local.graph)
        for group in self._groups(graph):
            if len(group) > 1:
                _merge(graph, group)
        return replace(local, graph=graph)

    def _groups(self, graph: Graph) -> list[list[Node]]:
        open_groups, done = dict[Any, _Group](), list[list[Node]]()
        backward = False
        for node in graph.nodes:
            backward = backward or meta.is_backward(node)
            if is_wait(node):
                for key in [k for k, g in open_groups.items() if k[0] is SCATTER and node_at(node, 0) in g.nodes]:
                    done.append(open_groups.pop(key).nodes)
            key = _key(node, backward)
            if key is None:
                continue
            group = open_groups.setdefault(key, _Group())
            size = _made(node_at(node, 0)).size_bytes
            if group.nodes and group.bytes + size > self.most_bytes:
                done.append(group.nodes)
                group = open_groups[key] = _Group()
            group.nodes.append(node)
            group.bytes += size
        return done + [g.nodes for g in open_groups.values()]


@dataclass
class _Group:
    nodes: list[Node] = field(default_factory=list[Node])
    bytes: int = 0


def _key(node: Node, backward: bool) -> tuple[Any, ...] | None:
    """What collectives must share to be merged; None for one that is left alone."""
    if node.target is GATHER and chain_of(node) is not None:
        return (GATHER, *node.args[1:], _made(node).dtype, backward)
    return (SCATTER, *node.args[1:], _made(node).dtype) if node.target is SCATTER else None


def _merge(graph: Graph, group: Sequence[Node]) -> None:
    """One collective in place of several, and a piece of it at each wait."""
    gathers = group[0].target is GATHER
    at = group[0] if gathers else group[-1]
    for node in group if gathers else ():
        for part in (chain_of(node) or ())[:-1]:
            at.prepend(part)
    parts = cast(int, node_at(group[0], 1) if gathers else group[0].args[2])
    given = [node_at(node, 0) for node in group]
    numel = sum(_made(n).numel for n in given)
    like, first = _made(given[0]), group[0]
    with graph.inserting_before(at):
        joined = _call(graph, join if gathers else join_rows, (given, parts), contiguous([numel], like), first)
        outlines = [_call(graph, outline, (n,), _made(n), first) for n in given]
        length = numel * parts if gathers else numel // parts
        whole = _call(
            graph, cast(Any, group[0].target), (joined, *group[0].args[1:]), contiguous([length], like), first
        )
    waits = [next(u for u in node.users if is_wait(u)) for node in group]
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_before(min(waits, key=order.__getitem__)):
        waited = _call(graph, funcol.wait_tensor.default, (whole,), _made(whole), first)
    for number, (node, wait) in enumerate(zip(group, waits, strict=True)):
        with graph.inserting_before(wait):
            cut = part_of_gather if gathers else part_of_scatter
            new = _call(graph, cut, (waited, outlines, number, parts), _made(wait), wait)
        wait.replace_all_uses_with(new)
        graph.erase_node(wait)
        graph.erase_node(node)


def _call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], made: TensorMeta, like: Node) -> Node:
    name = str(getattr(target, "__name__", target)).split(".")[0]
    node = graph.create_node("call_function", target, args, name=name)
    meta.copy(like, node)
    meta.set_value(node, None)
    meta.set_tensors(node, (made,))
    return node


def _made(node: Node) -> TensorMeta:
    found = meta.tensor(node)
    assert found is not None, f"%{node.name} makes one tensor"
    return found


# What the graph calls. Pieces may differ in shape between ranks along other axes: shapes are looked up when it runs.
def join(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row."""
    return torch.cat([p.reshape(-1) for p in pieces])


def join_rows(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row, first what goes to the first rank."""
    return torch.cat([p.reshape(parts, -1) for p in pieces], 1).reshape(-1)


def outline(x: Tensor) -> Tensor:
    """The shape of `x`, and nothing else of it."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def part_of_gather(joined: Tensor, outlines: Sequence[Tensor], number: int, parts: int) -> Tensor:
    """One gathered tensor of several that were gathered together."""
    start, like = sum(o.numel() for o in outlines[:number]), outlines[number]
    found = joined.view(parts, -1).narrow(1, start, like.numel())
    return found.reshape(parts * like.shape[0], *like.shape[1:])


def part_of_scatter(joined: Tensor, outlines: Sequence[Tensor], number: int, parts: int) -> Tensor:
    """One rank's piece of one tensor of several that were scattered together."""
    start, like = sum(o.numel() // parts for o in outlines[:number]), outlines[number]
    found = joined.narrow(0, start, like.numel() // parts)
    return found.view(like.shape[0] // parts, *like.shape[1:])
