"""Loops of a local graph: one body, run for each piece of the batch, with what it accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.fx import Graph, Node

from .nodes import function_of, operands
from .stage_part import StageParts, part_of


@dataclass(frozen=True, eq=False)
class Loop:
    """The target of a node: runs `body` for piece 0, 1, ... of `pieces`, and returns a list of what it accumulates.

    The node's operands are those of the whole rank. Placeholders of the body are these, then one for each accumulator,
    which is None for the first piece; the body returns the accumulators. Before binding, the coordinate of a piece is
    the axis `time`, as that of a rank is another axis; then arguments that differ between pieces are a `ByPiece`.
    `stages`: how the stages of a pipeline share the body.
    """

    body: Graph
    pieces: int
    stages: StageParts | None = None
    __name__ = "loop"

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the pieces node by node, once the loop is bound to a rank. The backend `eager` compiles the body."""
        ends = operands(next(iter(reversed(self.body.nodes))))
        totals: list[Any] = [None] * len(ends)
        for piece in range(self.pieces):
            arguments = iter([*inputs, *totals])
            values: dict[Node, Any] = {}

            def read(value: Any, piece: int = piece, values: dict[Node, Any] = values) -> Any:
                if isinstance(value, Node):
                    return values[value]
                if isinstance(value, (list, tuple)):
                    entries = map(read, cast(Sequence[Any], value))
                    return list(entries) if isinstance(value, list) else tuple(entries)
                return value.values[piece] if isinstance(value, ByPiece) else value

            for node in self.body.nodes:
                if node.op == "call_function":
                    kwargs = {key: read(value) for key, value in node.kwargs.items()}
                    values[node] = function_of(node)(*map(read, node.args), **kwargs)
                elif node.op == "placeholder":
                    values[node] = next(arguments)
            totals = list(map(read, ends))
        return totals

    def with_body(self, body: Graph) -> Loop:
        """This loop with another body."""
        return replace(self, body=body)


@dataclass(frozen=True)
class ByPiece:
    """An argument of a body that is bound to a rank: its value for each piece."""

    values: tuple[Any, ...]

    def map(self, change: Callable[[Any], Any]) -> ByPiece:
        """The same with each value changed."""
        return replace(self, values=tuple(map(change, self.values)))


def loop_of(node: Node) -> Loop | None:
    """The loop that `node` runs; None for every other node."""
    return node.target if isinstance(node.target, Loop) else None


def with_bodies(graph: Graph, besides: Callable[[Node], object] = lambda _: None) -> Iterator[tuple[Node, int]]:
    """Each node of a graph and of the bodies that it runs for pieces, but for nodes `besides`, with the number of times
    that it runs.
    """
    for node in graph.nodes:
        yield node, 1
        if besides(node):
            continue
        pieces, bodies = bodies_of(node)
        for body in bodies:
            yield from ((inner, pieces) for inner in body.nodes)


def bodies_of(node: Node) -> tuple[int, list[Graph]]:
    """The bodies that `node` runs, and how often each: of a loop, or the blocks of a stage."""
    if isinstance(loop := node.target, Loop):
        return loop.pieces, [loop.body]
    part = part_of(node)
    return (part.pieces, [block.body for block in part.running]) if part else (1, [])


def named_bodies(graph: Graph) -> dict[str, Graph]:
    """The bodies that a graph runs for pieces, by name: of a loop, and each block of a stage once."""
    bodies = dict[str, Graph]()
    for node in graph.nodes:
        if loop := loop_of(node):
            bodies[node.name] = loop.body
        elif part := part_of(node):
            listed = set(bodies.values())
            bodies |= {f"{node.name}/{block.name}": block.body for block in part.blocks if block.body not in listed}
    return bodies


def put_bodies(graph: Graph, replacements: Mapping[Graph, Graph]) -> None:
    """Replace the bodies that a graph runs by their `replacements`."""
    for node in graph.nodes:
        if loop := loop_of(node):
            node.target = loop.with_body(replacements[loop.body])
        elif part := part_of(node):
            node.target = part.with_bodies([replacements[block.body] for block in part.blocks])
