"""Moves isolated fusible ops next to similar ones, so that Inductor can fuse them.

A program computes the same kind of thing for all parameters at once: it scales all gradients, then updates all
parameters, then stores all counters. Compiled beside the update of its parameter, the scaled gradient is never written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from ... import _torch
from ...graph.nodes import is_mutating, operands
from ...graph.op_kinds import FREE, arithmetic
from ...rules.registry import is_random
from .aliases import viewed

Group = list[Node]
"""A call and the getitems of its results."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a node makes."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else ()
    return [one for item in items for one in tensors_of(item)]


def fused(nodes: Sequence[Node], values: dict[Node, Any]) -> set[Node]:
    """Ops of `nodes` that touch a tensor which another one of them touches too: one kernel would move it once.

    Ops that share numbers alone (the norm of each gradient, the rounding of each counter) gain nothing from one kernel.
    """
    roots, touch = dict[Node, Node](), defaultdict[Node, set[Node]](set)
    for node in nodes:
        given = [roots.get(one, one) for one in operands(node)]
        if given and (_torch.is_getitem(node.target) or node.target in FREE):
            roots[node] = given[0]
        elif not arithmetic(node.target):
            for one in (node, *given):
                touch[one].add(node)
    shared = (ops for one, ops in touch.items() if any(made.numel() > 1 for made in tensors_of(values[one])))
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
            if any(one in self.bound and self.at[one] == self.at[node] for one in _readers(node)):
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
        readers = [one for one in _readers(node) if one in self.at and not arithmetic(one.target)]
        there = min((self.at[one] for one in readers), default=0)
        if there > self.at[node] and not is_mutating(node) and self._held(node) <= self._bytes(node):
            self._move(node, there)

    def _to_operands(self, node: Node) -> None:
        here, given = self.at[node], operands(node)
        numbers = all(one.numel() <= 1 for value in (node, *given) for one in tensors_of(self.values[value]))
        there = max((self.at[one] for one in given if one in self.at), default=here)
        if numbers and there < here and node not in self.bound and not any(map(viewed, given)):
            self._move(node, there)

    def _move(self, node: Node, there: int) -> None:
        """Unless it would pass an op that writes what it reads, or that touches what it writes."""
        here = self.at[node]
        passed = range(here, there) if there > here else range(there + 1, here + 1)
        others = {one for root in _roots(node) for one in self.touching[root] if self.at[one] in passed} - {node}
        if is_random(node) or any(is_mutating(node) or is_mutating(one) for one in others):
            return
        self.at[node] = there

    def _held(self, node: Node) -> int:
        return sum(self._bytes(one) for one in dict.fromkeys(operands(node)) if one.op != "placeholder")

    def _bytes(self, node: Node) -> int:
        made = tensors_of(self.values[node])
        return sum(one.numel() * one.element_size() for one in made if one.numel() > 1)


def _roots(node: Node) -> set[Node]:
    """What `node` reads or writes, and what that is a view of."""
    found, given = set[Node](), operands(node)
    while given:
        one = given.pop()
        source = viewed(one)
        if source is None:
            found.add(one)
        else:
            given.append(source)
    return found


def _readers(node: Node) -> set[Node]:
    """What reads `node`, or a view of it."""
    found, users = set[Node](), list(node.users)
    while users:
        one = users.pop()
        if viewed(one) is None:
            found.add(one)
        else:
            users += one.users
    return found
