"""Splits a dynamo graph so that each of DDP's buckets is complete when the backward of one part ends."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from .. import _torch
from ..graph import meta, text
from .reducer import Param, Reducer

_NOT_RUN = ("placeholder", "get_attr", "output")
_HEAD = ("bucket", "bytes", "parameters, in the order in which DDP gets their gradients", "")
Uses = Mapping[Node, Sequence[Param]]


@dataclass(frozen=True)
class DdpBucket:
    """One part of a graph: the parameters whose gradients its backward completes, in the order of arrival.

    `extra_ops` is the number of ops added so that another part reads a result of this one, `extra_bytes` the gradients
    that these complete.
    """

    params: tuple[Param, ...]
    extra_ops: int = 0
    extra_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.size_bytes for p in self.params)


@dataclass(frozen=True)
class Split:
    """The split of one graph: `buckets[0]` is nearest the input, `starts` has the number of the first op of each.

    `reduced` are the reducer's buckets with parameters of this graph, as names, in the order of reduction.
    """

    buckets: tuple[DdpBucket, ...]
    starts: tuple[int, ...]
    reduced: tuple[tuple[str, ...], ...]
    limits: tuple[int, ...]

    @property
    def headline(self) -> str:
        """One line with the limits and the number of buckets."""
        caps = " bytes, then ".join(f"{limit:,}" for limit in self.limits)
        count = len(self.buckets)
        return f"bucket cap {caps} bytes: {count} {'bucket' if count == 1 else 'buckets'}, compiled one by one"

    def __str__(self) -> str:
        """A table of the buckets from the input to the output, with the numbers of DDP's buckets."""
        sent = {name: number for number, bucket in enumerate(self.reduced) for name in bucket}
        rows = [_HEAD]
        for index, bucket in enumerate(self.buckets):
            names = [p.name for p in bucket.params] or ["-"]
            notes = [f"DDP's bucket {sent[name]}" if name in sent else "" for name in names]
            firsts = [(str(index), f"{bucket.size_bytes:,}"), *[("", "")] * (len(names) - 1)]
            rows += [(*first, name, note) for first, name, note in zip(firsts, names, notes, strict=True)]
        return "\n".join(text.table(rows, left=(2, 3)))

    @property
    def extension(self) -> str:
        """A warning about buckets with `extra_ops`; empty if there are none."""
        lines = [
            f"  bucket {index}: {bucket.extra_ops} more ops, {text.human(bucket.extra_bytes)} more"
            for index, bucket in enumerate(self.buckets)
            if bucket.extra_ops
        ]
        why = "buckets were extended, because no op outside of them reads their results (in-place writes only)"
        return "\n".join([why, *lines]) if lines else ""


def ops(graph: Graph) -> list[Node]:
    """Return the nodes that run, in order; op numbers count these."""
    return [node for node in graph.nodes if node.op not in _NOT_RUN]


def first_uses(graph: Graph, uses: Uses) -> dict[Param, int]:
    """Return, for each parameter, the number of the first op that reads it, whose backward completes its gradient.

    `uses` maps nodes to parameters. An op under `no_grad` counts only for parameters without another use.
    """
    first: dict[Param, int] = {}
    idle: dict[Param, int] = {}
    grad = True
    for number, node in enumerate(ops(graph)):
        if _torch.is_grad_switch(node.target):
            grad = bool(node.args[0])
        for source in (node, *node.all_input_nodes):
            for param in uses.get(source, ()):
                (first if grad else idle).setdefault(param, number)
    return {**idle, **first}


def plan_split(graph: Graph, uses: Uses, reducer: Reducer) -> Split:
    """Split `graph` before each op whose backward completes a bucket of the reducer."""
    first = first_uses(graph, uses)
    arrivals = sorted(first, key=lambda p: (-first[p], -p.number))
    buckets = [tuple(p for p in bucket if p in first) for bucket in reducer.buckets(arrivals)]
    buckets = [bucket for bucket in buckets if bucket]
    cuts = sorted({min(first[p] for p in bucket) for bucket in buckets})
    cuts = [cut for cut in cuts if any(number < cut for number in first.values())]
    starts, extra = _with_results(graph, [0, *cuts])  # ops before the first parameter join the first part
    parts: list[DdpBucket] = []
    for start, end, count in zip(starts, [*starts[1:], float("inf")], extra, strict=True):
        params = tuple(p for p in arrivals if start <= first[p] < end)
        parts.append(DdpBucket(params, count, sum(p.size_bytes for p in params if first[p] < start + count)))
    return Split(tuple(parts), tuple(starts), tuple(tuple(p.name for p in b) for b in buckets), reducer.limits)


def _with_results(graph: Graph, starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Move the start of each part forward until another part reads a result of it; return starts and added ops.

    A first part without such a result joins the next part.
    """
    nodes = ops(graph)
    moved: list[int] = []
    extra: list[int] = []
    end = max(len(nodes), 1)
    for boundary in reversed(starts):
        if boundary >= end:
            continue  # the next part includes it
        start = boundary
        while start > 0 and not _is_read_outside(nodes[start:end]):
            start -= 1
        if start == 0 and moved and not _is_read_outside(nodes[:end]):
            extra[-1] += moved[-1]
            moved[-1] = 0
            continue
        moved.append(start)
        extra.append(boundary - start)
        end = start
    return moved[::-1], extra[::-1]


def _is_read_outside(part: Sequence[Node]) -> bool:
    inside = set(part)
    return any(user not in inside for node in part for user in node.users)


def cut(graph_module: GraphModule, split: Split) -> GraphModule:
    """Return a module that calls the parts, each a submodule, in the order of the graph."""
    part = -1
    part_of: dict[Node, int] = {}
    for number, node in enumerate(ops(graph_module.graph)):
        part += number in split.starts
        part_of[node] = part
    for last in [node for node in part_of if isinstance(meta.example(node), (tuple, list))]:
        # parts exchange tensors, not tuples: getitem nodes move next to their operand
        for user in [user for user in last.users if user.target is operator.getitem]:
            last.append(user)
            part_of[user] = part_of[last]
            last = user
    splitter: Callable[..., GraphModule] = split_module
    return splitter(graph_module, None, part_of.__getitem__, keep_original_order=True)
