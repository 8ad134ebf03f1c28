"""Splits optimizers over lists of tensors by bucket: one bucket is updated while others are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, operands, redirect
from ..graph.op_kinds import is_list_op
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
        local.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
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
        lists = _lists(node)
        if lists:
            entries = {one for given in lists for one in given}
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
            whole, index = cast(tuple[Node, int], node.args)
            if isinstance(meta.value(whole), (list, tuple)) and whole in self.items:
                after = self._picked(node, whole, index)
        self.after[node] = after

    def _bits(self, waits: Waits) -> int:
        """These waits and all before them."""
        found = 0
        for wait in waits:
            found |= self.passed[wait] | 1 << self.number[wait]
        return found

    def _latest(self, waits: Waits) -> Waits:
        """Those of `waits` that no other one of them follows."""
        passed = 0
        for wait in waits:
            passed |= self.passed[wait]
        return frozenset(wait for wait in waits if not passed >> self.number[wait] & 1)

    def _picked(self, node: Node, whole: Node, index: int) -> Waits:
        """Waits of one output of a list op; an output that is a list itself keeps the waits of its items."""
        if isinstance(meta.value(node), (list, tuple)):
            self.items[node] = self.items[whole]
            return frozenset()
        return self.items[whole][index] if index < len(self.items[whole]) else frozenset()

    def _split(self, node: Node, groups: list[list[int]]) -> None:
        """Replace `node` by one op for each group of positions, and let each getitem read from the op of its item."""
        length = sum(len(g) for g in groups)
        made: list[Node] = []
        with self.graph.inserting_before(node):
            for group in groups:
                args = tuple(_cut(a, group, length) for a in node.args)
                kwargs = {name: _cut(a, group, length) for name, a in node.kwargs.items()}
                new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
                _describe(new, node, group, length)
                self.items[new] = [self.items[node][i] for i in group]
                made.append(new)
        place = {i: (new, at) for new, group in zip(made, groups, strict=True) for at, i in enumerate(group)}
        picked: dict[Node, Node] = {}
        for pick in node.users:
            if isinstance(meta.value(pick), (list, tuple)):
                picked |= {item: self._repick(item, place, cast(int, pick.args[1])) for item in pick.users}
            else:
                picked[pick] = self._repick(pick, place, None)
        redirect(picked)

    def _repick(self, item: Node, place: dict[int, tuple[Node, int]], outer: int | None) -> Node:
        new, at = place[cast(int, item.args[1])]
        with self.graph.inserting_before(item):
            source = new
            if outer is not None:
                source = self.graph.create_node("call_function", _torch.GETITEM, (new, outer), name="getitem")
                meta.copy_origin(item, source)
                meta.set_value(source, meta.value(new)[outer])
            picked = self.graph.create_node("call_function", _torch.GETITEM, (source, at), name=item.name)
        meta.copy(item, picked)
        self.after[picked] = self.items[new][at]
        return picked


def _sent(graph: Graph) -> set[Node]:
    """The nodes whose results a later collective sends."""
    found = set[Node]()
    for node in reversed(graph.nodes):
        if any(is_collective(user) or user in found for user in node.users):
            found.add(node)
    return found


def _lists(node: Node) -> list[list[Node]]:
    """The lists of tensors, all of one length, that an op over lists takes; empty for other ops."""
    if not is_list_op(node.target):
        return []
    found = [cast(list[Any], a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple)) and a]
    lists = [list(a) for a in found if all(isinstance(n, Node) for n in a)]
    return lists if lists and len({len(a) for a in found}) == 1 else []


def _cut(value: Any, group: list[int], length: int) -> Any:
    """A list of `length` cut to the positions in `group`; any other value as it is."""
    whole = _opened(value)
    return [whole[i] for i in group] if whole and len(whole) == length else value


def _opened(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, (list, tuple)) else []


def _describe(new: Node, node: Node, group: list[int], length: int) -> None:
    """Give `new` the metadata of `node`, cut to the positions in `group`."""
    value, tensors = meta.value(node), meta.tensors(node)
    meta.copy(node, new)
    nested = any(isinstance(v, (list, tuple)) for v in _opened(value))
    outputs: list[Any] = _opened(value) if nested else [value]
    made = [_cut(output, group, length) for output in outputs]
    meta.set_value(new, tuple(made) if nested else made[0])
    keep: list[Any] = []
    at = 0
    for output in outputs:
        size = len(_opened(output)) if isinstance(output, (list, tuple)) else 1
        keep += _cut(list(tensors[at : at + size]), group, length)
        at += size
    meta.set_tensors(new, keep)
