"""A part of a program that nodes of it call: its body is planned, priced and compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .nodes import ends_of, function_of, node_at


@dataclass(frozen=True, eq=False)
class Region:
    """The target of nodes that call `body`: with the list of its inputs, and the number of the piece of the batch, of
    `pieces`. Arguments in it that differ between pieces are a `ByPiece`.

    `shares`: for each result the number of the input in whose memory it is; else, below 0, what is the same for results
    in the same new memory. `sizes`: the bytes of the memory of each. `us`: microseconds of a call. `work_bytes`: the
    most that it adds to what is there.
    """

    body: Graph
    pieces: int
    shares: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    us: float = 0.0
    work_bytes: int = 0
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


def shared_with(item: Node) -> Node | None:
    """What a result of a call shares its memory with: an input, or a result before it."""
    run = node_at(item, 0)
    shares = cast(Region, run.target).shares
    place = shares[cast(int, item.args[1])]
    if place >= 0:
        return inputs_of(run)[place]
    first = next(other for other in run.users if shares[cast(int, other.args[1])] == place)
    return None if first is item else first


def inputs_of(node: Node) -> Sequence[Any]:
    """What a call of a region gives it: nodes, and None for an accumulator that has nothing yet."""
    return cast("Sequence[Any]", node.args[0])
