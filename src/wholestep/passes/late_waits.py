"""Waits for each collective at the last moment: just before the first node that reads its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from ..graph.graph import LocalGraph
from ..graph.ops import VIEWS
from ..graph.verify import is_wait
from .base import InPlace


@dataclass(frozen=True)
class LateWaits(InPlace):
    """Arithmetic that stands between a wait and its first reader runs before the wait. Bitwise the same.

    A view reads nothing: it stays behind the wait, as the cut from what was padded to be gathered.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move the waits of `local` down."""
        held = set[Node]()

        def bring(given: Node, reader: Node) -> None:
            if given in held:
                held.remove(given)
                for earlier in given.all_input_nodes:
                    bring(earlier, reader)
                reader.prepend(given)

        for node in list(local.graph.nodes):
            if is_wait(node) or (node.target in VIEWS and node.all_input_nodes[0] in held):
                held.add(node)
                continue
            for given in node.all_input_nodes:
                bring(given, node)
        return local
