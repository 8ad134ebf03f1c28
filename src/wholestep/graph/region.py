"""A part of a bound program that nodes of it call: its body is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .nodes import ends_of, function_of


@dataclass(frozen=True, eq=False)
class Region:
    """The target of nodes that call `body`: with the list of its inputs, and the number of the piece of the batch, of
    `pieces`. Arguments in it that differ between pieces are a `ByPiece`.
    """

    body: Graph
    pieces: int
    __name__ = "run"

    def __call__(self, inputs: Sequence[Any], piece: int) -> list[Any]:
        """Run it node by node. Built-in backends compile the body, and free inputs with their last reader."""
        placeholders = (node for node in self.body.nodes if node.op == "placeholder")
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))

        def read(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, Node) else leaf.values[piece] if isinstance(leaf, ByPiece) else leaf

        for node in self.body.nodes:
            if node.op == "call_function":
                args, kwargs = map_aggregate(cast(Any, (node.args, node.kwargs)), read)  # pyright: ignore[reportGeneralTypeIssues]  # of fx, untyped
                values[node] = function_of(node)(*args, **kwargs)
        return [values[end] for end in ends_of(self.body)]


@dataclass(frozen=True)
class ByPiece:
    """An argument of a body that is bound to a rank: its value for each piece."""

    values: tuple[Any, ...]

    def map(self, change: Callable[[Any], Any]) -> ByPiece:
        """The same with each value changed."""
        return ByPiece(tuple(map(change, self.values)))


def region_of(node: Node) -> Region | None:
    """The region that `node` calls; None for every other node."""
    return node.target if isinstance(node.target, Region) else None


def inputs_of(node: Node) -> Sequence[Any]:
    """What a call of a region gives it: nodes, and None for an accumulator that has nothing yet."""
    return cast("Sequence[Any]", node.args[0])
