"""Waits for each collective at the last moment: just before the first node that reads its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..graph.graph import LocalGraph, copy_graph
from ..graph.verify import is_wait


@dataclass(frozen=True)
class LateWaits:
    """Arithmetic that stands between a wait and its first reader runs before the wait. Bitwise the same."""

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """Move the waits of `local` down."""
        graph = copy_graph(local.graph)
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in reversed([n for n in graph.nodes if is_wait(n)]):
            min(node.users, key=place.__getitem__).prepend(node)
        return replace(local, graph=graph)
