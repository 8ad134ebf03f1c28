"""Loops of a local graph: one body, run for each piece of the batch, with what it accumulates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from . import meta
from .region import Region, region_of
from .stage_part import StageParts


@dataclass(frozen=True, eq=False)
class Loop:
    """The target of a node: runs `body` for piece 0, 1, ... of `pieces`, and returns a list of what it accumulates.

    The node's operands are those of the whole rank. Placeholders of the body are these, then one for each accumulator,
    which is None for the first piece; the body returns the accumulators. Before binding, the coordinate of a piece is
    the axis `time`, as that of a rank is another axis.
    `stages`: how the stages of a pipeline share the body.
    """

    body: Graph
    pieces: int
    stages: StageParts | None = None
    __name__ = "loop"

    def __call__(self, *inputs: Any) -> list[Any]:
        """A loop does not run: its pieces are written out where a program is bound to a rank."""
        raise AssertionError("loops are written out")

    def with_body(self, body: Graph) -> Loop:
        """This loop with another body."""
        return replace(self, body=body)


def loop_of(node: Node) -> Loop | None:
    """The loop that `node` runs; None for every other node."""
    return node.target if isinstance(node.target, Loop) else None


def with_bodies(graph: Graph, besides: Callable[[Node], object] = lambda _: None) -> Iterator[tuple[Node, int]]:
    """Each node of a graph, and of the bodies that it runs but in nodes `besides`, with how often it runs."""
    calls = Counter[Graph]()
    for node in graph.nodes:
        yield node, 1
        pieces, bodies = (1, []) if besides(node) else bodies_of(node)
        if region_of(node):
            calls.update(bodies)
            continue
        for body in bodies:
            yield from ((inner, pieces) for inner in body.nodes)
    for body, times in calls.items():
        yield from ((inner, times) for inner in body.nodes)


def bodies_of(node: Node) -> tuple[int, list[Graph]]:
    """The bodies that `node` runs, and for how many pieces they are: of a loop, or a region."""
    if isinstance(region := node.target, Region):
        return region.pieces, [region.body]
    if isinstance(loop := node.target, Loop):
        return loop.pieces, [loop.body]
    return 1, []


def named_bodies(graph: Graph) -> dict[str, Graph]:
    """The bodies that a graph runs for pieces, by name: of a loop, and each block of a stage once."""
    bodies = dict[str, Graph]()
    for node in graph.nodes:
        if loop := loop_of(node):
            bodies[node.name] = loop.body
        elif region := region_of(node):
            block = meta.block(node)
            bodies[f"{meta.part_of(node)}/{block.name}" if block else node.name] = region.body
    return bodies


def put_bodies(graph: Graph, replacements: Mapping[Graph, Graph]) -> None:
    """Replace the bodies that a graph runs by their `replacements`."""
    regions = dict[Region, Region]()
    for node in graph.nodes:
        if loop := loop_of(node):
            node.target = loop.with_body(replacements[loop.body])
        elif region := region_of(node):
            body = replacements.get(region.body, region.body)
            node.target = regions.setdefault(region, replace(region, body=body))
