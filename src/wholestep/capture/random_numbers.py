"""Random numbers of a step: repeated draws of torch are merged; draws that all later steps would reuse are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..rules.registry import is_random


def drawn_once(name: str, where: str = "") -> CaptureError:
    """The error for a draw from the global generator of the module `name`."""
    return CaptureError(
        f"the step draws numbers from {name} while it is captured: all later steps would reuse them",
        "random numbers from torch (torch.rand, dropout), which each step draws again",
        "draw them before the step and pass them in, or switch off the code that needs them",
        where,
    )


def refuse_seeds(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace torch.manual_seed, torch.seed and torch.set_rng_state."""
    problem = "the step seeds torch's random numbers (manual_seed, seed, or set_rng_state with a state from elsewhere)"
    needed = "a random stream that continues from step to step: a compiled step has its own stream"
    raise CaptureError(problem, needed, "seed before the first call, or draw the numbers outside and pass them in")


def refuse_generators(named: dict[str, Any]) -> None:
    """Raise CaptureError if a call draws from a `torch.Generator`, whose state is not part of the graph."""
    if isinstance(named.get("generator"), torch.Generator):
        raise CaptureError(
            "the step draws random numbers from a torch.Generator of its own",
            "random numbers of the default generator, which continues from call to call in a compiled step",
            "leave out generator=, or draw the numbers before the step and pass them in",
        )


@dataclass
class RngReplay:
    """Merges draws that repeat: activation checkpointing resets the generator to recompute a forward.

    Segments of the trace are between reads and resets of the generator; each random node is annotated with its segment.
    `repeats[i]` is the segment to whose start the generator was reset before segment `i`; None if it continued.
    """

    repeats: list[int | None] = field(default_factory=lambda: [None])
    _saved: list[tuple[torch.Tensor, int]] = field(default_factory=list[tuple[torch.Tensor, int]])

    def saved(self, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Replace torch.get_rng_state: record that the generator's state was read."""
        state = original()
        self._begin(None)
        self._saved.append((state, len(self.repeats) - 1))
        return state

    def restored(self, original: Any, state: torch.Tensor) -> None:
        """Replace torch.set_rng_state: record the reset to a state read before. A trace draws no numbers."""
        segments = [segment for saved, segment in self._saved if saved is state]
        if not segments:
            refuse_seeds(None)
        self._begin(segments[0])

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
                same = earlier.target == node.target and meta.tensors(earlier) == meta.tensors(node)
                if earlier is not node and same:
                    node.replace_all_uses_with(earlier)
                    graph.erase_node(node)
