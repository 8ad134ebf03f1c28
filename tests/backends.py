"""A backend as a user writes it: of `ws.Backend`, with torch alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter


class Interpreted:
    """Runs a graph node by node; `no_grad` is whether it compiled and ran without autograd."""

    name = "interpreted"
    fused_optimizers, in_place_buffers, splits_steps, times_nodes = True, True, False, False
    recordable = False

    def __init__(self) -> None:
        self.no_grad: list[bool] = []
        self.clocks: list[Any] = []

    def compile(
        self, graph: Graph, inputs: Sequence[Any], example_inputs: Sequence[Any], clock: Any
    ) -> Callable[[Sequence[Any]], list[Any]]:
        self.clocks.append(clock)
        self.no_grad.append(not torch.is_grad_enabled())
        assert len(inputs) == len(example_inputs) == sum(node.op == "placeholder" for node in graph.nodes)
        module = GraphModule(nn.Module(), graph)

        def run(values: Sequence[Any]) -> list[Any]:
            self.no_grad.append(not torch.is_grad_enabled())
            return list(Interpreter(module).run(*values))

        return run


class Plain(Interpreted):
    """Gets optimizers as plain ops, and no writes into buckets."""

    name = "plain"
    fused_optimizers, in_place_buffers = False, False


class Splitting(Interpreted):
    """Runs steps whose end is left to the next call."""

    name = "splitting"
    splits_steps = True
