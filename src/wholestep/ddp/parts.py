"""Compiles the parts of a split graph, and makes gradients arrive in the order of the parts.

DDP fills its buckets in the order in which gradients arrive, and autograd returns the gradients of one compiled
backward in an unspecified order, so parts and buckets could differ until DDP has rebuilt its buckets. A view of each
parameter before the part that first uses it gives every gradient its own autograd node, and autograd runs the latest
node first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from .. import _torch
from ..graph import meta

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
