"""Makes the gradients of a compiled graph arrive in the order of the split, until DDP has rebuilt its buckets.

DDP fills its buckets in the order in which gradients arrive, and autograd returns the gradients of one compiled
backward in an unspecified order, so parts and buckets could differ. A view of each parameter before the part that
first uses it gives every gradient its own autograd node, and autograd runs the latest node first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _torch
from .compile_parts import CompiledPart


def call_whole(whole: Graph, compiled: Callable[..., Any]) -> GraphModule:
    """Return a module that calls `compiled`, the compiled graph `whole`, as its only part."""
    graph = Graph()
    inputs = [graph.placeholder(str(node.target)) for node in whole.find_nodes(op="placeholder")]
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
    done: set[Node] = set()
    for part, numbers in zip(graph.find_nodes(op="call_module"), arrivals, strict=True):
        for number in reversed(numbers):  # the last view is the first in the backward
            with graph.inserting_before(part):
                view = graph.call_function(_view, (inputs[number],))
            for user in list(inputs[number].users):
                if user.op == "call_module" and user not in done:
                    user.replace_input_with(inputs[number], view)
        done.add(part)
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
