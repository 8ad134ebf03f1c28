"""Has the gradients of a compiled graph arrive in a known order, as long as DDP makes its buckets from that order.

Autograd hands out the gradients of one compiled backward in an order that is its own affair, and the reducer fills its
buckets as they come: with no more than that, parts and buckets differ. A view of each parameter, taken in front of the
part that first uses it, gives every gradient a step of its own, and autograd takes the latest step first.
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
    """A module that calls `compiled`, made of the graph `whole`, as its only part."""
    graph = Graph()
    inputs = [graph.placeholder(str(node.target)) for node in whole.find_nodes(op="placeholder")]
    graph.output(graph.call_module("part", tuple(inputs)))
    return GraphModule({"part": CompiledPart(compiled, single=False)}, graph)


def detach_idle(outer: GraphModule, arrivals: Sequence[Sequence[int]]) -> None:
    """Detach what a part takes without making a gradient for it (under `no_grad`), though a later part makes one.

    Else autograd would wait for the backward of this part too. `arrivals` as for `with_order`.
    """
    inputs = outer.graph.find_nodes(op="placeholder")
    owner = {inputs[number]: part for part, numbers in enumerate(arrivals) for number in numbers}
    for index, part in enumerate(outer.graph.find_nodes(op="call_module")):
        for param in [node for node in part.all_input_nodes if owner.get(node, index) > index]:
            with outer.graph.inserting_before(part):
                part.replace_input_with(param, outer.graph.call_method("detach", (param,)))


def with_order(outer: GraphModule, arrivals: Sequence[Sequence[int]]) -> GraphModule:
    """`outer` such that the gradients of its inputs arrive in order.

    For each part `arrivals` has the numbers of the inputs whose gradients its backward completes, in that order.
    """
    graph = copy.deepcopy(outer.graph)
    inputs = graph.find_nodes(op="placeholder")
    done: set[Node] = set()
    for part, numbers in zip(graph.find_nodes(op="call_module"), arrivals, strict=True):
        for number in reversed(numbers):  # the last to be made is the first in backward
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


def until_settled(plain: Callable[..., Any], ordered: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that runs `ordered` while the DDP module in use has yet to settle its buckets, `plain` otherwise."""

    def run(*args: Any) -> Any:
        ddp = _torch.ddp_in_use()
        unsettled = ddp is not None and torch.is_grad_enabled() and not _torch.buckets_are_rebuilt(ddp)
        return (ordered if unsettled else plain)(*args)

    return run
