"""Layer folding: a step with many equal layers, evaluated on two steps with few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, prod
from typing import TypeVar, cast

from torch import Tensor, nn

from ..cost.extrapolate import extrapolated
from ..cost.software import OWN, Software
from ..errors import GraphError, PlanError, WholestepError
from ..graph.folding.fold import fold
from ..graph.folding.repeats import Repeats, find_repeats
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout, replicated
from ..mesh import Mesh
from ..passes.base import Pass, run_passes
from ..passes.bucket import collective_traffic
from ..passes.bucket_sizes import expected_bytes
from ..passes.context import CollectiveTraffic, Context
from ..plan.data_parallel import DataParallel
from ..plan.make_plan import stored_bytes
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from ..plan.strategy import Stored, Strategy
from ..tuning import TUNING
from .bounds import Costs, costs_of_part

T = TypeVar("T")
FEWEST = TUNING.folded_layers
CaptureStep = Callable[[int, int], TrainGraph]
"""From sequences of a rank and layers to the step."""


@dataclass
class FoldedStep:
    """A step with equal blocks of layers. Its costs are linear in the number of blocks, so the costs of two steps with
    few blocks (a `pair`) give the costs of the whole step. `left_out`: blocks that `graph` was captured without.
    """

    graph: TrainGraph
    repeats: Repeats
    hardware: Hardware
    left_out: int = 0
    software: Software = OWN
    graphs: dict[int, TrainGraph] = field(default_factory=dict[int, TrainGraph])
    symmetric: dict[tuple[object, ...], bool] = field(default_factory=dict[tuple[object, ...], bool])

    @property
    def count(self) -> int:
        """How many equal blocks the whole step has."""
        return self.repeats.count + self.left_out

    def with_blocks(self, blocks: int) -> TrainGraph:
        """The step with `blocks` of them."""
        if blocks not in self.graphs:
            self.graphs[blocks] = fold(self.graph, self.repeats, blocks)
        return self.graphs[blocks]

    def blocks(
        self, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None = None
    ) -> tuple[int, int] | None:
        """The pair to simulate; None where that saves too little, where `strategies` differ between equal layers, or
        where they need all layers (a pattern names one).

        The smaller step fills a few buckets, the larger one a few more, so
        that it matters little at which layer a bucket is full. Each further stage of a hierarchical collective trails
        by one layer.
        """
        sharded = prod(mesh.axis_size(axis) for part in strategies.parts if part is not strategies.data
                       for axis in part.axes(mesh))  # fmt: skip
        owned = [i.meta.size_bytes for i, n in self.graph.placeholders()
                 if i.role is Role.PARAM and self.repeats.block(n) == 0]  # fmt: skip
        axes = strategies.data.axes(mesh) if strategies.data else ()
        bucket = expected_bytes(self.hardware, mesh, axes, sum(owned) * self.count // sharded)
        several = ceil(TUNING.folded_buckets * bucket * sharded / max(sum(owned), 1))
        stages = max(sum(mesh.axis_size(axis) > 1 for axis in axes) - 1, 0)
        smaller = max(FEWEST[0] + stages, several)
        larger = smaller + max(FEWEST[1] - FEWEST[0] + stages, several)
        saves = smaller + larger <= self.count * TUNING.folded_share
        if not (saves and all(self._is_symmetric(mesh, part) for part in strategies.parts)):
            return None
        try:
            stored_bytes(self.with_blocks(FEWEST[0]), mesh, strategies, placed)
        except WholestepError:
            return None
        return smaller, larger

    def stands_for(self, model: nn.Module) -> bool:
        """True where all layers of `model` are alike, and what it has besides has the shapes of the capture of few."""
        captured, inside = {i.name: i.meta.shape for i in self.graph.inputs}, f"{self.repeats.prefix}."
        state = cast(dict[str, Tensor], model.state_dict(keep_vars=True))
        outside = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith(inside)}
        same = all(captured.get(name, shape) == shape for name, shape in outside.items())
        return same and layers_alike(model, self.repeats)

    def stored_bytes(self, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None) -> int:
        """`plan.make_plan.stored_bytes` of the whole step, with its errors."""
        smaller, larger = (stored_bytes(self.with_blocks(n), mesh, strategies, placed) for n in FEWEST)
        return self.whole(FEWEST, (smaller, larger))

    def whole(self, pair: tuple[int, int], quantities: tuple[T, T]) -> T:
        """Extrapolates linear quantities from a pair to all blocks."""
        return extrapolated(*quantities, (self.count - pair[0]) / (pair[1] - pair[0]))

    def priced(self, pair: tuple[int, int], steps: Sequence[tuple[Plan, LocalGraph]], passes: Sequence[Pass]) -> Costs:
        """Costs of the whole step from the plans and programs of a pair, which nobody uses again; `passes` size buckets
        for the whole step.
        """
        scheduled = zip(steps, self.scheduled(pair, steps, passes, owned=True), strict=True)
        return self.costs_from(pair, [(planned, local) for (planned, _), local in scheduled])

    def scheduled(
        self, pair: tuple[int, int], steps: Sequence[tuple[Plan, LocalGraph]], passes: Sequence[Pass],
        owned: bool = False,
    ) -> list[LocalGraph]:  # fmt: skip
        """The programs of a pair after `passes`, which size buckets for the whole step; edited if they are `owned`."""
        context = Context(traffic=self.carried(pair, [local for _, local in steps]))
        return [run_passes(local, passes, owned=owned, context=context) for _, local in steps]

    def costs_from(self, pair: tuple[int, int], scheduled: Sequence[tuple[Plan, LocalGraph]]) -> Costs:
        """Costs of the whole step from programs that have been through all passes."""
        a, b = (costs_of_part(local, planned, self.hardware, self.software) for planned, local in scheduled)
        return self.whole(pair, (a, b))

    def carried(self, pair: tuple[int, int], programs: Sequence[LocalGraph]) -> CollectiveTraffic:
        """Bytes of the collectives of the whole step, from the programs of a pair."""
        smaller, larger = map(collective_traffic, programs)
        return self.whole(pair, (smaller, larger))

    def _is_symmetric(self, mesh: Mesh, part: Strategy) -> bool:
        """True where storage layouts and pins of `part` are equal in equal layers."""
        if isinstance(part, DataParallel):
            return True  # it decides by shapes
        key = repr(part), tuple(mesh.axis_size(axis) for axis in part.axes(mesh))
        if key not in self.symmetric:
            slots = {node.name: slot for node, (_, slot) in self.repeats.places.items()}
            by_slot: dict[object, list[object]] = {}
            params = [(i, slots.get(n.name)) for i, n in self.graph.placeholders() if i.role is Role.PARAM]
            unsharded = {i.name: replicated(len(i.meta.shape)) for i, _ in params}
            rest = part.storage_layouts(
                self.graph, mesh, {name: Stored(layout, layout) for name, layout in unsharded.items()}
            )
            for param, slot in params:
                by_slot.setdefault(("rest", param.name if slot is None else slot), []).append(rest[param.name])
            pins = part.pins(self.graph, mesh)
            for name, states in pins.results.items():
                by_slot.setdefault(slots.get(name, name), []).append(states)
            for (reader, operand), states in pins.reads.items():
                if reader in slots and operand in slots:
                    by_slot.setdefault((slots[reader], slots[operand]), []).append(states)
            numbers = {len(states) for states in by_slot.values()}
            every = self.repeats.count
            alike = all(state == states[0] for states in by_slot.values() for state in states)
            self.symmetric[key] = numbers <= {1, every - 1, every} and alike
        return self.symmetric[key]

    def __str__(self) -> str:
        by = f" by {self.repeats.period}" if self.repeats.period > 1 else ""
        return f"{self.count} equal layers{by} ({self.repeats.prefix})"


def fold_step(
    graph: TrainGraph, hardware: Hardware, placed: Mapping[str, Layout] | None = None,
    layers_left_out: int = 0, software: Software = OWN,
) -> FoldedStep | None:  # fmt: skip
    """`graph` as a step that can be folded; None where it has too few equal layers, or they are `placed` differently.
    `layers_left_out`: equal layers that `graph` was captured without.
    """
    repeats = find_repeats(graph)
    if repeats is None or layers_left_out % repeats.period:
        return None
    left_out = layers_left_out // repeats.period
    if sum(FEWEST) > (repeats.count + left_out) * TUNING.folded_share or repeats.count < FEWEST[0]:
        return None
    names = {node: graph_input.name for graph_input, node in graph.placeholders()}
    for columns in zip(*repeats.blocks, strict=True):
        if placed and len({placed.get(names[node]) for node in columns if node in names}) > 1:
            return None
    step = FoldedStep(graph, repeats, hardware, left_out, software)
    try:
        step.with_blocks(FEWEST[0])
        if left_out:
            step.with_blocks(repeats.count + 1)
    except GraphError:
        return None
    return step


def from_few_layers(
    capture: Callable[[int], TrainGraph], layers: int, hardware: Hardware, software: Software = OWN,
    model: nn.Module | None = None,
) -> FoldedStep | TrainGraph:  # fmt: skip
    """The step of which `capture` makes so many layers, from few; from all `layers` where few do not stand for these,
    also in `model`.
    """
    short = FEWEST[1] + 1
    with suppress(PlanError):  # no model has so few
        graph = capture(short) if 2 * short <= layers else None
        folded = graph and fold_step(graph, hardware, layers_left_out=layers - short, software=software)
        if folded and (model is None or folded.stands_for(model)):
            return folded
    graph = capture(layers)
    return fold_step(graph, hardware, software=software) or graph


def layers_alike(model: nn.Module, repeats: Repeats) -> bool:
    """True where all layers of `model`, from the first of the equal ones in a capture of few, are modules of the same
    classes, shapes, numbers and flags as those a period before; but for what is the number of each layer.
    """
    layers = [_description(module) for module in model.get_submodule(repeats.prefix).children()]
    numbers = {key for key in layers[0] if all(layer.get(key) == (int, i) for i, layer in enumerate(layers))}
    layers = [{key: value for key, value in layer.items() if key not in numbers} for layer in layers[repeats.first :]]
    return all(layer == behind for layer, behind in zip(layers, layers[repeats.period :], strict=False))


def _description(layer: nn.Module) -> dict[str, object]:
    """The classes, shapes, numbers and flags of a layer, by path."""
    modules = [*cast(Iterator[tuple[str, nn.Module]], layer.named_modules())]
    description: dict[str, object] = {f"{path}.": type(module) for path, module in modules}
    description |= {name: (tensor.shape, tensor.dtype) for name, tensor in layer.state_dict(keep_vars=True).items()}
    for path, module in modules:
        for name, attribute in cast(dict[str, object], vars(module)).items():
            if isinstance(attribute, (bool, int, float, str)):
                description[f"{path}.{name}"] = type(attribute), attribute
    return description
