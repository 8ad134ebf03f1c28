"""Writes a step in which chosen values are made again where the backward reads them, and not kept for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node
from torch.fx.node import map_arg

from ..errors import GraphError
from ..graph import meta
from ..graph.graph import LocalGraph, copy_with, operands
from .saved_tensors import SavedTensors


def made_again(saved: SavedTensors, names: Sequence[str]) -> LocalGraph:
    """A copy of the functional graph `saved.local` in which the saved values `names` (`Value.name`) are made again.

    Each is made just before its first reader, out of what is still there; what else that needs is made again too.
    The same ops on the same operands: bitwise the same.

    Raises:
        GraphError: a name is no value that is saved and can be made again.
    """
    if not names:
        return saved.local
    known = {value.name: value for value in saved.candidates}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise GraphError(
            f"{unknown[0]!r} is not kept for the backward, or cannot be made again",
            "values that the forward makes and the backward reads: no random numbers, no results of collectives",
            f"one of {', '.join(list(known)[:5])}, ..." if known else "",
        )
    graph, twins = copy_with(saved.local.graph)
    work = _Work(saved, {id(known[name].storage) for name in names}, twins)
    readers = {(at, stretch) for name in names for stretch, reads in known[name].reads.items() for at, _ in reads}
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for at, stretch in sorted(readers):
        work.serve(calls[at], stretch)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return replace(saved.local, graph=graph)


@dataclass
class _Work:
    """Works on a copy of the graph that `saved` is of; `twins` are the nodes of the copy."""

    saved: SavedTensors
    dropped: set[int]
    twins: dict[Node, Node]
    copies: dict[tuple[Node, int], Node] = field(default_factory=dict[tuple[Node, int], Node])
    early: set[Node] = field(default_factory=set[Node])

    def __post_init__(self) -> None:
        self._origins = {new: old for old, new in self.twins.items()}

    def _origin(self, node: Node) -> Node:
        """The node of the graph that `saved` is of; what was made anew is known to nobody."""
        return self._origins.get(node, node)

    def serve(self, reader: Node, stretch: int) -> None:
        """Let `reader` read copies of what is dropped, made just before it if no earlier reader needed them."""
        for given in dict.fromkeys(operands(reader)):
            earlier = given.op == "call_function" and self.saved.stretch[self._origin(given)] < stretch
            if earlier and not self._is_there(given, stretch):
                reader.replace_input_with(given, self._here(given, stretch, reader))

    def _here(self, wanted: Node, stretch: int, reader: Node) -> Node:
        todo, last = [(wanted, False)], wanted
        while todo:
            node, ready = todo.pop()
            last = self._found(node, stretch, reader)
            if last is not None:
                continue
            if ready:
                self._copy(node, stretch, reader)
            else:
                todo.append((node, True))
                todo += [(given, False) for given in operands(node)]
        found = self._found(wanted, stretch, reader)
        assert found is not None, "made before or just now"
        return found

    def _found(self, node: Node, stretch: int, reader: Node) -> Node | None:
        """What holds the value of `node` in `stretch`, None where it must be made."""
        if node.op != "call_function" or (node, stretch) in self.copies:
            return self.copies.get((node, stretch), node)
        twin = self.saved.twin(self._origin(node), stretch)
        if twin is not None:
            twin = self.twins[twin]
            self._bring_forward(twin, reader)
            return twin
        return node if self._is_there(node, stretch) else None

    def _bring_forward(self, node: Node, reader: Node) -> None:
        """`node` follows from what rests alone: it and all that it needs can stand before `reader`."""
        if node.op != "call_function" or node in self.early or self._place(node) < self._place(reader):
            return
        for given in operands(node):
            self._bring_forward(given, reader)
        reader.prepend(node)
        self.early.add(node)

    def _place(self, node: Node) -> int:
        return self.saved.position[self._origin(node)]

    def _copy(self, node: Node, stretch: int, reader: Node) -> None:
        def held(given: Node) -> Node:
            found = self._found(given, stretch, reader)
            assert found is not None, "operands come first"
            return found

        args, kwargs = map_arg((node.args, node.kwargs), held)
        with reader.graph.inserting_before(reader):
            new = reader.graph.create_node("call_function", node.target, args, kwargs, name=f"{node.name}_again")
        meta.copy(node, new)
        meta.set_again(new)
        if self._origin(node) in self.saved.moving:
            meta.set_backward(new)
        self.copies[node, stretch] = new

    def _is_there(self, node: Node, stretch: int) -> bool:
        known = self._origins.get(node)
        if known is None:  # made again itself
            return False
        held = self.saved.of.get(known, ())
        if not self.saved.repeatable(known):
            return True
        if len(held) != 1 or id(held[0]) in self.dropped:
            return False
        return self.saved.last_stretch[id(held[0])] >= stretch
