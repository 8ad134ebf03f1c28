"""What loops accumulate, and the body of one while it is written. The first operand of an accumulator is None for the
first piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.loop import Loop
from ..graph.meta import TensorMeta
from ..graph.nodes import add_call, drop_dead, move_up, node_at
from ..graph.op_kinds import FREE, SUMS_OF_PIECES, priced_like
from ..graph.storage import shares

_TO_COPY = torch.ops.aten._to_copy.default


@priced_like(SUMS_OF_PIECES)
@shares("view")
def add_up(total: Tensor | None, value: Tensor, op: str, owned: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Return `total` with `value` added, or the larger (`max`) or smaller (`min`) of both, in the memory of `total`.
    `owned`: nothing else uses the memory of `value`. `dtype` of a total that is wider than `value`.
    """
    if total is None:
        return value.to(dtype) if dtype else value if owned else value.clone()
    if op in ("max", "min"):
        return (torch.maximum if op == "max" else torch.minimum)(total, value, out=total)
    return total.add_(value)


@shares("view")
def put_piece(full: Tensor | None, value: Tensor, pieces: int, piece: int) -> Tensor:
    """Return `full` with `value` as its rows number `piece` of as many."""
    rows = value.shape[0]
    if full is None:
        full = value.new_empty((pieces * rows, *value.shape[1:]))
    full[piece * rows : (piece + 1) * rows] = value
    return full


@shares("all")
def keep_piece(values: list[Tensor] | None, value: Tensor, owned: bool) -> list[Tensor]:
    """Return `values` with `value` of one more piece, for a later loop."""
    return [*(values or ()), value if owned else value.clone()]


ACCUMULATORS = (add_up, put_piece, keep_piece)


@priced_like(FREE)
@shares("view")
def kept_piece(values: list[Tensor], piece: int) -> Tensor:
    """Return the value of one piece that `keep_piece` has kept."""
    return values[piece]


def accumulate_early(graph: Graph, also: Callable[[Node], bool] = lambda _: False) -> None:
    """Let a body accumulate each value as soon as it is there, so that it need not be held until the piece ends; with
    nodes in front of an accumulator that `also` is true of.
    """
    move_up(graph, [node for node in reversed(list(graph.nodes)) if node.target in ACCUMULATORS], also)


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
