"""Makes a solution equal in equal layers, so that layer folding applies to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..graph.folding.repeats import Repeats
from ..graph.graph import TrainGraph
from .ilp.solve import IlpResult

V = TypeVar("V")


@dataclass
class Symmetrizer:
    """Gives every equal layer the layouts of the layer in the middle. The first and the last layer may have had others,
    as their neighbours differ; the loss is small for a deep step, and it is simulated.
    """

    graph: TrainGraph
    repeats: Repeats
    slots: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    middle: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        params = {node: given.name for given, node in self.graph.placeholders()}
        for node, (block, slot) in self.repeats.places.items():
            name = params.get(node, node.name)
            self.slots.setdefault(slot, []).append(name)
            if block == self.repeats.count // 2:
                self.middle[name] = slot
        self.inside = {name for names in self.slots.values() for name in names}

    def __call__(self, made: IlpResult) -> IlpResult:
        """The symmetrized solution."""
        found, pins = made.found, made.found.pins
        expanded = tuple(self._names(pins.decomposed))
        pins = replace(pins, results=self._spread(pins.results), ways=self._spread(pins.ways), decomposed=expanded)
        params, storage = self._spread(found.params), self._spread(found.storage)
        return replace(made, found=replace(found, pins=pins, params=params, storage=storage))

    def _spread(self, given: Mapping[str, V]) -> dict[str, V]:
        out: dict[str, V] = {}
        for name, value in given.items():
            out |= dict.fromkeys(self._names([name]), value)
        return out

    def _names(self, given: Iterable[str]) -> dict[str, None]:
        """The names outside of equal layers, and the equals of the names in the middle layer."""
        out: dict[str, None] = {}
        for name in given:
            base, dashes, part = (name, "", "") if name in self.inside else name.partition("__")
            if base in self.middle:
                out |= dict.fromkeys(f"{one}{dashes}{part}" for one in self.slots[self.middle[base]])
            elif base not in self.inside:
                out[name] = None
        return out
