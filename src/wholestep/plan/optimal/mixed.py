"""Data parallelism that stores each parameter in a way of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...graph.graph import Role, TrainGraph
from ...mesh import Mesh
from ..data_parallel import DataParallel, stored
from ..strategy import Resting
from .storage import STORAGES, storage_named


@dataclass(frozen=True)
class Mixed(DataParallel):
    """`DataParallel` whose `style` holds for parameters that `storage` does not name. It names others with the way they
    are stored, a name of `STORAGES`.
    `said`: what was solved for that, in words; empty where all that `storage` names are exceptions.
    """

    storage: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    said: str = ""

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Where each parameter and its optimizer state rest."""
        out, axes = super().resting(graph, mesh, before), self.axes(mesh)
        for given in graph.inputs:
            if given.role is Role.PARAM and given.name in self.storage:
                style = storage_named(self.storage[given.name]).style
                out[given.name] = stored(style, given, before[given.name].param, mesh, axes)
        return out

    @property
    def gathered_again(self) -> tuple[str, ...]:
        """Parameters that are gathered again for the backward, whatever is kept of others."""
        return tuple(name for name, how in self.storage.items() if storage_named(how).again)

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        on = ", ".join(self.axes(mesh))
        if self.said:
            return f"each parameter by itself on {on} ({self.shares}), {self.how}"
        return f"{self.kind.name} on {on} but for some parameters ({self.shares}), {self.how}"

    @property
    def shares(self) -> str:
        """How many parameters are stored in which way."""
        counted = Counter(self.storage.values())
        return ", ".join(f"{counted[s.name]} {s.name.replace(', ', ' ')}" for s in STORAGES if counted[s.name])
