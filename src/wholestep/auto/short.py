"""A deep step made short: what few of its equal layers cost says what all of them do, as costs grow evenly with layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from ..cost.speeds import Speeds
from ..errors import GraphError
from ..graph.fold import folded
from ..graph.graph import Role, TrainGraph
from ..graph.repeats import Repeats, find_repeats
from ..layout import Layout
from ..mesh import Mesh
from ..plan.strategy import Strategies
from .costs import Costs, Least

_FEWEST = 2
_BUCKETS = 3
_WORTH = 0.5


@dataclass(frozen=True)
class Short:
    """A step with the first `few` of its `count` equal blocks, and with the first `more`."""

    repeats: Repeats
    few: int
    more: int
    graphs: tuple[TrainGraph, TrainGraph]

    @property
    def count(self) -> int:
        """How many equal blocks there are in all."""
        return self.repeats.count

    def whole(self, few: float, more: float) -> float:
        """What grows evenly with the number of blocks, for all of them."""
        return few + (more - few) * (self.count - self.few) / (self.more - self.few)

    def costs(self, found: Sequence[Costs]) -> Costs:
        """Of the whole step, from those of the two short ones."""
        a, b = found
        return Costs(
            round(self.whole(a.rest_bytes, b.rest_bytes)),
            round(self.whole(a.peak_bytes, b.peak_bytes)),
            round(self.whole(a.sent_bytes, b.sent_bytes)),
            round(self.whole(a.collectives, b.collectives)),
            self.whole(a.step_s, b.step_s),
            max(self.whole(a.exposed_s, b.exposed_s), 0.0),
        )

    def least(self, found: Sequence[Least]) -> Least:
        """The bound of the whole step, from the parts of those of the two short ones."""
        a, b = found
        sent = {key: self.whole(a.sent.get(key, 0), b.sent.get(key, 0)) for key in {**a.sent, **b.sent}}
        return Least(self.whole(a.computed_us, b.computed_us), sent)

    def suits(self, graph: TrainGraph, mesh: Mesh, strategies: Strategies, rest: Mapping[str, Layout]) -> bool:
        """True where `strategies`, by which inputs of `graph` rest as in `rest`, treat its equal layers alike."""
        slots = {node.name: slot for node, (_, slot) in self.repeats.places.items()}
        found: dict[object, list[object]] = {}
        for given, node in graph.placeholders():
            found.setdefault(slots.get(node.name, node.name), []).append(rest[given.name])
        pins = strategies.pins(graph, mesh)
        for name, states in pins.results.items():
            found.setdefault(("result", slots.get(name, name)), []).append(states)
        for (reader, given), states in pins.reads.items():
            if reader in slots and given in slots:
                found.setdefault((slots[reader], slots[given]), []).append(states)
        numbers = {len(states) for states in found.values()}
        return numbers <= {1, self.count - 1, self.count} and all(
            state == states[0] for states in found.values() for state in states
        )

    def __str__(self) -> str:
        of = f" by {self.repeats.period}" if self.repeats.period > 1 else ""
        return f"extrapolated from {self.few} and {self.more} of {self.count} equal layers{of} ({self.repeats.prefix})"


def shortened(graph: TrainGraph, machine: Speeds, cut: int = 1) -> Short | None:
    """`graph` with few of its layers; None where it has no equal ones, or too few to be worth it.

    Of each kind, a collective carries `machine.bucket_bytes` at least. There are so many layers in the short steps that
    a few such buckets are full in the first, and a few more in the second, with parameters in `cut` parts by tensor
    parallelism: then a bucket that is full later or earlier matters little.
    """
    repeats = find_repeats(graph)
    if repeats is None:
        return None
    owned = [i.meta.size_bytes for i, n in graph.placeholders() if i.role is Role.PARAM and repeats.block(n) == 1]
    size = sum(owned) / cut
    several = ceil(_BUCKETS * machine.bucket_bytes / max(size, 1.0))
    few, more = max(_FEWEST, several), max(_FEWEST, several) + max(1, several)
    if few + more > repeats.count * _WORTH:
        return None
    try:
        return Short(repeats, few, more, (folded(graph, repeats, few), folded(graph, repeats, more)))
    except GraphError:
        return None
