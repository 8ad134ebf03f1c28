"""Moves isolated fusible ops next to similar ones, so that Inductor can fuse them.

A program computes the same kind of thing for all parameters at once: it scales all gradients, then updates all
parameters, then stores all counters. Compiled beside the update of its parameter, the scaled gradient is never written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch.fx import Node

from ... import _torch
from ...graph.nodes import is_mutating, operands, reached
from ...graph.op_kinds import FREE, arithmetic
from ...rules.registry import is_random
from .aliases import root_of, viewed

Group = list[Node]
"""A call and the getitems of its results."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a node makes."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def fused(nodes: Sequence[Node], values: dict[Node, Any]) -> set[Node]:
    """Ops of `nodes` that touch a tensor which another one of them touches too: one kernel would move it once.

    Ops that share numbers alone (the norm of each gradient, the rounding of each counter) gain nothing from one kernel.
    """
    roots, touch = dict[Node, Node](), defaultdict[Node, set[Node]](set)
    for node in nodes:
        sources = [roots.get(operand, operand) for operand in operands(node)]
        if sources and (_torch.is_getitem(node.target) or node.target in FREE):
            roots[node] = sources[0]
        elif not arithmetic(node.target):
            for root in (node, *sources):
                touch[root].add(node)
    shared = (ops for root, ops in touch.items() if any(tensor.numel() > 1 for tensor in tensors_of(values[root])))
    return {op for ops in shared if len(ops) > 1 for op in ops}


def among_their_like(pieces: Sequence[list[Group]], values: dict[Node, Any]) -> list[list[Group]]:
    """`pieces` of a stretch in which an op that gains nothing in its own stands in that of its first reader, if no more
    bytes are held so; and one of numbers that nothing there reads, in that of its operands. What an op reads and writes
    stays as it was; random ops do not move.
    """
    return _Places(pieces, values).moved()


class _Places:
    def __init__(self, pieces: Sequence[list[Group]], values: dict[Node, Any]) -> None:
        self.pieces, self.values = pieces, values
        self.at = {node: i for i, piece in enumerate(pieces) for group in piece for node in group}
        calls = [group[0] for piece in pieces for group in piece if viewed(group[0]) is None]
        self.touching = defaultdict[Node, list[Node]](list)
        for node in calls:
            for root in _roots(node):
                self.touching[root].append(node)
        self.bound = {node for piece in pieces for node in fused([n for group in piece for n in group], values)}
        self.loose = [node for node in calls if node not in self.bound and not arithmetic(node.target)]
        for node in reversed(self.loose):
            if any(reader in self.bound and self.at[reader] == self.at[node] for reader in _readers(node)):
                self.bound.add(node)

    def moved(self) -> list[list[Group]]:
        for node in self.loose:  # before counters go to their readers, which write them
            self._to_operands(node)
        for node in reversed(self.loose):
            self._to_reader(node)
        out: list[list[Group]] = [[] for _ in self.pieces]
        for group in (group for piece in self.pieces for group in piece):
            source = viewed(group[0])
            place = max(self.at[group[0]], self.at.get(source, 0)) if source is not None else self.at[group[0]]
            self.at.update(dict.fromkeys(group, place))
            out[place].append(group)
        return out

    def _to_reader(self, node: Node) -> None:
        readers = [reader for reader in _readers(node) if reader in self.at and not arithmetic(reader.target)]
        there = min((self.at[reader] for reader in readers), default=0)
        if there > self.at[node] and not is_mutating(node) and self._held(node) <= self._bytes(node):
            self._move(node, there)

    def _to_operands(self, node: Node) -> None:
        here, sources = self.at[node], operands(node)
        numbers = all(tensor.numel() <= 1 for value in (node, *sources) for tensor in tensors_of(self.values[value]))
        there = max((self.at[source] for source in sources if source in self.at), default=here)
        if numbers and there < here and node not in self.bound and not any(map(viewed, sources)):
            self._move(node, there)

    def _move(self, node: Node, there: int) -> None:
        """Unless it would pass an op that writes what it reads, or that touches what it writes."""
        here = self.at[node]
        passed = range(here, there) if there > here else range(there + 1, here + 1)
        crossed = {other for root in _roots(node) for other in self.touching[root] if self.at[other] in passed} - {node}
        if is_random(node) or any(is_mutating(node) or is_mutating(other) for other in crossed):
            return
        self.at[node] = there

    def _held(self, node: Node) -> int:
        return sum(self._bytes(operand) for operand in dict.fromkeys(operands(node)) if operand.op != "placeholder")

    def _bytes(self, node: Node) -> int:
        tensors = tensors_of(self.values[node])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


def _roots(node: Node) -> set[Node]:
    """What `node` reads or writes, and what that is a view of."""
    return set(map(root_of, operands(node)))


def _readers(node: Node) -> set[Node]:
    """What reads `node`, or a view of it."""
    views = reached([node], attrgetter("users"), lambda n: n is node or viewed(n) is not None)
    return {user for view in views for user in view.users if viewed(user) is None}
