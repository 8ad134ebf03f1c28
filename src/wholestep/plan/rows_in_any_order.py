"""Finds rows that are sorted by group, as tokens by expert, of which the order is of no account: ranks share them.

Rows come from x[permutation], and go back by its inverse. Between, ops treat all rows alike: grouped products, and ops
that can be computed piece by piece whatever the place of a piece. So each rank may sort its own rows alone. The graph
is searched for every op that reads such a row or index, forward and backward; one that does more leaves all as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import copy_graph, drop_dead, node_at, operands
from ..graph.op_kinds import CHEAP, packet_name
from ..layout import Layout
from ..rules.aten.rows_in_groups import BACKWARD, FORWARD, inverse_rows, own_rows, product_of_rows, sum_of_rows
from ..rules.find_rule import find_rule
from ..rules.registry import is_random
from .decision import Decision

aten = torch.ops.aten
_CONSTANTS = frozenset({"new_zeros", "zeros_like", "zeros", "ones_like", "full_like", "new_full", "full"})
_PRODUCTS = {FORWARD, BACKWARD, str(aten._grouped_mm.default)}


def with_rows_in_any_order(graph: TrainGraph) -> TrainGraph:
    """`graph` with ops of which ranks may have their own rows; itself where it has none."""
    if not any(_sorts_rows(node) for node in graph.graph.nodes):
        return graph
    new, changed = copy_graph(graph.graph), False
    for node in [n for n in new.nodes if _sorts_rows(n)]:
        rows = _Rows(node)
        if rows.are_in_any_order():
            rows.rewrite()
            changed = True
    drop_dead(new)
    return replace(graph, graph=new) if changed else graph


def shares_rows(decisions: Mapping[str, Decision], graph: TrainGraph) -> bool:
    """Whether decisions are about `with_rows_in_any_order`: some ranks sort their own."""
    sorts = [decisions.get(node.name) for node in graph.graph.nodes if _sorts_rows(node) or meta.rows(node)]
    return any(at is not None and at.operands and any(at.operands[0].dims) for at in sorts)


def check_rows(graph: TrainGraph, decisions: Mapping[str, Decision]) -> None:
    """Raise PlanError if not all ops on the rows of a sort have the same pieces of them."""
    pieces = dict[str, tuple[Any, ...]]()
    for node in graph.graph.nodes:
        of, dims = meta.rows(node) or ("", ())
        if of == node.name:
            pieces[of] = _piece(decisions[of].operands[0], 0)
        given = decisions[node.name].given if of else ()
        wrong = any(d is not None and _piece(at, d) != pieces[of] for d, at in zip(dims, given, strict=False))
        if wrong or not all(of and piece == pieces[of] for piece in _read_pieces(node, decisions)):
            problem = f"the plan's layouts are wrong: %{node.name} has other rows than the sort before it"
            raise PlanError(problem, "the same pieces of all rows", "plan the graph again", meta.source_line(node))


def _read_pieces(node: Node, decisions: Mapping[str, Decision]) -> Iterator[tuple[Any, ...] | None]:
    """The pieces in which a node reads values with rows."""
    if _torch.is_getitem(node.target):
        return
    calls = node.op == "call_function"
    by_shape = rule.by_shape if calls and (rule := find_rule(node)) else frozenset[int]()
    for i, operand in enumerate(operands(node)):
        _, (dim, *_) = meta.rows(operand) or ("", (None,))
        if dim is not None and i not in by_shape:
            yield _piece(decisions[node.name].operands[i], dim) if calls else None


def _piece(layout: Layout, dim: int) -> tuple[Any, ...]:
    """The axes that shard a dim, and their blocks."""
    return layout.dims[dim], tuple(b for b in layout.blocks if b[0] in layout.dims[dim])


def _sorts_rows(node: Node) -> bool:
    """True for a sort of a vector of integers."""
    if node.op != "call_function" or packet_name(node.target) not in ("sort", "argsort"):
        return False
    tensor = meta.tensor(node_at(node, 0))
    falling = node.kwargs.get("descending") or True in node.args[1:]
    return tensor is not None and len(tensor.shape) == 1 and not tensor.dtype.is_floating_point and not falling


def _are_places(keys: Node) -> bool:
    """True for integers from zero on: places that an op returns, or copies. Rows of negative keys shift all groups."""
    if _torch.is_getitem(keys.target):
        return cast(int, keys.args[1]) == 1 and packet_name(node_at(keys, 0).target) in ("topk", "sort", "max")
    if packet_name(keys.target) in ("argmax", "argsort"):
        return True
    copies = keys.target in CHEAP or packet_name(keys.target) in ("clone", "cat")
    return copies and meta.one_tensor(keys).dtype.itemsize >= 4 and all(map(_are_places, operands(keys)))


@dataclass
class _Rows:
    """The values of a step that have rows in the order of `sort`.

    `dims`: the dim of rows of each output. `index`: positions before the sort, divided by a number; `inverse`: those
    after it. `groups`: the sorted keys; `counts` of keys by group, and `ends` of groups, with their number. `sums`: ops
    that sum over rows.
    """

    sort: Node
    dims: dict[Node, tuple[int | None, ...]] = field(default_factory=dict[Node, "tuple[int | None, ...]"])
    index: dict[Node, int] = field(default_factory=dict[Node, int])
    inverse: set[Node] = field(default_factory=set[Node])
    groups: list[Node] = field(default_factory=list[Node])
    sums: list[Node] = field(default_factory=list[Node])
    counts: dict[Node, int] = field(default_factory=dict[Node, int])
    ends: dict[Node, int] = field(default_factory=dict[Node, int])
    calls: dict[Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict[Node, "tuple[Any, tuple[Any, ...]]"])

    def are_in_any_order(self) -> bool:
        """Whether all that is computed of the sorted rows is the same in any order; notes what is."""
        if not _are_places(node_at(self.sort, 0)):
            return False
        self.count = meta.one_tensor(node_at(self.sort, 0)).shape[0]
        self.calls[self.sort] = own_rows(self.sort.target), self.sort.args
        if packet_name(self.sort.target) == "sort":
            self.dims[self.sort] = (0, 0)
        else:
            self.index[self.sort] = 1
        node, multiplies = self.sort.next, False
        while node.op != "root":
            known = [n for n in node.all_input_nodes if n in self.dims or n in self.index or n in self.inverse]
            multiplies |= str(node.target) in _PRODUCTS and bool(known)
            if (known or any(n in self.counts for n in node.all_input_nodes)) and not self._admits(node):
                return False
            node = node.next
        return multiplies

    def rewrite(self) -> None:
        """Give ops the functions that have rules for own rows, and note which dims are rows."""
        for node, (target, args) in self.calls.items():
            node.target, node.args = target, args
            node.kwargs = {} if target in (sum_of_rows, inverse_rows) else node.kwargs
            meta.set_known_rule(node, None)
        noted = {**dict.fromkeys((*self.calls, *self.groups, *self.sums), (None,)), **self.dims}
        noted |= dict.fromkeys((*self.index, *self.inverse), (0,))
        for node, dims in noted.items():
            meta.set_rows(node, (self.sort.name, dims))

    def _admits(self, node: Node) -> bool:
        args, name = node.args, packet_name(node.target)
        if node.op != "call_function":
            return False
        if _torch.is_getitem(node.target):
            source, dims = node_at(node, 0), self.dims.get(node_at(node, 0), ())
            if source is self.sort and args[1] == 1:
                self.index[node] = 1
            else:
                self._note(node, dims[meta.picked(node)])
                self.groups += [node] if source is self.sort else []
            return True
        places: Any = args[1] if name in ("index", "index_put") else ()
        place = places[0] if len(places) == 1 else None
        if place in self.index or place in self.inverse:
            return self._reads(node, place) if name == "index" else self._writes(node, place)
        first = args[0] if args and isinstance(args[0], Node) else None
        if first in self.index and name == "floor_divide" and isinstance(args[1], int) and args[1] > 0:
            self.index[node] = self.index[first] * args[1]
            return self.count % self.index[node] == 0
        if first in self.index and self.index[first] == 1 and _sorts_rows(node):
            positions = [node] if name == "argsort" else list(node.users)
            return all(n is node or n.args[1] == 1 for n in positions) and all(
                self._inverts(n, first) for n in positions
            )
        if str(node.target) in _PRODUCTS:
            return len(node.args) > 2 and self._multiplies(node)
        if first in self.counts and name == "cumsum":
            self.ends[node] = self.counts[first]
            return True
        if first in self.groups and name == "_to_copy":
            self.groups += [node] if meta.one_tensor(node).dtype.itemsize >= 4 else []
        # from 0 to 0 is a range by the values
        elif first in self.groups and name == "histc" and args[2:4] == (0, cast(int, args[1]) - 1) != (0, 0):
            self.counts[node] = cast(int, args[1])
        return self._treats_alike(node)

    def _known(self, node: object) -> bool:
        return node in self.dims or node in self.index or node in self.inverse

    def _is_rows(self, node: object, dim: int = 0) -> bool:
        return isinstance(node, Node) and self.dims.get(node) == (dim,)

    def _reads(self, node: Node, place: Node) -> bool:
        """x[index] makes sorted rows, and rows[inverse] those before the sort."""
        source = node_at(node, 0)
        self.calls[node] = own_rows(node.target), node.args
        if place in self.inverse:
            return self._is_rows(source)
        self.dims[node] = (0,)
        self.groups += [node] if source is node_at(self.sort, 0) else []
        return not self._known(source) and meta.one_tensor(source).shape[0] * self.index[place] == self.count

    def _writes(self, node: Node, place: Node) -> bool:
        """Gradients of both, sums into zeros; and the inverse of the permutation."""
        into, values, adds = node_at(node, 0), node_at(node, 2), len(node.args) > 3 and node.args[3]
        shape, written = meta.one_tensor(into).shape, meta.one_tensor(values).shape
        if place in self.index and self.index[place] == 1 and values.target is aten.arange.default and not adds:
            return shape == values.args == (self.count,) and self._inverts(node, place)
        self.calls[node] = sum_of_rows, (place, values, self.index.get(place, 1))
        zeros = packet_name(into.target) in ("new_zeros", "zeros_like", "zeros") and not self._known(into)
        zeros = zeros and written == (self.count, *shape[1:]) and shape[0] * self.index.get(place, 1) == self.count
        if place in self.inverse:
            self.dims[node] = (0,)
            return zeros and not self._known(values)
        return zeros and self._is_rows(values) and bool(adds or self.index[place] == 1)

    def _inverts(self, node: Node, place: Node) -> bool:
        self.calls[node] = inverse_rows, (place,)
        self.inverse.add(node)
        return True

    def _multiplies(self, node: Node) -> bool:
        """Each row by the matrix of its group; the gradient of the matrices is a sum over rows."""
        first, other, ends, *rest = node.args
        number = self.ends.get(cast(Node, ends), 0)
        matrices = meta.one_tensor(cast(Node, other)).shape
        if not (number and self.groups) or node.kwargs.get("bias") is not None:
            return False
        self.calls[node] = product_of_rows(node.target, number), (first, other, self.groups[0], *rest)
        if self._is_rows(first, 1) and self._is_rows(other) and not rest:
            return True
        back = str(node.target) == BACKWARD
        self.dims[node] = (0, None) if back else (0,)
        gradients = len(rest) == 1 and self._is_rows(rest[0]) if back else not any(isinstance(n, Node) for n in rest)
        return self._is_rows(first) and not self._known(other) and matrices[0] == number and gradients

    def _treats_alike(self, node: Node) -> bool:
        """Whether an op can be computed piece by piece, by itself, whatever the place of a piece among the rows."""
        rule = find_rule(node)
        if rule is None or is_random(node) or any(source.startswith("start") for source in rule.sizes.values()):
            return False
        inputs = {i: n for i, n in enumerate(operands(node)) if i not in rule.by_shape}
        if any(n in self.index or n in self.inverse for n in inputs.values()):
            return False
        dims: list[int | None] = [None] * len(meta.tensors(node))
        rows = {i: self.dims[n][0] for i, n in inputs.items() if n in self.dims}
        for group in rule.groups:
            placed = {i: rows.pop(i) for i in group.operands if i in rows}
            factors = {group.operands[i][d] for i, d in placed.items() if d is not None}
            factor = factors.pop() if factors else None
            if not placed:
                continue
            if factor is None or factors or group.reduces.get(factor) == "":
                return False
            for i in (i for i, term in group.operands.items() if factor in term and i in inputs):
                constant = i not in placed and packet_name(inputs[i].target) in _CONSTANTS
                if not constant and placed.get(i) != group.operands[i].index(factor):
                    return False
            for number, term in group.outputs.items():
                if factor in term:
                    dims[number] = term.index(factor)
            if factor in rule.local and any(factor in term for term in group.outputs.values()):
                return False
        kept = [(tensor, d) for tensor, d in zip(meta.tensors(node), dims, strict=True) if d is not None]
        if rows or any(tensor is None or tensor.shape[d] != self.count for tensor, d in kept):
            return False
        self._note(node, tuple(dims))
        return True

    def _note(self, node: Node, dims: tuple[int | None, ...]) -> None:
        """Note the dims of rows of what a node makes, or that it has none: a sum over rows."""
        if any(d is not None for d in dims):
            self.dims[node] = dims
        else:
            self.sums.append(node)
