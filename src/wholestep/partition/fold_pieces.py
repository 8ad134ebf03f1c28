"""Folds the axis `time` of a partitioned program into loops: one rank goes through the pieces of its batch.

Partitioning has treated the pieces as ranks. Here a value that differs between pieces belongs to a loop, one that does
not is computed once; a collective along `time` becomes an accumulator. What needs the result of such a collective comes
in a later loop, or after the last one. Everything runs as late as it may, so that a first loop that only counts tokens
does not take the forward away from its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.meta import contiguous
from ..graph.nodes import add_call, add_empty, copy_node, drop_dead, ends_of, is_collective, is_wait, node_at
from ..graph.op_kinds import CHEAP, collective_kind, is_pointwise
from ..graph.storage import most_at_once, shared_operand
from ..graph.text import human
from ..layout import REPLICATED, Extent
from ..mesh import TIME
from .accumulators import LoopBody, add_up, keep_piece, kept_piece, put_piece
from .rank_ops import RANK_DEPENDENT, draws_numbers, pad_to, take_chunk
from .rank_ops import contiguous as contiguous_copy
from .rows_by_rank import numbers_of, readers_of

aten = torch.ops.aten


def fold_pieces(local: LocalGraph, once: Mapping[Node, Collection[Node]], regathered: Collection[Node]) -> LocalGraph:
    """Return the program of a rank for a program of a rank and a piece. `once`: calls whose results are the same for
    every piece, as the plan says, with the operands of which they read only the shape. `regathered`: gathers that are
    repeated for each piece rather than kept for all.

    Raises:
        PlanError: more than half of the activations would be kept for all pieces: sums over the whole batch split the
            loop. Or a value has to be exchanged between pieces in a way that has no form as a loop.
    """
    fold = _Fold(local, once, regathered)
    folded = fold.run()
    _check_memory(folded, fold.pieces)
    return folded


@dataclass
class _Fold:
    """`stage`: of a node that runs once, how many loops run before it; of others, the number of the loop. `batch`: the
    dim that is cut, by placeholder. `looped`: nodes that differ between pieces. `keeps`: those that a later loop reads.
    `sunk`: gathers that are repeated for each piece.
    """

    local: LocalGraph
    once: Mapping[Node, Collection[Node]]
    regathered: Collection[Node]
    new: Graph = field(default_factory=Graph)
    at: dict[Node, Node] = field(default_factory=dict[Node, Node])
    stage: dict[Node, int] = field(default_factory=dict[Node, int])

    def __post_init__(self) -> None:
        self.nodes = [n for n in self.local.graph.nodes if n.op == "call_function"]
        self.pieces = self.local.mesh.pieces
        inputs = zip(self.local.placeholders(), self.local.layouts, strict=True)
        self.batch = {node: layout.state(TIME).dim for (_, node), layout in inputs if layout.state(TIME) != REPLICATED}
        self.looped, self.sunk = set(self.batch), set[Node]()
        self._find_looped()
        self.loops = self._earliest()
        self._latest()
        self.keeps = self._kept()

    def run(self) -> LocalGraph:
        mesh = self.local.mesh.of_ranks
        layouts = tuple(layout.put(TIME, REPLICATED) for layout in self.local.layouts)
        for (spec, node), layout in zip(self.local.placeholders(), layouts, strict=True):
            self.at[node] = copy_node(node, self.new, self.at.__getitem__)
            if node in self.batch:
                shape = layout.local_shape(spec.meta.shape, mesh, mesh.coordinate(0))
                tensor = spec.meta if shape == spec.meta.shape else contiguous(shape, spec.meta)
                meta.set_tensors(self.at[node], (tensor,))
        for stage in range(self.loops + 1):
            nodes = [node for node in self.nodes if self.stage[node] == stage]
            for node in nodes:
                if not (node in self.at or self._in_loop(node) or self._is_result(node)):
                    self.at[node] = copy_node(node, self.new, self._read)
            if stage < self.loops:
                _Body(self, stage).write(list(filter(self._in_loop, nodes)))
        output = next(iter(reversed(self.local.graph.nodes)))
        self.new.output(map_arg(output.args[0], self.at.__getitem__))
        drop_dead(self.new)
        return replace(self.local, graph=self.new, mesh=mesh, layouts=layouts)

    def _read(self, node: Node) -> Node:
        """A value in the outer graph; memory of its shape for one that is not there: only the shape is read."""
        if node in self.at and node not in self.looped:
            return self.at[node]
        if node.op == "call_function" and not node.all_input_nodes:
            self.at[node] = copy_node(node, self.new, self._read)
            return self.at[node]
        return add_empty(self.new, meta.one_tensor(node), node, "shape")

    def _operands(self, node: Node) -> list[Node]:
        """The nodes whose values `node` reads."""
        by_shape = self.once.get(node, ())
        return [operand for operand in node.all_input_nodes if operand not in by_shape]

    def crosses(self, node: Node) -> bool:
        """True for a collective along `time`."""
        return is_collective(node) and node.args[-1] == TIME

    def _is_result(self, node: Node) -> bool:
        return is_wait(node) and self.crosses(node_at(node, 0))

    def _in_loop(self, node: Node) -> bool:
        return node in self.looped or node in self.sunk or self.crosses(node)

    def _find_looped(self) -> None:
        """Find the nodes whose values differ between pieces."""
        for node in self.nodes:
            if self.crosses(node) or self._is_result(node):
                continue
            differs = node.target in RANK_DEPENDENT and node.args[-1] == TIME
            differs = differs or _has_time((node.args, tuple(node.kwargs.values())))
            differs = differs or not self.looped.isdisjoint(self._operands(node))
            if differs and node in self.once:
                text = f"%{node.name} is the same for all micro-batches, but reads what differs between them"
                raise PlanError(text, "a rule that says so", "leave out MicroBatches", meta.source_line(node))
            if differs:
                self.looped.add(node)

    def _earliest(self) -> int:
        """The number of loops: the longest chain of values that are complete after a loop."""
        first = dict[Node, int]()
        for node in self.nodes:
            first[node] = max((first.get(operand, 0) for operand in self._operands(node)), default=0)
            if self._is_result(node):
                first[node] += 1
        self.first = first
        return max((first[n] + 1 for n in self.nodes if self.crosses(n)), default=0)

    def _latest(self) -> None:
        """Find the last stage in which each node may run. Random numbers are drawn in the order of the program."""
        drawn_by = self.loops
        for node in reversed(self.nodes):
            last = self.loops - 1 if self._in_loop(node) else self.loops
            for user in node.users:
                if user.op != "output" and node in self._operands(user):
                    last = min(last, self.stage[user] - (1 if self._is_result(user) else 0))
            if draws_numbers(node):
                last = drawn_by = min(last, drawn_by)
            if last < self.first[node]:
                problem = (
                    f"%{node.name} draws random numbers from a value of all micro-batches, and others follow before it"
                )
                raise PlanError(problem, "draws that need no loop", "leave out MicroBatches", meta.source_line(node))
            self.stage[node] = last
            if node in self.regathered and all(self._in_loop(u) and self.stage[u] == last for u in node.users):
                self.sunk.add(node)
        for node in self.nodes:
            if _torch.is_getitem(node.target):
                self.stage[node] = self.stage[node_at(node, 0)]

    def _kept(self) -> set[Node]:
        """Values of pieces that a later loop reads, but for those that are computed again from what it has anyway."""
        saved, again = set[Node](), set(self.batch)
        for node in self.nodes:
            if node not in self.looped:
                continue
            cheap = is_pointwise(node.target) or node.target in CHEAP or node.target in RANK_DEPENDENT
            cheap = cheap or node.target is numbers_of
            if cheap and all(operand in again or not self._in_loop(operand) for operand in node.all_input_nodes):
                again.add(node)
            elif any(user.op != "output" and self.stage[user] > self.stage[node] for user in readers_of(node)):
                saved.add(node)
                again.add(node)
        return saved

    def owned(self, node: Node) -> bool:
        """True if nothing but its one reader uses the memory of a value of a piece."""
        if node not in self.looped or node in self.batch or len(node.users) != 1:
            return False
        shared = None if _torch.is_getitem(node.target) else shared_operand(node)
        return is_fresh(node) if shared is None else self.owned(shared)


@dataclass
class _Body:
    """Writes one loop."""

    fold: _Fold
    stage: int
    body: LoopBody = field(default_factory=LoopBody)
    inside: dict[Node, Node] = field(default_factory=dict[Node, Node])

    def __post_init__(self) -> None:
        self.graph = self.body.graph

    def write(self, nodes: Sequence[Node]) -> None:
        """Write the loop whose nodes are `nodes`, in order."""
        for node in nodes:
            if self.fold.crosses(node):
                self._accumulate(node)
            elif node not in self.inside:
                self._copy(node)
            if node in self.fold.keeps:
                self._keep(node)
        items = self.body.write_into(self.fold.new, f"loop_{self.stage}", self.fold.pieces)
        self.fold.at |= {source: item for (_, _, source), item in zip(self.body.totals, items, strict=True)}

    def _copy(self, node: Node) -> Node:
        self.inside[node] = copy_node(node, self.graph, self._read)
        return self.inside[node]

    def _read(self, node: Node) -> Node:
        """A value in this body: computed here, kept by an earlier loop, computed again, or given from outside."""
        if node in self.inside:
            return self.inside[node]
        tensor = meta.tensor(node)
        if node not in self.fold.looped:
            self.inside[node] = self._take(node)
        elif node in self.fold.batch and tensor is not None:
            args = (self._take(node), self.fold.batch[node], self.fold.pieces, TIME)
            self.inside[node] = add_call(self.graph, take_chunk, args, tensor, node, f"{node.name}_piece")
            meta.set_strided(self.inside[node], meta.is_strided(node))
        elif node in self.fold.at and tensor is not None:
            self.inside[node] = add_call(
                self.graph, kept_piece, (self._take(node), TIME), tensor, node, f"{node.name}_kept"
            )
        else:
            self._copy(node)
        return self.inside[node]

    def _take(self, node: Node) -> Node:
        """A placeholder for a value of the outer graph."""
        return self.body.take(self.fold.at[node])

    def _accumulate(self, node: Node) -> None:
        """The accumulator that a collective along `time` becomes."""
        (result,) = node.users
        operand = node_at(node, 0)
        name = (node_at(operand, 0) if operand.target is contiguous_copy else operand).name
        value, tensor = self._read(operand), meta.one_tensor(result)
        kind, op = collective_kind(node.target), node.args[1]
        if kind == "all_reduce" and op in ("sum", "max", "min"):
            self.body.accumulate(name, result, tensor, add_up, value, op, self.fold.owned(operand))
        elif kind == "all_gather":
            self.body.accumulate(name, result, tensor, put_piece, value, self.fold.pieces, TIME)
        else:
            problem = f"%{node.name}: {kind} ({op}) between micro-batches"
            raise PlanError(problem, "sums, extremes and gathers", "leave out MicroBatches", meta.source_line(node))

    def _keep(self, node: Node) -> None:
        """Keep the value of every piece for a later loop."""
        tensor = meta.one_tensor(node)
        stacked = contiguous((self.fold.pieces, *tensor.shape), tensor)
        self.body.accumulate(node.name, node, stacked, keep_piece, self.inside[node], is_fresh(node))


def _check_memory(local: LocalGraph, pieces: int) -> None:
    """Raise PlanError if loops keep more for all pieces than they hold of the whole batch piece by piece."""
    loops = [(node, loop) for node in local.graph.nodes if (loop := loop_of(node))]
    loop_bytes = pieces * max((sum(s.size_bytes for s in most_at_once(loop.body)) for _, loop in loops), default=0)
    saved, readers = dict[Node, int](), dict[Node, Node]()
    for node, loop in loops:
        ends = ends_of(loop.body)
        for item in node.users:
            end = ends[cast(int, item.args[1])]
            if end.target is keep_piece or (end.target is put_piece and not _is_returned(item)):
                saved[end], readers[end] = meta.size_bytes(end), next(iter(item.users))
    if sum(saved.values()) <= loop_bytes:
        return
    largest = max(saved, key=saved.__getitem__)
    _refuse_whole_batch(largest, readers[largest], pieces)
    total, name, size = human(sum(saved.values())), node_at(largest, 1).name, human(saved[largest])
    raise PlanError(
        f"{pieces} micro-batches save too little memory: {total} of activations stay for all of them, and"
        f" {human(loop_bytes)} for one at a time; %{name} ({size}) waits for the whole batch",
        "at least half of the activations to be needed for one micro-batch at a time",
        "compute statistics and views that mix samples outside the model, or leave out MicroBatches",
        meta.source_line(largest),
    )


def _refuse_whole_batch(kept: Node, reader: Node, pieces: int) -> None:
    """Raise PlanError if what is kept for all pieces is the batch itself."""
    part = node_at(kept, 1)
    while part.target is pad_to:
        part = node_at(part, 0)
    if part.target is take_chunk and (batch := node_at(part, 0)).op == "placeholder":
        rows = meta.one_tensor(batch).shape[cast(int, part.args[1])]
        while not meta.source_line(reader) and reader.users:
            reader = next(iter(reader.users))
        problem = f"the step cuts or joins the {rows} rows of %{batch.name}; {pieces} micro-batches take a part each"
        cure = (
            f"give a number that divides {rows}" if rows % pieces else "cut in the step or by MicroBatches, not by both"
        )
        raise PlanError(problem, "rows that stay apart", f"{cure}; or leave out MicroBatches", meta.source_line(reader))


def _is_returned(node: Node) -> bool:
    """True if nothing but the caller reads a value."""
    return all(user.op == "output" or (shared_operand(user) is node and _is_returned(user)) for user in node.users)


def is_fresh(node: Node) -> bool:
    """True if the value is in memory that the node has made, or the op whose result it is."""
    if not _torch.is_getitem(node.target):
        return shared_operand(node) is None
    source = node_at(node, 0)
    return _torch.is_op(source.target) and shared_operand(source, meta.picked(node).start) is None


def _has_time(value: Any) -> bool:
    """True if a number in the arguments differs between pieces."""
    if isinstance(value, (list, tuple)):
        return any(_has_time(entry) for entry in cast(Sequence[Any], value))
    return isinstance(value, Extent) and any(axis == TIME for axis, _ in value.axes)
