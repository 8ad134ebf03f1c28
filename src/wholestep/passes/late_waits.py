"""Waits for each collective at the last moment: just before the first node that reads its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..graph.graph import LocalGraph
from ..graph.verify import is_wait
from .base import InPlace


@dataclass(frozen=True)
class LateWaits(InPlace):
    """Arithmetic that stands between a wait and its first reader runs before the wait. Bitwise the same."""

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move the waits of `local` down."""
        place = {node: i for i, node in enumerate(local.graph.nodes)}
        for node in reversed([n for n in local.graph.nodes if is_wait(n)]):
            min(node.users, key=place.__getitem__).prepend(node)
        return local
