"""Rewrites a step so that chosen saved tensors are rematerialized in the backward instead of kept for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node
from torch.fx.node import map_arg

from ..errors import GraphError
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import copy_with, drop_dead, operands
from .saved_tensors import SavedTensors


def rematerialized(saved: SavedTensors, names: Sequence[str]) -> LocalGraph:
    """A copy of the functional graph `saved.local` that rematerializes the saved values `names` (`SavedTensor.name`).

    Each is recomputed just before its first reader from tensors that are still alive; operands that are not alive are
    recomputed too. The same ops run on the same operands: bitwise the same. Raises GraphError if a name is not among
    `saved.candidates`.
    """
    if not names:
        return saved.local
    by_name = {value.name: value for value in saved.candidates}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        problem = f"{unknown[0]!r} is not kept for the backward, or cannot be rematerialized"
        needed = "values that the forward computes and the backward reads: no random numbers, no results of collectives"
        raise GraphError(problem, needed, f"one of {', '.join(list(by_name)[:5])}, ..." if by_name else "")
    graph, twins = copy_with(saved.local.graph)
    work = _Work(saved, {id(by_name[name].storage) for name in names}, twins)
    readers = {(at, segment) for name in names for segment, reads in by_name[name].reads.items() for at, _ in reads}
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for at, segment in sorted(readers):
        work.rewrite(calls[at], segment)
    drop_dead(graph)
    return replace(saved.local, graph=graph)


@dataclass
class _Work:
    """`twins`: the nodes of the copied graph, by the nodes of the graph that `saved` describes."""

    saved: SavedTensors
    dropped: set[int]
    twins: dict[Node, Node]
    copies: dict[tuple[Node, int], Node] = field(default_factory=dict[tuple[Node, int], Node])
    early: set[Node] = field(default_factory=set[Node])

    def __post_init__(self) -> None:
        self._origins = {new: old for old, new in self.twins.items()}

    def _origin(self, node: Node) -> Node:
        """The node of the graph that `saved` describes; a recomputed node is its own origin."""
        return self._origins.get(node, node)

    def rewrite(self, reader: Node, segment: int) -> None:
        """Let `reader` read recomputed tensors, computed just before it if no earlier reader needed them."""
        for operand in dict.fromkeys(operands(reader)):
            earlier = operand.op == "call_function" and self.saved.segment[self._origin(operand)] < segment
            if earlier and not self._is_alive(operand, segment):
                reader.replace_input_with(operand, self._recomputed(operand, segment, reader))

    def _recomputed(self, target: Node, segment: int, reader: Node) -> Node:
        todo = [(target, False)]
        while todo:
            node, ready = todo.pop()
            if self._available(node, segment, reader) is not None:
                continue
            if ready:
                self._copy(node, segment, reader)
            else:
                todo.append((node, True))
                todo += [(operand, False) for operand in operands(node)]
        recomputed = self._available(target, segment, reader)
        assert recomputed is not None, "recomputed by now"
        return recomputed

    def _available(self, node: Node, segment: int, reader: Node) -> Node | None:
        """The node that holds the value of `node` in `segment`; None where it must be recomputed."""
        if node.op != "call_function" or (node, segment) in self.copies:
            return self.copies.get((node, segment), node)
        twin = self.saved.twin(self._origin(node), segment)
        if twin is not None:
            twin = self.twins[twin]
            self._move_before(twin, reader)
            return twin
        return node if self._is_alive(node, segment) else None

    def _move_before(self, node: Node, reader: Node) -> None:
        """Move `node` and its operands, all functions of stored tensors alone, in front of `reader`."""
        if node.op != "call_function" or node in self.early or self._place(node) < self._place(reader):
            return
        for operand in operands(node):
            self._move_before(operand, reader)
        reader.prepend(node)
        self.early.add(node)

    def _place(self, node: Node) -> int:
        return self.saved.position[self._origin(node)]

    def _copy(self, node: Node, segment: int, reader: Node) -> None:
        def operand(source: Node) -> Node:
            recomputed = self._available(source, segment, reader)
            assert recomputed is not None, "operands come first"
            return recomputed

        args, kwargs = map_arg((node.args, node.kwargs), operand)
        with reader.graph.inserting_before(reader):
            new = reader.graph.create_node("call_function", node.target, args, kwargs, name=f"{node.name}_again")
        meta.copy(node, new)
        meta.set_recomputed(new, True)
        if self._origin(node) in self.saved.batch_dependent:
            meta.set_backward(new)
        self.copies[node, segment] = new

    def _is_alive(self, node: Node, segment: int) -> bool:
        origin = self._origins.get(node)  # None for a node that is recomputed itself
        return origin is not None and self.saved.is_alive(origin, segment, self.dropped)
