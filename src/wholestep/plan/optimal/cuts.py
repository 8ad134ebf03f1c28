"""A solution as a strategy: where parameters rest along one axis, and how single ops run along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...graph.graph import TrainGraph
from ...layout import AxisState
from ...mesh import Mesh
from ..data_parallel import BatchDim, batch_dim
from ..plan import Decision
from ..strategy import BatchCut, Pins, Resting


@dataclass(frozen=True)
class Cuts:
    """Layers are cut over the ranks of `axis` as a solver found best: `params` by the state in which they rest, ops by
    `found`. What is not named follows by propagation. It fits the graph that it was found for.

    Args:
        axis: the mesh axis.
        params: how each parameter rests along it.
        found: pins of ops, and which ops are written out.
        said: what was solved, in words.
        input_dim: as in `TensorParallel`.
    """

    axis: str
    params: Mapping[str, AxisState]
    found: Pins = field(repr=False, default_factory=Pins)
    said: str = ""
    input_dim: BatchDim | None = None

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The one axis used. Raises MeshError where it does not exist."""
        mesh.axis_size(self.axis)
        return (self.axis,)

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Parameters, and their state with them; of a step with fewer layers those that it has."""
        out = dict(before)
        for name in self.params.keys() & before.keys():
            have, state = before[name], self.params[name]
            out[name] = Resting(have.param.put(self.axis, state), have.state.put(self.axis, state))
        return out

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """What was found."""
        return self.found if mesh.axis_size(self.axis) > 1 else Pins()

    @property
    def shares_batches(self) -> bool:
        """Where `input_dim` is given."""
        return self.input_dim is not None

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """The dim `input_dim`, if one is given."""
        dim = None if self.input_dim is None else batch_dim(self.input_dim, name, ndim)
        return None if dim is None else BatchCut(dim, (self.axis,))

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Nothing: ways are checked one by one as they are taken."""

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"tensor parallel on {self.axis}, layouts solved for"
