"""The body of a loop while it is written: what it is given, what it computes, what it accumulates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.loop import Loop
from ..graph.meta import TensorMeta
from ..graph.nodes import add_call, drop_dead, node_at
from .accumulators import accumulate_early, add_up

_TO_COPY = torch.ops.aten._to_copy.default


@dataclass
class LoopBody:
    """`placeholders`: by the node of the outer graph that they stand for. `totals`: for each accumulator its
    placeholder, its last value, and the node that the item of the loop is to be like.
    """

    graph: Graph = field(default_factory=Graph)
    placeholders: dict[Node, Node] = field(default_factory=dict[Node, Node])
    totals: list[tuple[Node, Node, Node]] = field(default_factory=list[tuple[Node, Node, Node]])

    def take(self, outer: Node) -> Node:
        """A placeholder for a value of the outer graph."""
        if outer not in self.placeholders:
            self.placeholders[outer] = self._placeholder(outer.name, outer, meta.one_tensor(outer))
        return self.placeholders[outer]

    def accumulate(self, name: str, source: Node, tensor: TensorMeta, target: Any, *args: Any) -> None:
        """Add the accumulator `target(so far, *args)`, whose item is like `source`."""
        total = self._placeholder(f"{name}_so_far", source, tensor)
        end = add_call(self.graph, target, (total, *args), tensor, source, f"{name}_total")
        self.totals.append((total, end, source))

    def _add_narrow(self) -> None:
        """Add a gradient in half precision to its sum in float32 without a copy in float32 in between."""
        for _, total, _ in self.totals:
            if total.target is not add_up or (cast := node_at(total, 1)).target is not _TO_COPY or len(cast.users) > 1:
                continue
            narrow, wide = meta.one_tensor(node_at(cast, 0)), meta.one_tensor(total)
            if narrow.device == wide.device and torch.promote_types(narrow.dtype, wide.dtype) == wide.dtype:
                _torch.set_operands(total, (total.args[0], cast.args[0], *total.args[2:], wide.dtype), {})
                self.graph.erase_node(cast)

    def _placeholder(self, name: str, source: Node, tensor: TensorMeta) -> Node:
        new = self.graph.create_node("placeholder", name, name=name)
        meta.copy(source, new)
        meta.set_tensors(new, (tensor,))
        return new

    def write_into(self, graph: Graph, name: str, pieces: int) -> list[Node]:
        """Append the loop to `graph`, and return the items that it accumulates."""
        self.graph.output(tuple(total for _, total, _ in self.totals))
        drop_dead(self.graph)
        self._add_narrow()
        accumulate_early(self.graph)
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for placeholder in (*self.placeholders.values(), *(total for total, _, _ in self.totals)):
            first.prepend(placeholder)
        tensors = [meta.one_tensor(total) for _, total, _ in self.totals]
        loop = add_call(graph, Loop(self.graph, pieces), tuple(self.placeholders), tensors[0], self.totals[0][1], name)
        meta.set_tensors(loop, tensors)
        meta.set_stage(loop, None)
        items = list[Node]()
        for number, (_, total, source) in enumerate(self.totals):
            item = graph.create_node("call_function", _torch.GETITEM, (loop, number), name=total.name)
            meta.copy(source, item)
            meta.set_tensors(item, (tensors[number],))
            items.append(item)
        return items
