"""Splits a dynamo graph so that each of DDP's buckets is complete when the backward of one part ends."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
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


Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class CompiledPart(nn.Module):
    """A compiled part; `single` if the part returns one value instead of a tuple."""

    def __init__(self, run: Callable[..., Any], single: bool) -> None:
        super().__init__()
        self.run, self.single = run, single

    def forward(self, *args: Any) -> Any:
        """Run the part."""
        returned = self.run(*args)
        return returned[0] if self.single else returned


def compile_parts(graph_module: GraphModule, outer: GraphModule, compiler: Compiler) -> None:
    """Compile each part of `outer`, the split of dynamo's `graph_module`, in place.

    Parts get fakes with the strides of the earlier parts' results.
    """
    fakes: dict[Node, Any] = {}
    for node in outer.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            fakes[node] = meta.example(node)
        elif node.op == "call_function":  # one of several results
            source, item = cast("tuple[Node, int]", node.args)
            fakes[node] = fakes[source][item]
        elif node.op == "call_method":  # detach, of a parameter
            fakes[node] = fakes[node.all_input_nodes[0]].detach()
        elif node.op == "call_module":
            name, part = str(node.target), outer.get_submodule(str(node.target))
            assert isinstance(part, GraphModule)
            meta.share_notes(graph_module, part)
            _torch.give_origin(graph_module, part)
            compiled, fakes[node] = _compile_part(part, [fakes[a] for a in node.all_input_nodes], compiler)
            outer.delete_submodule(name)
            outer.add_submodule(name, compiled)
    outer.recompile()


def _compile_part(part: GraphModule, fakes: list[Any], compiler: Compiler) -> tuple[CompiledPart, Any]:
    single = _return_a_tuple(part)
    compiled, returned = _torch.compiled_part(lambda: CompiledPart(compiler(part, fakes), single), fakes)
    if returned is not None:
        return compiled, returned
    recorded = [meta.example(node) for node in cast(Sequence[Node], part.graph.output_node().args[0])]
    return compiled, recorded[0] if single else tuple(recorded)


def _return_a_tuple(part: GraphModule) -> bool:
    """Make `part` return a tuple, which compilers require; return whether it returned a single value."""
    output = part.graph.output_node()
    single = not isinstance(output.args[0], tuple)
    if single:
        output.args = ((output.args[0],),)
        part.recompile()
    return single


def call_whole(dynamo_graph: Graph, compiled: Callable[..., Any]) -> GraphModule:
    """Return a module that calls `compiled`, the compiled `dynamo_graph`, as its only part."""
    graph = Graph()
    inputs = [graph.placeholder(str(node.target)) for node in dynamo_graph.find_nodes(op="placeholder")]
    graph.output(graph.call_module("part", tuple(inputs)))
    return GraphModule({"part": CompiledPart(compiled, single=False)}, graph)


def detach_idle(outer: GraphModule, arrivals: Sequence[Sequence[int]]) -> None:
    """Detach parameters that a part uses only under `no_grad`, if a later part computes their gradient.

    Otherwise autograd would wait for the backward of this part. `arrivals`: see `with_order`.
    """
    inputs = outer.graph.find_nodes(op="placeholder")
    owner = {inputs[number]: part for part, numbers in enumerate(arrivals) for number in numbers}
    for index, part in enumerate(outer.graph.find_nodes(op="call_module")):
        for param in [node for node in part.all_input_nodes if owner.get(node, index) > index]:
            with outer.graph.inserting_before(part):
                part.replace_input_with(param, outer.graph.call_method("detach", (param,)))


def with_order(outer: GraphModule, arrivals: Sequence[Sequence[int]]) -> GraphModule:
    """Return a copy of `outer` whose input gradients arrive in order.

    `arrivals` has, for each part, the numbers of the inputs whose gradients its backward completes, in that order.
    """
    graph = copy.deepcopy(outer.graph)
    inputs = graph.find_nodes(op="placeholder")
    earlier: set[Node] = set()
    for part, numbers in zip(graph.find_nodes(op="call_module"), arrivals, strict=True):
        for number in reversed(numbers):  # the last view is the first in the backward
            with graph.inserting_before(part):
                view = graph.call_function(_view, (inputs[number],))
            for user in list(inputs[number].users):
                if user.op == "call_module" and user not in earlier:
                    user.replace_input_with(inputs[number], view)
        earlier.add(part)
    return GraphModule(outer, graph)


def _view(param: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return param.view_as(param)


def until_rebuilt(plain: Callable[..., Any], ordered: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that runs `ordered` until the DDP module has rebuilt its buckets, then `plain`."""

    def run(*args: Any) -> Any:
        ddp = _torch.ddp_in_use()
        pending = ddp is not None and torch.is_grad_enabled() and not _torch.buckets_are_rebuilt(ddp)
        return (ordered if pending else plain)(*args)

    return run
