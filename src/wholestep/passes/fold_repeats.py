"""Folds a loop that the user wrote: micro-batches inside the step, with a backward each, become one body.

The gradients of a parameter that several backwards sum say which values belong together: the first to the first piece,
and so on. From there operands are compared, node by node. What is equal in all pieces is the body; what differs, and
does not depend on a piece, is what the body is given. Numbers are the same bits: sums are added in the same order, and
random numbers are drawn in the same order.

The last piece stays as it is, so that its gradients are sent while it runs. It may be smaller than the others. The size
of the program is that of two pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.meta import contiguous
from ..graph.nodes import add_call, communicates, copy_node, copy_nodes, drop_dead, node_at, operands, reached
from ..graph.storage import shared_operand
from ..mesh import TIME
from ..partition.accumulators import add_up, keep_piece, kept_piece, of_piece
from ..partition.fold_pieces import is_fresh
from ..partition.loop_body import LoopBody
from ..partition.rank_ops import draws_numbers

_ADD = torch.ops.aten.add.Tensor
Row = tuple[Node, ...]
"""One node of each piece, in order: equal ones, or the different values that these are given."""


@dataclass(frozen=True)
class FoldRepeats:
    """Folds equal pieces with a backward each into a loop. Bitwise the same.

    Example:
        >>> local = FoldRepeats()(wholestep.partition(graph, plan))
    """

    must_precede = ("SizeBuckets", "Reinplace", "FitMemory")
    keeps_nothing = True

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """`local` with a loop; as it is where nothing repeats, or `why_not` says why."""
        repeats = _find(local)
        return repeats.folded() if isinstance(repeats, _Repeats) else local


def why_not(local: LocalGraph) -> str:
    """Why the pieces of a program with several backwards are not folded; empty where they are, or there are none."""
    reason = _find(local)
    return reason if isinstance(reason, str) else ""


def said(before: LocalGraph, after: LocalGraph) -> str:
    """What became of a loop of the user, of which passes have made `after`; empty where there is none."""
    repeats = _find(before)
    if isinstance(repeats, str):
        return repeats and f"the loop of the step is not folded: {repeats}"
    if FoldRepeats.__name__ in after.passes:
        nodes = len({*repeats.rows.values()})
        return f"the first {repeats.count} pieces of the loop of the step are one body of {nodes} nodes"
    return "the loop of the step is not folded: a budget of memory, or a backend that runs no loops"


class _DifferError(Exception):
    """Pieces differ, or depend on each other."""


def _find(local: LocalGraph) -> _Repeats | str:
    sums = _sums(local.graph)
    of_gradients = [total for total in sums if meta.sums_gradients(total.adds[-1])]
    if not of_gradients or local.stage_axis or any(map(loop_of, local.graph.nodes)):
        return ""
    counts = Counter(len(total.terms) for total in of_gradients)
    if len(counts) > 1:
        parts = " and ".join(map(str, sorted(counts)))
        return (
            f"some gradients are summed over {parts} values: pieces use different parameters, or add to what was there"
        )
    (count,) = counts
    if count < 3:
        return f"{count} pieces are no more than a body and the last one"
    repeats = _Repeats(local, count - 1, {total.terms[:-1]: total for total in sums if len(total.terms) == count})
    try:
        for total in of_gradients:
            repeats.compare(total.terms[:-1])
        repeats.extend()
        repeats.check()
    except _DifferError as error:
        return str(error)
    return repeats


@dataclass(frozen=True)
class _Sum:
    """`terms` that are added one by one in `adds`; `start`: the first add adds nothing to the first term."""

    terms: Row
    adds: Row
    start: bool


def _sums(graph: Graph) -> list[_Sum]:
    """Sums whose intermediate values nothing else reads."""
    adds = [n for n in graph.nodes if n.target is _ADD and not n.kwargs and isinstance(n.args[0], Node)]
    adds = [n for n in adds if isinstance(n.args[1], Node) or n.args[1] == 0]
    flags = {n: meta.sums_gradients(n) for n in adds}  # a term may be a sum too: of the uses of a tied parameter
    goes_on = {
        n: flags.get(node_at(n, 0)) is flags[n] and len(node_at(n, 0).users) == 1 and isinstance(n.args[1], Node)
        for n in adds
    }
    inner = {node_at(n, 0) for n in adds if goes_on[n]}
    sums = list[_Sum]()
    for node in adds:
        if node in inner:
            continue
        chain = [node]
        while goes_on[chain[-1]]:
            chain.append(node_at(chain[-1], 0))
        chain.reverse()
        terms = [node_at(chain[0], 0), *(n.args[1] for n in chain if isinstance(n.args[1], Node))]
        sums.append(_Sum(tuple(terms), tuple(chain), not isinstance(chain[0].args[1], Node)))
    return sums


@dataclass
class _Repeats:
    """The first `count` pieces of a program, all but the last. `rows`: of equal nodes, by the node of each piece.
    `differing`: of values that differ. `sums`: by their terms but the last.
    """

    local: LocalGraph
    count: int
    sums: Mapping[Row, _Sum]
    rows: dict[Node, Row] = field(default_factory=dict[Node, Row])
    differing: dict[Row, None] = field(default_factory=dict[Row, None])
    shared: dict[Node, None] = field(default_factory=dict[Node, None])

    def __post_init__(self) -> None:
        self.nodes = list(self.local.graph.nodes)
        self.slices = set[Node]()  # of what the program is given: they need no memory, and differ in many ways
        for node in self.nodes:
            source = node_at(node, 0) if _torch.is_getitem(node.target) else shared_operand(node)
            if node.op == "placeholder" or source in self.slices:
                self.slices.add(node)

    def piece(self, node: Node) -> int:
        """Which piece a node in a row belongs to."""
        return self.rows[node].index(node)

    # -- what is equal ---------------------------------------------------------------------------------
    def compare(self, row: Row) -> None:
        """Find what makes the values of a row: equal nodes, or values that pieces are given."""
        todo = [row]
        while todo:
            row = todo.pop()
            if len(set(row)) == 1:
                self.shared[row[0]] = None
            elif any(self.rows.get(node, row) != row for node in row):
                raise self._differ(row, "is used by pieces in different ways")
            elif row in self.differing or row[0] in self.rows:
                continue
            elif len(set(row)) == len(row) and not self.slices.issuperset(row) and _alike(row):
                self.rows |= dict.fromkeys(row, row)
                todo += zip(*map(operands, row), strict=True)
            elif len({meta.tensor(node) for node in row}) == 1 and meta.tensor(row[0]) is not None:
                self.differing[row] = None
            else:
                raise self._differ(row, "differs between pieces")

    def extend(self) -> None:
        """Find equal nodes that only read pieces: what the step returns of each, say."""
        while True:
            late, groups = self.late(), dict[Any, list[list[Node]]]()
            for node in self.nodes:
                reads = operands(node) if node.op == "call_function" and node not in self.rows else []
                pieces = {self.piece(n) for n in reads if n in self.rows}
                if len(pieces) != 1 or any(n in late for n in reads) or communicates(node):
                    continue
                args = map_arg((node.args, node.kwargs), lambda n: self.rows[n][0] if n in self.rows else n)
                key = node.target, repr(args), meta.tensors(node)
                groups.setdefault(key, [[] for _ in range(self.count)])[pieces.pop()].append(node)
            equal = [parts for parts in groups.values() if len({len(part) for part in parts}) == 1]
            new_rows = [row for parts in equal for row in zip(*parts, strict=True)]
            if not new_rows:
                return
            for row in new_rows:
                self.rows |= dict.fromkeys(row, row)
                self.shared |= dict.fromkeys(n for n in operands(row[0]) if n not in self.rows)

    def late(self) -> set[Node]:
        """Nodes outside of pieces that depend on one."""
        readers = (user for node in self.rows for user in node.users)
        return reached(readers, attrgetter("users"), lambda node: node not in self.rows)

    def check(self) -> None:
        """Raise unless pieces are calls that depend on nothing of each other, send nothing, and draw one after the
        other.
        """
        if not self.rows:  # the first terms of the sums are no calls: gradients of an earlier step
            raise _DifferError("gradients are added to what was there")
        late = self.late()
        for row in (*self.differing, *((node,) for node in self.shared)):
            if any(node in late or node in self.rows for node in row):
                raise self._differ(row, "differs between pieces, or one piece depends on it and another one makes it")
        for row in dict.fromkeys(self.rows.values()):
            if communicates(row[0]):
                raise self._differ(row, "communicates for each piece")
        before = [*filter(draws_numbers, self.nodes)]
        if before != [*filter(draws_numbers, self.order())]:
            raise self._differ(tuple(before), "draws random numbers between pieces")

    def order(self) -> Iterator[Node]:
        """All nodes: what pieces need, piece after piece, what is left."""
        before, after = self.around()
        yield from before
        for number in range(self.count):
            yield from (node for node in self.nodes if node in self.rows and self.piece(node) == number)
        yield from after

    def around(self) -> tuple[list[Node], list[Node]]:
        """Nodes that come before the first piece, and after the pieces."""
        needed = reached([*self.shared, *(n for row in self.differing for n in row)])
        first = next(i for i, n in enumerate(self.nodes) if n in self.rows)
        before = [n for i, n in enumerate(self.nodes) if n.op == "placeholder" or n in needed or i < first]
        others = {*before, *self.rows}
        return before, [n for n in self.nodes if n not in others]

    def _differ(self, row: Row, how: str) -> _DifferError:
        where = meta.source_line(row[0])
        return _DifferError(f"%{row[0].name} {how}{f' ({where})' if where else ''}")

    # -- the loop --------------------------------------------------------------------------------------
    def folded(self) -> LocalGraph:
        """The program with a loop."""
        new, at, body = Graph(), dict[Node, Node](), LoopBody()
        before, after = self.around()
        copy_nodes(before, new, at)
        inside = dict[Row, Node]()
        for row in self.differing:
            tensor, values = meta.one_tensor(row[0]), [body.take(at[node]) for node in row]
            name = f"{row[0].name}_piece"
            inside[row] = add_call(body.graph, kept_piece, (values, TIME), tensor, row[0], name)
        for node in (n for n in self.nodes if n in self.rows and self.piece(n) == 0):
            nodes = self.rows[node]
            reads = iter([inside.get(row) or body.take(at[row[0]]) for row in zip(*map(operands, nodes), strict=True)])
            inside[nodes] = copy_node(node, body.graph, lambda _, reads=reads: next(reads))
        ends = self._ends(body, inside)
        skipped = {add for total in self.sums.values() if total.adds[-2] in ends for add in total.adds[:-1]}
        for end, item in zip(ends, body.write_into(new, "loop", self.count), strict=True):
            if isinstance(end, Node):
                at[end] = item
            else:
                numbered = enumerate(end)
                at |= {n: add_call(new, of_piece, (item, i), meta.one_tensor(n), n, n.name) for i, n in numbered}
        copy_nodes((node for node in after if node not in skipped), new, at)
        drop_dead(new)
        return replace(self.local, graph=new)

    def _ends(self, body: LoopBody, inside: Mapping[Row, Node]) -> list[Node | Row]:
        """Accumulate what is read of pieces: the last node of a sum, or values that are kept, a row."""
        ends = list[Node | Row]()
        for row in dict.fromkeys(self.rows.values()):
            outer = [[u for u in node.users if u not in self.rows] for node in row]
            if not any(outer):
                continue
            value, tensor = inside[row], meta.one_tensor(row[0])
            total = self.sums.get(row)
            if total is not None and outer == [[add] for add in _adds_of(total)[:-1]]:
                owned = is_fresh(row[0]) and len(row[0].users) == 1
                body.accumulate(row[0].name, row[0], tensor, add_up, value, "sum", owned)
                ends.append(total.adds[-2])
            else:
                stacked = contiguous((self.count, *tensor.shape), tensor)
                body.accumulate(row[0].name, row[0], stacked, keep_piece, value, is_fresh(row[0]))
                ends.append(row)
        return ends


def _adds_of(total: _Sum) -> Row:
    """The add that reads each term."""
    return total.adds if total.start else (total.adds[0], *total.adds)


def _alike(row: Row) -> bool:
    """True for calls that differ in operands alone."""
    first = row[0]
    if first.op != "call_function":
        return False
    marks = [_written(node) for node in row]
    return all(mark == marks[0] for mark in marks)


def _written(node: Node) -> tuple[Any, ...]:
    """A call without its operands."""
    args = _shape_of((node.args, tuple(node.kwargs.items())))
    return node.op, node.target, args, meta.tensors(node), meta.is_backward(node), meta.is_strided(node)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Node):
        return Node
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, cast(Sequence[Any], value)))
    return type(value), value
