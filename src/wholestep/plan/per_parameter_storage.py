"""Data parallelism with a storage option of its own for each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..graph.graph import Role, TrainGraph
from ..mesh import Mesh
from .data_parallel import DataParallel, stored
from .storage_styles import STYLES
from .strategy import Resting


@dataclass(frozen=True)
class StorageOption:
    """How data-parallel ranks store one parameter and its optimizer state. `regathers`: a sharded parameter is
    all-gathered a second time in the backward instead of being kept.
    """

    style: str
    regathers: bool = False

    @property
    def replicates_parameter(self) -> bool:
        """Each rank stores the whole parameter."""
        return not STYLES[self.style].gathers_parameters

    @property
    def replicates_state(self) -> bool:
        """Each rank stores the whole optimizer state."""
        return not STYLES[self.style].shards_state

    @property
    def is_hybrid(self) -> bool:
        """Sharded over the last axis, replicated over the others."""
        return STYLES[self.style].grouped

    def __str__(self) -> str:
        gathered = "re-gathered" if self.regathers else "kept"
        return self.style if self.replicates_parameter else f"{self.style} {gathered}"


REPLICATE = StorageOption("replicate")
STORAGE_OPTIONS = tuple(
    StorageOption(style.name, regathers)
    for style in STYLES.values()
    if style.searched and not style.shards_gradients  # styles that differ in gradients alone store a parameter alike
    for regathers in ((False, True) if style.gathers_parameters else (False,))
)


def storage_of(data: DataParallel) -> StorageOption:
    """The option by which the style of `data` stores most parameters."""
    kind = data.kind
    flags = (not kind.gathers_parameters, not kind.shards_state, kind.grouped)
    found = [o for o in STORAGE_OPTIONS if (o.replicates_parameter, o.replicates_state, o.is_hybrid) == flags]
    return found[-1 if data.reshard_after_forward else 0]


@dataclass(frozen=True)
class PerParameterStorage(DataParallel):
    """`DataParallel` whose `style` holds for the parameters that `storage` does not name.

    `solution` describes the integer program that `storage` solves; empty where `storage` names exceptions to `style`.
    """

    storage: Mapping[str, StorageOption] = field(default_factory=dict[str, StorageOption], repr=False)
    solution: str = ""

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Storage layouts of each parameter and its optimizer state."""
        out, axes = super().resting(graph, mesh, before), self.axes(mesh)
        for given in graph.inputs:
            if given.role is Role.PARAM and given.name in self.storage:
                style = STYLES[self.storage[given.name].style]
                out[given.name] = stored(style, given, before[given.name].param, mesh, axes)
        return out

    @property
    def regathered(self) -> tuple[str, ...]:
        """Parameters that are gathered a second time in the backward."""
        return tuple(name for name, option in self.storage.items() if option.regathers)

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        on = ", ".join(self.axes(mesh))
        if self.solution:
            return f"each parameter by itself on {on} ({self.shares}), {self.how}"
        return f"{self.kind.name} on {on} but for some parameters ({self.shares}), {self.how}"

    @property
    def shares(self) -> str:
        """The number of parameters of each storage option."""
        counted = Counter(self.storage.values())
        return ", ".join(f"{counted[option]} {option}" for option in STORAGE_OPTIONS if counted[option])
