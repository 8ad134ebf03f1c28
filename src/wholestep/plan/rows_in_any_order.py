"""Finds rows that are sorted by group, as tokens by expert, of which the order is of no account: ranks share them, or
the groups.

Rows come from x[permutation], and go back by its inverse. Between, ops treat all rows alike: grouped products, and ops
that can be computed piece by piece whatever the place of a piece. So each rank may sort its own rows alone. Or it has
all rows, first those of its own groups, which alone it multiplies; sums over rows, and what goes back, are sums over
ranks of these rows. The graph is searched for every op that reads such a row or index, forward and backward; one that
does more leaves all as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import add_node, copy_graph, drop_dead, node_at, operands
from ..graph.op_kinds import CHEAP, packet_name
from ..layout import REPLICATED, VARIES, Extent, Layout, extent, partial_by, sharded_along
from ..mesh import Mesh
from ..rules.aten.rows_in_groups import (
    BACKWARD,
    FORWARD,
    groups_first,
    inverse_rows,
    own_rows,
    product_of_groups,
    product_of_rows,
    rows_of_groups,
    sum_of_rows,
)  # fmt: skip
from ..rules.find_rule import find_rule
from ..rules.registry import is_random
from .decision import Decision

aten = torch.ops.aten
_CONSTANTS = frozenset({"new_zeros", "zeros_like", "zeros", "ones_like", "full_like", "new_full", "full"})
_PRODUCTS = {FORWARD, BACKWARD, str(aten._grouped_mm.default)}


def with_rows_in_any_order(graph: TrainGraph, apart: Mapping[str, str], mesh: Mesh) -> TrainGraph:
    """`graph` with ops of which ranks may have their own rows; itself where it has none. `apart`: sorts of which ranks
    have the rows of their own groups, with the axis.
    """
    if not any(_sorts_rows(node) for node in graph.graph.nodes):
        return graph
    new, changed = copy_graph(graph.graph), False
    for rows in sorted_rows(new):
        rows.rewrite(apart.get(rows.sort.name, ""), mesh)
        changed = True
    drop_dead(new)
    return replace(graph, graph=new) if changed else graph


def sorted_rows(graph: Graph) -> Iterator[SortedRows]:
    """All that is computed of rows that are sorted by group, where their order is of no account."""
    for node in [n for n in graph.nodes if _sorts_rows(n)]:
        rows = SortedRows(node)
        if rows.are_in_any_order():
            yield rows


def with_shared_rows(graph: TrainGraph, decisions: Mapping[str, Decision], mesh: Mesh) -> TrainGraph:
    """`graph` as decisions are about it: some ranks sort their own rows, or those of their own groups first."""
    apart = {name: axis for name, axis in _shared(decisions, graph).items() if axis}
    return with_rows_in_any_order(graph, apart, mesh) if shares_rows(decisions, graph) else graph


def shares_rows(decisions: Mapping[str, Decision], graph: TrainGraph) -> bool:
    """Whether decisions are about `with_rows_in_any_order`: some ranks have their own rows, or groups."""
    return bool(_shared(decisions, graph))


def _shared(decisions: Mapping[str, Decision], graph: TrainGraph) -> dict[str, str]:
    """Sorts of which ranks have pieces, or results that differ along an axis where the operand does not; the axis."""
    sorts = {n.name: decisions.get(n.name) for n in graph.graph.nodes if _sorts_rows(n) or meta.rows(n)}
    known = {name: at for name, at in sorts.items() if at is not None and at.operands and at.outputs}
    axes = {name: {*at.outputs[0].varies}.difference(*(o.varies for o in at.operands)) for name, at in known.items()}
    return {name: min(axes[name], default="") for name, at in known.items() if axes[name] or any(at.operands[0].dims)}


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


def _is_zero(node: Node) -> bool:
    return packet_name(node.target) in ("new_zeros", "zeros_like", "zeros")


def _sorts_rows(node: Node) -> bool:
    """True for a sort of a vector of integers."""
    if node.op != "call_function" or packet_name(node.target) not in ("sort", "argsort"):
        return False
    tensor = meta.tensor(node_at(node, 0))
    falling = node.kwargs.get("descending") or True in node.args[1:]
    return tensor is not None and len(tensor.shape) == 1 and not tensor.dtype.is_floating_point and not falling


def _places(keys: Node) -> int:
    """A number that integers from zero on are below, places that an op returns, or copies; 0 for others. Rows of
    negative keys shift all groups.
    """
    source = node_at(keys, 0) if _torch.is_getitem(keys.target) and cast(int, keys.args[1]) == 1 else keys
    if packet_name(source.target) in (("topk", "sort", "max") if source is not keys else ("argmax", "argsort")):
        shape, at = meta.one_tensor(node_at(source, 0)).shape, 2 if packet_name(source.target) == "topk" else 1
        dim = source.args[at] if len(source.args) > at else source.kwargs.get("dim", -1)
        return shape[dim] if shape and isinstance(dim, int) else prod(shape)
    copies = keys.target in CHEAP or packet_name(keys.target) in ("clone", "cat")
    bounds = list(map(_places, operands(keys))) if copies and meta.one_tensor(keys).dtype.itemsize >= 4 else []
    return max(bounds, default=0) if all(bounds) else 0


@dataclass
class SortedRows:
    """The values of a step that have rows in the order of `sort`.

    `dims`: the dim of rows of each output. `index`: positions before the sort, divided by a number; `inverse`: those
    after it. `groups`: the sorted keys; `counts` of keys by group, and `ends` of groups, with their number. `sources`:
    what rows are read of. `sums`: ops that sum over rows, with the operands that are zero for rows that do not count;
    none where that is not known. `constants`: what is made of shapes. `products`: what multiplies rows, with the
    matrices of groups that it reads.
    """

    sort: Node
    dims: dict[Node, tuple[int | None, ...]] = field(default_factory=dict[Node, "tuple[int | None, ...]"])
    index: dict[Node, int] = field(default_factory=dict[Node, int])
    inverse: set[Node] = field(default_factory=set[Node])
    groups: list[Node] = field(default_factory=list[Node])
    sums: dict[Node, tuple[Node, ...]] = field(default_factory=dict[Node, tuple[Node, ...]])
    products: dict[Node, Node | None] = field(default_factory=dict[Node, "Node | None"])
    counts: dict[Node, int] = field(default_factory=dict[Node, int])
    ends: dict[Node, int] = field(default_factory=dict[Node, int])
    constants: list[Node] = field(default_factory=list[Node])
    sources: list[Node] = field(default_factory=list[Node])
    chosen: dict[Node, Node] = field(default_factory=dict[Node, Node])
    calls: dict[Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict[Node, "tuple[Any, tuple[Any, ...]]"])

    def are_in_any_order(self) -> bool:
        """Whether all that is computed of the sorted rows is the same in any order; notes what is."""
        if not _places(node_at(self.sort, 0)):
            return False
        self.count = meta.one_tensor(node_at(self.sort, 0)).shape[0]
        self.calls[self.sort] = own_rows(self.sort.target), self.sort.args
        if packet_name(self.sort.target) == "sort":
            self.dims[self.sort] = (0, 0)
        else:
            self.index[self.sort] = 1
        node = self.sort.next
        while node.op != "root":
            known = [n for n in node.all_input_nodes if n in self.dims or n in self.index or n in self.inverse]
            if (known or any(n in self.counts for n in node.all_input_nodes)) and not self._admits(node):
                return False
            node = node.next
        return bool(self.products)

    @property
    def number(self) -> int:
        """Of groups."""
        return next(iter(self.counts.values()))

    @property
    def have_groups_apart(self) -> bool:
        """Whether ranks may have groups: every row is of one of them, and sums can do without rows."""
        sums = all(rows and self.groups[0] < node for node, rows in self.sums.items())
        return sums and {*self.counts.values()} == {self.number} and _places(node_at(self.sort, 0)) <= self.number

    def rewrite(self, axis: str, mesh: Mesh) -> None:
        """Give ops the functions that have rules for own rows, and note which dims are rows; along `axis`, if any, for
        ranks that have groups.
        """
        if axis:
            ranks = mesh.axis_size(axis)
            first, count = Extent(self.number, ((axis, ranks),), start=True), extent(self.number, [axis], mesh)
            self.calls[self.sort] = groups_first(self.sort.target, self.number), (first, *self.sort.args)
            for node in self.products:
                target = product_of_groups(node.target, self.number, ranks)
                self.calls[node] = target, (first, count, *self.calls[node][1])
            for node, rows in self.sums.items():
                for x in rows:
                    self.chosen[x] = self.chosen.get(x) or self._chosen(x, node, first, count)
        for node, (target, args) in self.calls.items():
            node.target, node.args = target, args
            node.kwargs = {} if target in (sum_of_rows, inverse_rows) else node.kwargs
            meta.set_known_rule(node, None)
        noted = {**dict.fromkeys((*self.calls, *self.groups, *self.sums), (None,)), **self.dims}
        noted |= dict.fromkeys((*self.index, *self.inverse), (0,))
        for node, dims in noted.items():
            meta.set_rows(node, (self.sort.name, dims))
        if axis:
            self._note_states(axis)

    def _chosen(self, x: Node, reader: Node, first: Extent, count: int | Extent) -> Node:
        """`x` without the rows of other ranks, for its first reader."""
        with self.sort.graph.inserting_before(reader):
            args = first, count, x, self.groups[0], self.dims[x][0]
            new = add_node(self.sort.graph, "call_function", rows_of_groups, args, {}, f"{x.name}_of_groups")
        meta.copy(x, new)
        self.dims[new] = self.dims[x]
        return new

    def _note_states(self, axis: str) -> None:
        """Note the states along an axis of operands and results, where a difference between ranks does not say them."""
        rows, cut = {*self.dims, *self.index, *self.inverse}, sharded_along(0)
        alike = {*self.counts, *self.constants}
        for node in (self.sort, *self.products, *self.sums, *alike):
            for x in self.sums.get(node, ()):
                node.replace_input_with(x, self.chosen[x])
            matrices, dims = self.products.get(node), self.dims.get(node, (None,) * len(meta.tensors(node)))
            takes = tuple(cut if n is matrices else VARIES if n in rows else REPLICATED for n in operands(node))
            total = cut if node in self.products else REPLICATED if node in alike else partial_by("sum")
            gives = tuple(VARIES if d is not None or node in self.index else total for d in dims)
            meta.set_along(node, (axis, takes, gives))

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
            self.sums[node] = (source,)
            return self._is_rows(source)
        self.dims[node] = (0,)
        self.groups += [node] if source is node_at(self.sort, 0) else []
        self.sources.append(source)
        return not self._known(source) and meta.one_tensor(source).shape[0] * self.index[place] == self.count

    def _writes(self, node: Node, place: Node) -> bool:
        """Gradients of both, sums into zeros; and the inverse of the permutation."""
        into, values, adds = node_at(node, 0), node_at(node, 2), len(node.args) > 3 and node.args[3]
        shape, written = meta.one_tensor(into).shape, meta.one_tensor(values).shape
        if place in self.index and self.index[place] == 1 and values.target is aten.arange.default and not adds:
            return shape == values.args == (self.count,) and self._inverts(node, place)
        self.calls[node] = sum_of_rows, (place, values, self.index.get(place, 1))
        zeros = _is_zero(into) and not self._known(into)
        zeros = zeros and written == (self.count, *shape[1:]) and shape[0] * self.index.get(place, 1) == self.count
        if place in self.inverse:
            self.dims[node] = (0,)
            return zeros and not self._known(values)
        self.sums[node] = (values,)
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
        self.products[node] = None if self._is_rows(other) else cast(Node, other)
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
        summed: tuple[Node, ...] | None = None
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
                elif number not in group.opaque:
                    added = [p.operands for p in group.partial if "sum" in p.ops and not p.operands.isdisjoint(placed)]
                    known = summed != () and added and all(i in placed or _is_zero(inputs[i]) for i in added[0])
                    known = known and group.reduces.get(factor) == "sum"
                    summed = tuple(inputs[i] for i in added[0] if i in placed) if known else ()
            if factor in rule.local and any(factor in term for term in group.outputs.values()):
                return False
        kept = [(tensor, d) for tensor, d in zip(meta.tensors(node), dims, strict=True) if d is not None]
        if rows or any(tensor is None or tensor.shape[d] != self.count for tensor, d in kept):
            return False
        self._note(node, tuple(dims))
        if not any(self._known(n) for n in inputs.values()):
            self.constants.append(node)
        if summed is not None and node not in self.counts:
            self.sums[node] = summed
        return True

    def _note(self, node: Node, dims: tuple[int | None, ...]) -> None:
        """Note the dims of rows of what a node makes, or that it has none: a sum over rows."""
        if any(d is not None for d in dims):
            self.dims[node] = dims
