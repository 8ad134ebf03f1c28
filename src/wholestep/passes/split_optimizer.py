"""Splits optimizers over lists of tensors by bucket: one bucket is updated while others are in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import drop_dead, is_collective, is_wait, operands, reached
from ..graph.split_lists import lists_of, split_lists
from .base import InPlace
from .bucket import union

Waits = frozenset[Node]


@dataclass(frozen=True)
class SplitOptimizer(InPlace):
    """Splits fused and foreach optimizers into one op for each set of collectives that their gradients wait for.
    Bitwise the same. Without buckets each tensor would get its own optimizer op.

    A wait that another one of the set follows does not count: if a norm over all gradients scales them, every update
    waits for that norm, and the optimizer stays one op. If other ranks gather the results, as with ZeRO-1, each bucket
    has its own op all the same: `Bucket` gathers together what was reduced together.
    """

    must_follow: ClassVar[tuple[str, ...]] = ("Bucket",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Split the list ops of `local`."""
        work = _Work(local.graph, _sent(local.graph))
        for node in list(local.graph.nodes):
            if node.op == "call_function":
                work.visit(node)
        drop_dead(local.graph)
        return local


@dataclass
class _Work:
    """`after`: the last waits before each node. `number`: of each wait; `passed`: the numbers of all waits before it,
    as bits.
    """

    graph: Graph
    sent: set[Node]
    after: dict[Node, Waits] = field(default_factory=dict[Node, Waits])
    items: dict[Node, list[Waits]] = field(default_factory=dict[Node, list[Waits]])
    number: dict[Node, int] = field(default_factory=dict[Node, int])
    passed: dict[Node, int] = field(default_factory=dict[Node, int])

    def visit(self, node: Node) -> None:
        before = [self.after.get(n, frozenset()) for n in node.all_input_nodes]
        after = frozenset({node}) if is_wait(node) else union(before)
        if is_wait(node):
            self.number[node] = len(self.number)
            self.passed[node] = self._bits(union(before))
        lists = lists_of(node)
        if lists:
            entries = {tensor for tensors in lists for tensor in tensors}
            shared = union([self.after.get(n, frozenset()) for n in node.all_input_nodes if n not in entries])
            waits = [union([shared, *(self.after.get(n, frozenset()) for n in at)]) for at in zip(*lists, strict=True)]
            groups: dict[Waits, list[int]] = {}
            for i, wait in enumerate(waits):
                groups.setdefault(wait if node in self.sent else self._latest(wait), []).append(i)
            self.items[node] = waits
            if len(groups) > 1:
                self._split(node, list(groups.values()))
                return
        if _torch.is_getitem(node.target) and operands(node)[0] in self.items:
            source, index = cast(tuple[Node, int], node.args)
            if isinstance(meta.value(source), (list, tuple)) and source in self.items:
                after = self._picked(node, source, index)
        self.after[node] = after

    def _bits(self, waits: Waits) -> int:
        """These waits and all before them."""
        bits = 0
        for wait in waits:
            bits |= self.passed[wait] | 1 << self.number[wait]
        return bits

    def _latest(self, waits: Waits) -> Waits:
        """Those of `waits` that no other one of them follows."""
        passed = 0
        for wait in waits:
            passed |= self.passed[wait]
        return frozenset(wait for wait in waits if not passed >> self.number[wait] & 1)

    def _picked(self, node: Node, source: Node, index: int) -> Waits:
        """Waits of one output of a list op; an output that is a list itself keeps the waits of its items."""
        if isinstance(meta.value(node), (list, tuple)):
            self.items[node] = self.items[source]
            return frozenset()
        return self.items[source][index] if index < len(self.items[source]) else frozenset()

    def _split(self, node: Node, groups: list[list[int]]) -> None:
        """Replace `node` by one op for each group of positions, and let each getitem read from the op of its item."""
        split_ops, picked = split_lists(node, groups)
        for new, group in zip(split_ops, groups, strict=True):
            self.items[new] = [self.items[node][i] for i in group]
        for pick, (new, at) in picked.items():
            self.after[pick] = self.items[new][at]


def _sent(graph: Graph) -> set[Node]:
    """The nodes whose results a later collective sends."""
    return reached(operand for node in graph.nodes if is_collective(node) for operand in node.all_input_nodes)
