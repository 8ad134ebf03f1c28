"""Finds rows that are sorted by group, as tokens by expert, of which the order is of no account: ranks share them, or
the groups.

Rows come from x[permutation], and go back by its inverse. Between, ops treat all rows alike: grouped products, and ops
that can be computed piece by piece whatever the place of a piece. So each rank may sort its own rows alone. Or it has
all rows, first those of its own groups, which alone it multiplies; sums over rows, and what goes back, are sums over
ranks of these rows. Or ranks sort their own rows, and send them to the ranks of their groups and back. The graph is
searched for every op that reads such a row or index, forward and backward; one that does more leaves all as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import add_node, copy_graph, drop_dead, node_at, operands, reached
from ..graph.op_kinds import CHEAP, packet_name
from ..layout import REPLICATED, VARIES, AxisState, Extent, Layout, extent, partial_by, sharded_along
from ..mesh import Mesh
from ..rules.aten.rows_in_groups import (
    BACKWARD,
    FORWARD,
    groups_first,
    inverse_rows,
    most_rows,
    own_rows,
    product_of_groups,
    product_of_rows,
    received_groups,
    rows_of_groups,
    sent_rows,
    sum_of_rows,
    with_its_rows,
)  # fmt: skip
from ..rules.find_rule import find_rule
from ..rules.registry import is_random
from ..rules.rule import COUNT_OPERANDS, BoundRule
from .decision import Decision
from .padded_values import constant_made

aten = torch.ops.aten
_CONSTANTS = frozenset({"new_zeros", "zeros_like", "zeros", "ones_like", "full_like", "new_full", "full"})
_PRODUCTS = {FORWARD, BACKWARD, str(aten._grouped_mm.default)}
Apart = tuple[str, Literal["gathered", "counted", "bounded"], Literal["", "sum", "mean"]]
"""The axis whose ranks have groups of their own; whether all rows are there, or sent to them, as many as the host
counts, or with room for all that may come; and if ranks have batches of their own, what gradients are of these.
"""


def with_rows_in_any_order(graph: TrainGraph, apart: Callable[[SortedRows], Apart], mesh: Mesh) -> TrainGraph:
    """`graph` with ops of which ranks may have their own rows; itself where it has none. `apart`: the axis along which
    ranks have the rows of their own groups, or "".
    """
    if not any(_sorts_rows(node) for node in graph.graph.nodes):
        return graph
    new = copy_graph(graph.graph)
    for rows in (every := [*sorted_rows(new)]):
        rows.rewrite(*apart(rows), mesh)
    drop_dead(new)
    return replace(graph, graph=new) if every else graph


def sorted_rows(graph: Graph) -> Iterator[SortedRows]:
    """All that is computed of rows that are sorted by group, where their order is of no account."""
    for node in [n for n in graph.nodes if _sorts_rows(n)]:
        rows = SortedRows(node)
        if rows.are_in_any_order():
            yield rows


def sorts_in_one_order(graph: Graph, others: Sequence[SortedRows]) -> list[Node]:
    """Sorts beside `others` whose groups grouped products take: the order of their rows may be of account."""
    free = {rows.sort for rows in others}
    return [sort for sort, _ in sorts_of_groups(graph) if sort not in free]


def sorts_of_groups(graph: Graph) -> list[tuple[Node, int]]:
    """Sorts whose groups grouped products take, and the number of groups; 0 where that is not known."""
    ends = {n for node in graph.nodes if str(node.target) in _PRODUCTS for n in node.all_input_nodes}
    return [(n, _places(operands(n)[0])) for n in graph.nodes if _sorts_rows(n) and not ends.isdisjoint(_vectors(n))]


def _vectors(sort: Node) -> set[Node]:
    """The positions and counts that are computed of a sort, or of what it sorts."""
    keys = _source(node_at(sort, 0))
    starts = [sort] if any(map(_sorts_rows, keys.all_input_nodes)) else [sort, keys]
    return reached(starts, lambda node: node.users, lambda node: all(len(t.shape) < 2 for t in meta.tensors(node) if t))


def with_shared_rows(graph: TrainGraph, decisions: Mapping[str, Decision], mesh: Mesh, counted: bool) -> TrainGraph:
    """`graph` as decisions are about it: some ranks sort their own rows, or those of their own groups first. `counted`:
    the host counts rows that are sent.
    """
    shared = _shared(decisions, graph)

    def apart(rows: SortedRows) -> Apart:
        """An axis along which matrices are cut, and all rows are not there."""
        first = next((node for node, matrices in rows.products.items() if matrices is not None), rows.sort)
        takes = decisions[first.name].operands if first.name in decisions else ()
        along = takes[1].dims[0] if len(takes) > 1 and takes[1].dims and rows.may_be_sent else ()
        axis = shared.get(rows.sort.name, "")
        if axis or not along:
            return axis, "gathered", ""
        averages = any(f"{node.name}_mean" in decisions for node in rows.gradients)
        own = ("mean" if averages else "sum") if any(along[0] in layout.varies for layout in takes[:1]) else ""
        return along[0], "counted" if counted else "bounded", own

    return with_rows_in_any_order(graph, apart, mesh) if shared else graph


def shares_rows(decisions: Mapping[str, Decision], graph: TrainGraph) -> bool:
    """Whether decisions are about `with_rows_in_any_order`: some ranks have their own rows, or groups."""
    return bool(_shared(decisions, graph))


def _shared(decisions: Mapping[str, Decision], graph: TrainGraph) -> dict[str, str]:
    """Sorts of which ranks have pieces, or results that differ along an axis where the operand does not; the axis."""
    sorts = {
        n.name: decisions.get(n.name)
        for n in graph.graph.nodes
        if _sorts_rows(n) or meta.rows(n) or str(n.target) in _PRODUCTS
    }
    known = {name: at for name, at in sorts.items() if at is not None and at.operands and at.outputs}
    own = [
        name
        for name, at in known.items()
        if any(axis in o.shard_axes() for axis in at.operands[0].varies for o in at.operands)
    ]
    axes = {name: {*at.outputs[0].varies}.difference(*(o.varies for o in at.operands)) for name, at in known.items()}
    shared = [name for name, at in known.items() if axes[name] or any(at.operands[0].dims[:1])]
    return {name: min(axes[name], default="") for name in (*shared, *own)}


def states_along(apart: meta.Along, have: Sequence[AxisState]) -> tuple[list[AxisState], list[AxisState]]:
    """States of operands and results of a call along the axis whose ranks have groups. Rows of a rank stay those that
    they are, in as many blocks.
    """
    takes = [want or (at if at.kind == "S" else sharded_along(0)) for want, at in zip(apart[1], have, strict=True)]
    return takes, [want or sharded_along(0, takes[0].blocks) for want in apart[2]]


def check_rows(graph: TrainGraph, decisions: Mapping[str, Decision]) -> None:
    """Raise PlanError if not all ops on the rows of a sort have the same pieces of them."""
    pieces = dict[str, tuple[Any, ...]]()
    for node in graph.graph.nodes if any(map(meta.rows, graph.graph.nodes)) else ():
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


def _source(keys: Node) -> Node:
    """What keys are views and copies of."""
    views = packet_name(keys.target) in ("view", "_unsafe_view", "reshape", "clone", "_to_copy")
    return _source(node_at(keys, 0)) if views and meta.one_tensor(keys).dtype.itemsize >= 4 else keys


@dataclass
class SortedRows:
    """The values of a step that have rows in the order of `sort`.

    `dims`: the dim of rows of each output. `index`: positions before the sort, divided by a number; `inverse`: those
    after it. `groups`: the sorted keys, or the sort, where the step does not read them; `counts` of them by group;
    `numbers` of groups. `sums`: ops that sum over rows, with the operands that are zero for rows that do not count;
    none where that is not known. `constants`: what is made of shapes. `products`: what multiplies rows, with the
    matrices of groups that it reads. `arrive`: rows in the order of the sort, made of others; `leave`: what reads such
    rows to make others, with the rows. Between, `sized` are calls that are told how many there are, and how they are
    called without; `fixed`: some call has to be told.
    """

    sort: Node
    dims: dict[Node, tuple[int | None, ...]] = field(default_factory=dict[Node, "tuple[int | None, ...]"])
    index: dict[Node, int] = field(default_factory=dict[Node, int])
    inverse: set[Node] = field(default_factory=set[Node])
    groups: list[Node] = field(default_factory=list[Node])
    sums: dict[Node, tuple[Node, ...]] = field(default_factory=dict[Node, tuple[Node, ...]])
    products: dict[Node, Node | None] = field(default_factory=dict[Node, "Node | None"])
    counts: set[Node] = field(default_factory=set[Node])
    numbers: set[int] = field(default_factory=set[int])
    constants: list[Node] = field(default_factory=list[Node])
    chosen: dict[Node, Node] = field(default_factory=dict[Node, Node])
    calls: dict[Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict[Node, "tuple[Any, tuple[Any, ...]]"])
    sized: dict[Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict[Node, "tuple[Any, tuple[Any, ...]]"])
    arrive: list[Node] = field(default_factory=list[Node])
    leave: dict[Node, Node] = field(default_factory=dict[Node, Node])
    fixed: bool = False

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
        return next(iter(self.numbers))

    @property
    def have_groups_apart(self) -> bool:
        """Whether ranks may have groups: every row is of one of them, and sums can do without rows."""
        sums = all(rows and self.groups[0] < node for node, rows in self.sums.items())
        return sums and len(self.numbers) == 1 and _places(node_at(self.sort, 0)) <= self.number

    @property
    def may_be_sent(self) -> bool:
        """Whether rows may be sent to the ranks of their groups: all ops between are told no number of rows."""
        early = any(user < self.groups[0] for node in self.arrive for user in node.users)
        at_once = {*self.arrive, *self.groups}.intersection(self.leave.values())
        rules = ((n, find_rule(n)) for n in self.constants)
        like = (n for n, rule in rules if rule and any(i in g.operands for g in rule.groups for i in rule.by_shape))
        written = any(user not in self.calls for n in like for user in n.users)
        return self.have_groups_apart and not (self.fixed or early or at_once or written)

    @property
    def sent_bytes(self) -> int:
        """Bytes of all rows that are sent, there and back."""
        return sum(int(meta.size_bytes(x)) for x in {*self.arrive, *self.leave.values()}.difference(self.groups))

    def share(self, come: str, ranks: int) -> int:
        """How many times the rows that a rank multiplies it has, where groups are of one size."""
        apart = self._apart()
        most = ranks * most_rows(apart, apart, self.number, ranks) // apart
        return {"gathered": ranks, "counted": 1, "bounded": most}[come]

    @property
    def gradients(self) -> list[Node]:
        """The gradients of the matrices of groups."""
        backs = [n for node in self.products if str(node.target) == BACKWARD for n in node.users]
        return [n for n in (*self.products, *backs) if self.dims.get(n) is None and len(meta.tensors(n)) == 1]

    def rewrite(self, axis: str, come: str, own: str, mesh: Mesh) -> None:
        """Give ops the functions that have rules for own rows, and note which dims are rows; along `axis`, if any, for
        ranks that have groups, to which rows `come`, of batches of their `own` or of one.
        """
        sort, graph = self.sort, self.sort.graph
        if sort in self.groups:
            with graph.inserting_after(sort):
                keys = add_node(graph, "call_function", _torch.GETITEM, (sort, 0), {}, f"{sort.name}_keys")
            meta.copy(node_at(sort, 0), keys)
            self.groups, self.dims[keys] = [keys], (0,)
            self.calls = {n: (op, tuple(keys if a is sort else a for a in of)) for n, (op, of) in self.calls.items()}
        ranks, axes = (mesh.axis_size(axis), [axis]) if axis else (1, [])
        sent, share, gradients = come != "gathered", self.share(come, ranks), self.gradients
        first, count = Extent(self.number, ((axis, ranks),), start=True), extent(self.number, axes, mesh)
        if axis:
            for node in self.products:
                target = product_of_groups(node.target, self.number, share)
                self.calls[node] = target, (first, count, *self.calls[node][1])
            self.calls |= self.sized if sent else {}
        if axis and not sent:
            self.calls[self.sort] = groups_first(self.sort.target, self.number), (first, *self.sort.args)
        for node, (target, args) in self.calls.items():
            node.target, node.args = target, args
            node.kwargs = {} if target in (sum_of_rows, inverse_rows) else node.kwargs
            meta.set_known_rule(node, None)
        for node, rows in self.sums.items() if axis and come != "counted" else ():
            for x in rows if not (sent and node in self.leave) else ():
                self.chosen[x] = self.chosen.get(x) or self._chosen(x, node, first, count)
                node.replace_input_with(x, self.chosen[x])
        rest = first, count, self.number, axis, self._apart() if come == "bounded" else 0
        exchanges = self._send(rest) if sent else []
        noted = {**dict.fromkeys((*self.calls, *self.groups, *self.sums), (None,)), **self.dims}
        noted |= dict.fromkeys((*self.index, *self.inverse), (0,))
        for node, dims in noted.items():
            meta.set_rows(node, (self.sort.name, dims))
        if sent:
            cut, rows = sharded_along(0), {*self.dims, node_at(self.sort, 0)}
            state = VARIES if own else None
            for node in (*self.products, *(() if own else (self.sort, *exchanges))):
                takes = tuple(state if n in rows else cut for n in operands(node))
                dims = self.dims.get(node, ((0, 0) if node is self.sort else (None,))[: len(meta.tensors(node))])
                meta.set_along(node, (axis, takes, tuple(cut if d is None else state for d in dims)))
            for node in gradients if own == "mean" else ():
                self._divide(node, ranks)
        elif axis:
            self._note_states(axis)

    def _divide(self, x: Node, ranks: int) -> None:
        """Let a sum over the rows of all ranks be an average of theirs."""
        with self.sort.graph.inserting_after(x):
            new = add_node(self.sort.graph, "call_function", aten.div.Scalar, (x, ranks), {}, f"{x.name}_mean")
        meta.copy(x, new)
        meta.set_along(new, None)
        meta.set_rows(new, None)
        x.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _apart(self) -> int:
        """How many rows, one after the other before the sort, have different groups: those that topk chose at once."""
        keys = _source(node_at(self.sort, 0))
        source = node_at(keys, 0) if _torch.is_getitem(keys.target) else keys
        shape = meta.one_tensor(keys).shape
        last = packet_name(source.target) == "topk" and source.args[2:3] in ((), (-1,), (len(shape) - 1,))
        return shape[-1] if last and shape else 1

    def _send(self, rest: tuple[Any, ...]) -> list[Node]:
        """Send rows that arrive to the ranks of their groups, and back those that leave."""
        graph, exchanges, groups = self.sort.graph, list[Node](), self.groups[0]
        keys = (n for n in self.groups if n in self.arrive or _torch.is_getitem(n.target))

        def exchange(target: Any, x: Node, *read: Any) -> Node:
            new = add_node(graph, "call_function", target, (*read, *rest), {}, None)
            meta.copy(x, new)
            self.dims[new] = (0,)
            exchanges.append(new)
            return new

        for x in dict.fromkeys((*keys, *self.arrive)):
            target, read = (received_groups, [groups]) if x in self.groups else (sent_rows, [False, x, groups])
            with graph.inserting_after(max(x, groups)):
                new = exchange(target, x, *read)
            x.replace_all_uses_with(new, delete_user_cb=lambda user: user not in exchanges)
        for x in dict.fromkeys(self.leave.values()):
            with graph.inserting_before(min(reader for reader, rows in self.leave.items() if rows is x)):
                new = exchange(sent_rows, x, True, x, groups)
            for reader in (reader for reader, rows in self.leave.items() if rows is x):
                reader.replace_input_with(x, new)
        return exchanges

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
            return all((n is node or n.args[1] == 1) and self._inverts(n, first) for n in positions)
        if str(node.target) in _PRODUCTS:
            return len(node.args) > 2 and self._multiplies(node)
        if first in self.counts and name == "cumsum":
            return True
        if first and _source(first) in self.groups and self._counted(node):
            self.counts.add(node)
        return self._treats_alike(node)

    def _counted(self, counts: Node) -> int:
        """The number of groups by which `counts` counts keys; 0: it does not. From 0 to 0 is a range by the values."""
        if packet_name(counts.target) != "histc" or len(counts.args) < 4:
            return 0
        number, least, most = cast("tuple[int, Any, Any]", counts.args[1:4])
        below = 0 < _places(node_at(self.sort, 0)) <= number
        return number if least == 0 < most and (most == number - 1 or (most == number and below)) else 0

    def _number(self, ends: Node) -> int:
        """How many groups end at `ends`, which count the keys of this sort, before it or behind it; 0: others."""
        total = _source(ends)
        counts = _source(node_at(total, 0)) if packet_name(total.target) == "cumsum" else total
        number = 0 if counts is total else self._counted(counts)
        before = [_source(node_at(self.sort, 0))] if packet_name(self.sort.target) == "sort" else []
        return number if number and _source(node_at(counts, 0)) in self.groups + before else 0

    def _known(self, node: object) -> bool:
        return node in self.dims or node in self.index or node in self.inverse

    def _is_rows(self, node: object, dim: int = 0) -> bool:
        return isinstance(node, Node) and self.dims.get(node) == (dim,)

    def _reads(self, node: Node, place: Node) -> bool:
        """x[index] makes sorted rows, and rows[inverse] those before the sort."""
        source = node_at(node, 0)
        self.calls[node] = own_rows(node.target), node.args
        if place in self.inverse:
            self.sums[node], self.leave[node] = (source,), source
            return self._is_rows(source)
        self.dims[node] = (0,)
        self.arrive.append(node)
        self.groups += [node] if source is node_at(self.sort, 0) else []
        return not self._known(source) and meta.one_tensor(source).shape[0] * self.index[place] == self.count

    def _writes(self, node: Node, place: Node) -> bool:
        """Gradients of both, sums into zeros; and the inverse of the permutation."""
        into, values, adds = node_at(node, 0), node_at(node, 2), len(node.args) > 3 and node.args[3]
        shape, written = meta.one_tensor(into).shape, meta.one_tensor(values).shape
        if place in self.index and self.index[place] == 1 and values.target is aten.arange.default and not adds:
            return shape == values.args == (self.count,) and self._inverts(node, place)
        self.calls[node] = sum_of_rows, (place, values, self.index.get(place, 1))
        zeros = constant_made(into) == 0 and not self._known(into)
        zeros = zeros and written == (self.count, *shape[1:]) and shape[0] * self.index.get(place, 1) == self.count
        if place in self.inverse:
            self.dims[node] = (0,)
            self.arrive.append(node)
            return zeros and not self._known(values)
        self.sums[node], self.leave[node] = (values,), values
        return zeros and self._is_rows(values) and bool(adds or self.index[place] == 1)

    def _inverts(self, node: Node, place: Node) -> bool:
        self.calls[node] = inverse_rows, (place,)
        self.inverse.add(node)
        return True

    def _multiplies(self, node: Node) -> bool:
        """Each row by the matrix of its group; the gradient of the matrices is a sum over rows."""
        first, other, ends, *rest = node.args
        number = self._number(cast(Node, ends))
        matrices = meta.one_tensor(cast(Node, other)).shape
        if not number or node.kwargs.get("bias") is not None:
            return False
        self.numbers.add(number)
        self.groups = self.groups or [self.sort]
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
                local = {rule.local[factor]} if factor in rule.local else set[Any]()
                self.fixed |= constant or factor in group.filled or not local <= COUNT_OPERANDS
                if not constant and placed.get(i) != group.operands[i].index(factor):
                    return False
            for number, term in group.outputs.items():
                if factor in term:
                    dims[number] = term.index(factor)
                elif number not in group.opaque:
                    added = [p.operands for p in group.partial if "sum" in p.ops and not p.operands.isdisjoint(placed)]
                    known = (
                        summed != () and added and all(i in placed or constant_made(inputs[i]) == 0 for i in added[0])
                    )
                    known = known and group.reduces.get(factor) == "sum"
                    summed = tuple(inputs[i] for i in added[0] if i in placed) if known else ()
            if factor in rule.local and any(factor in term for term in group.outputs.values()):
                return False
        kept = [(tensor, d) for tensor, d in zip(meta.tensors(node), dims, strict=True) if d is not None]
        if rows or any(tensor is None or tensor.shape[d] != self.count for tensor, d in kept):
            return False
        self._note(node, tuple(dims))
        if kept and rule.sizes:
            self._note_sizes(node, rule)
        if not any(self._known(n) for n in inputs.values()):
            self.constants.append(node)
        if summed is not None and node not in self.counts:
            self.sums[node] = summed
        return True

    def _note_sizes(self, node: Node, rule: BoundRule) -> None:
        """Note how an op whose argument is the shape of its result is called with the rows that a rank has."""
        x, (dim, *others), (name, *names) = node_at(node, 0), self.dims[node], rule.sizes
        op, args, place = cast(Any, node.target), node.args, 1
        if rule.instead:
            op, args = aten.reshape.default, (x, list(meta.one_tensor(node).shape))
        elif _torch.is_op(op):
            place = _torch.position_of(op, name)
        rows = self.dims.get(x, (None,))[0]
        if names or others or rule.sizes[name] != "out0" or rows is None or not place or place >= len(args):
            self.fixed = True
        else:
            self.sized[node] = with_its_rows(op, place, dim, rows), args

    def _note(self, node: Node, dims: tuple[int | None, ...]) -> None:
        """Note the dims of rows of what a node makes, or that it has none: a sum over rows."""
        if any(d is not None for d in dims):
            self.dims[node] = dims
