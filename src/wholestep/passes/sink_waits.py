"""Waits for each collective at the last moment: just before the first node that reads its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from ..graph.graph import LocalGraph, Role
from ..graph.ops import FREE
from ..graph.verify import is_wait
from .base import InPlace


@dataclass(frozen=True)
class SinkWaits(InPlace):
    """Moves waits behind arithmetic that does not read their results. Bitwise the same.

    A view reads nothing: it stays behind the wait, as the cut from what was padded to be gathered. So does the sum with
    a gradient that a call before left: it would end the bucket that the reduction goes into.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def change(self, local: LocalGraph) -> LocalGraph:
        """Move the waits of `local` down."""
        held = set[Node]()
        kept = {node for given, node in local.placeholders() if given.role is Role.GRAD}

        def bring(given: Node, reader: Node) -> None:
            if given in held:
                held.remove(given)
                for earlier in given.all_input_nodes:
                    bring(earlier, reader)
                reader.prepend(given)

        for node in list(local.graph.nodes):
            given = set(node.all_input_nodes)
            left = bool(given & kept) and given <= held | kept
            if is_wait(node) or (node.target in FREE and given <= held) or (left and given & held):
                held.add(node)
            if left:
                kept.add(node)
            if node in held:
                continue
            for one in node.all_input_nodes:
                bring(one, node)
        return local
