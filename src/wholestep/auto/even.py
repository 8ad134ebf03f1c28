"""A solution in which equal layers are alike to the last op, so that few of them say what all cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..graph.graph import TrainGraph
from ..graph.repeats import Repeats
from ..plan.optimal.find import Solved

V = TypeVar("V")


@dataclass
class Even:
    """Gives every equal layer what the one in the middle has. The first and the last may have been solved for
    otherwise, as their neighbours are: what they lose by this is small beside all layers, and is simulated.
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

    def __call__(self, made: Solved) -> Solved:
        """`made`, evened."""
        pins = made.found.pins
        expanded = tuple(self._names(pins.expanded))
        pins = replace(pins, results=self._even(pins.results), ways=self._even(pins.ways), expanded=expanded)
        params, storage = self._even(made.found.params), self._even(made.found.storage)
        return replace(made, found=replace(made.found, pins=pins, params=params, storage=storage))

    def _even(self, given: Mapping[str, V]) -> dict[str, V]:
        out: dict[str, V] = {}
        for name, value in given.items():
            out |= dict.fromkeys(self._names([name]), value)
        return out

    def _names(self, given: Iterable[str]) -> dict[str, None]:
        """Of names, those outside of equal layers, and the equals of those in the middle one."""
        out: dict[str, None] = {}
        for name in given:
            base, dashes, part = (name, "", "") if name in self.inside else name.partition("__")
            if base in self.middle:
                out |= dict.fromkeys(f"{one}{dashes}{part}" for one in self.slots[self.middle[base]])
            elif base not in self.inside:
                out[name] = None
        return out
