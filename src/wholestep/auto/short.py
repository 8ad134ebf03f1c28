"""A deep step made short: what few of its equal layers cost says what all of them do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import ceil, prod

from torch.fx import Node

from ..errors import GraphError, WholestepError
from ..graph.fold import folded
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.repeats import Repeats, find_repeats
from ..hardware.hardware import Hardware
from ..layout import Layout, replicated
from ..mesh import Mesh
from ..passes.bucket import Carried, carried_by
from ..plan.data_parallel import DataParallel
from ..plan.make_plan import bytes_at_rest
from ..plan.plan import Plan
from ..plan.strategy import Resting, Strategies, Strategy
from ..tuning import TUNING
from .costs import Costs, Least, costs_of
from .fit import Finish

FEWEST = TUNING.folded_layers
_BUCKETS = TUNING.folded_buckets
_WORTH = TUNING.folded_share


@dataclass
class Short:
    """A deep step with fewer of its equal blocks. What a step costs grows evenly with their number, so two of those say
    what all cost.
    """

    graph: TrainGraph
    repeats: Repeats
    hardware: Hardware
    graphs: dict[int, TrainGraph] = field(default_factory=dict[int, TrainGraph])
    alike: dict[tuple[object, ...], bool] = field(default_factory=dict[tuple[object, ...], bool])

    @property
    def count(self) -> int:
        """How many equal blocks there are in all."""
        return self.repeats.count

    def with_blocks(self, blocks: int) -> TrainGraph:
        """The step with so many of them."""
        if blocks not in self.graphs:
            self.graphs[blocks] = folded(self.graph, self.repeats, blocks)
        return self.graphs[blocks]

    def blocks(
        self, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None = None
    ) -> tuple[int, int] | None:
        """How many blocks to simulate; None where that is not much less than all of them, or where `strategies` do not
        treat them alike, or do not fit fewer (a pattern names a layer).

        A collective carries `machine.bucket_bytes` at least. So many layers fill a few buckets in the first step, and a
        few more in the second, with parameters cut as tensor parallelism does: then it matters little where in a layer
        a bucket is full. A further hop of gathers and sums is one layer behind.
        """
        cut = prod(mesh.axis_size(axis) for part in strategies.parts if part is not strategies.data
                   for axis in part.axes(mesh))  # fmt: skip
        owned = [i.meta.size_bytes for i, n in self.graph.placeholders()
                 if i.role is Role.PARAM and self.repeats.block(n) == 0]  # fmt: skip
        several = ceil(_BUCKETS * self.hardware.bucket_bytes * cut / max(sum(owned), 1))
        axes = strategies.data.axes(mesh) if strategies.data else ()
        behind = max(sum(mesh.axis_size(axis) > 1 for axis in axes) - 1, 0)
        few = max(FEWEST[0] + behind, several)
        more = few + max(FEWEST[1] - FEWEST[0] + behind, several)
        alike = few + more <= self.count * _WORTH and all(self._alike(mesh, part) for part in strategies.parts)
        if not alike:
            return None
        try:
            bytes_at_rest(self.with_blocks(FEWEST[0]), mesh, strategies, placed)
        except WholestepError:
            return None
        return few, more

    def bytes_at_rest(self, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None) -> int:
        """As `plan.make_plan.bytes_at_rest` of the whole step.

        Raises:
            PlanError, MeshError: the strategies do not fit the mesh or the graph.
        """
        few, more = (bytes_at_rest(self.with_blocks(n), mesh, strategies, placed) for n in FEWEST)
        return round(self.whole(FEWEST, (few, more)))

    def whole(self, pair: tuple[int, int], found: tuple[float, float]) -> float:
        """What grows evenly with the number of blocks, for all of them."""
        (few, more), (a, b) = pair, found
        return a + (b - a) * (self.count - few) / (more - few)

    def costs(self, pair: tuple[int, int], found: Sequence[Costs]) -> Costs:
        """Of the whole step, from those with so many blocks."""
        a, b = (astuple(one) for one in found)
        rest, peak, sent, collectives, step_s, exposed_s = (self.whole(pair, two) for two in zip(a, b, strict=True))
        return Costs(round(rest), round(peak), round(sent), round(collectives), step_s, max(exposed_s, 0.0))

    def priced(self, pair: tuple[int, int], made: Sequence[tuple[Plan, LocalGraph]], finish: Finish) -> Costs:
        """What the whole step costs, from plans and programs of those with so many blocks, finished as it would be."""
        finish = finish.part_of(self.carried(pair, [local for _, local in made]))
        return self.costs(pair, [costs_of(finish(local), planned, self.hardware) for planned, local in made])

    def carried(self, pair: tuple[int, int], made: Sequence[LocalGraph]) -> Carried:
        """What the whole step carries, from programs of those with so many blocks."""
        few, more = (astuple(carried_by(local)) for local in made)
        return Carried(*(round(self.whole(pair, two)) for two in zip(few, more, strict=True)))

    def least(self, pair: tuple[int, int], found: Sequence[Least]) -> Least:
        """The bound of the whole step, from the parts of those with so many blocks; what is sent is exact."""
        a, b = found
        sent = {key: self.whole(pair, (a.sent.get(key, 0), b.sent.get(key, 0))) for key in {**a.sent, **b.sent}}
        return Least(self.whole(pair, (a.computed_us, b.computed_us)), sent)

    def _alike(self, mesh: Mesh, part: Strategy) -> bool:
        """True where `part` treats equal layers alike, in where parameters rest and in what it pins."""
        if isinstance(part, DataParallel):
            return True  # it goes by shapes
        key = repr(part), tuple(mesh.axis_size(axis) for axis in part.axes(mesh))
        if key not in self.alike:
            slots = {node.name: slot for node, (_, slot) in self.repeats.places.items()}
            found: dict[object, list[object]] = {}
            params = [(i, slots.get(n.name)) for i, n in self.graph.placeholders() if i.role is Role.PARAM]
            whole = {i.name: replicated(len(i.meta.shape)) for i, _ in params}
            rest = part.resting(self.graph, mesh, {name: Resting(layout, layout) for name, layout in whole.items()})
            for given, slot in params:
                found.setdefault(("rest", given.name if slot is None else slot), []).append(rest[given.name])
            pins = part.pins(self.graph, mesh)
            for name, states in pins.results.items():
                found.setdefault(slots.get(name, name), []).append(states)
            for (reader, given), states in pins.reads.items():
                if reader in slots and given in slots:
                    found.setdefault((slots[reader], slots[given]), []).append(states)
            numbers = {len(states) for states in found.values()}
            self.alike[key] = numbers <= {1, self.count - 1, self.count} and all(
                state == states[0] for states in found.values() for state in states
            )
        return self.alike[key]

    def __str__(self) -> str:
        by = f" by {self.repeats.period}" if self.repeats.period > 1 else ""
        return f"{self.count} equal layers{by} ({self.repeats.prefix})"


def shortened(
    graph: TrainGraph, hardware: Hardware, placed: Mapping[str, Layout] | None = None,
    marks: Mapping[Node, Hashable] | None = None,
) -> Short | None:  # fmt: skip
    """`graph` as what can be made short; None where it has no equal layers, too few to be worth it, or where they are
    not `placed` alike. Layers whose `marks` differ are not equal.
    """
    repeats = find_repeats(graph, marks)
    if repeats is None or sum(FEWEST) > repeats.count * _WORTH:
        return None
    names = {node: given.name for given, node in graph.placeholders()}
    for columns in zip(*repeats.blocks, strict=True):
        if placed and len({placed.get(names[node]) for node in columns if node in names}) > 1:
            return None
    short = Short(graph, repeats, hardware)
    try:
        short.with_blocks(FEWEST[0])
    except GraphError:
        return None
    return short
