"""Merges repeated random draws: activation checkpointing resets the generator to recompute a forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..rules.registry import is_random
from .outside_reads import refuse_seeds


@dataclass
class RngReplay:
    """Segments of a trace between reads and resets of the generator; each random node is annotated with its segment.

    `repeats[i]` is the segment to whose start the generator was reset before segment `i`; None if it continued.
    """

    repeats: list[int | None] = field(default_factory=lambda: [None])
    _saved: list[tuple[torch.Tensor, int]] = field(default_factory=list[tuple[torch.Tensor, int]])

    def saved(self, state: torch.Tensor) -> None:
        """Record that the generator's state was read."""
        self._begin(None)
        self._saved.append((state, len(self.repeats) - 1))

    def restored(self, state: torch.Tensor) -> None:
        """Record that the generator was set to a state read before."""
        known = [segment for kept, segment in self._saved if kept is state]
        if not known:
            refuse_seeds(None)
        self._begin(known[0])

    def _begin(self, repeats: int | None) -> None:
        self.repeats.append(repeats)
        _torch.note_on_nodes(rng_segment=len(self.repeats) - 1)

    def share(self, graph: Graph) -> None:
        """Replace each draw that repeats an earlier one by the earlier node."""
        drawn: list[list[Node]] = [[] for _ in self.repeats]
        for node in graph.nodes:
            if is_random(node):
                drawn[meta.rng_segment(node)].append(node)
        starts, first = list[int](), dict[int, Node]()
        for number, repeats in enumerate(self.repeats):
            end = starts[-1] + len(drawn[number - 1]) if starts else 0
            starts.append(end if repeats is None else starts[repeats])
            for position, node in enumerate(drawn[number], starts[number]):
                earlier = first.setdefault(position, node)
                if earlier is not node and _is_same_draw(earlier, node):
                    node.replace_all_uses_with(earlier)
                    graph.erase_node(node)


def _is_same_draw(a: Node, b: Node) -> bool:
    return a.target == b.target and meta.tensors(a) == meta.tensors(b)
