"""A solution of the layout problem as a strategy: storage of parameters and op strategies along one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..graph.graph import TrainGraph
from ..layout import AxisState
from ..mesh import Mesh
from .data_parallel import BatchDim, batch_dim
from .decision import Decision
from .strategy import BatchCut, Pins, Resting


@dataclass(frozen=True)
class SolvedLayouts:
    """Tensor parallelism along `axis` by the solution of an integer program. Tensors that it does not name follow by
    propagation. It holds for the graph that was solved, and for the same graph with fewer equal layers.

    Args:
        axis: the mesh axis.
        params: the state of each parameter between steps along it.
        found: pins of ops, and the ops that are decomposed.
        solution: describes the integer program.
        input_dim: as in `TensorParallel`.
    """

    axis: str
    params: Mapping[str, AxisState]
    found: Pins = field(repr=False, default_factory=Pins)
    solution: str = ""
    input_dim: BatchDim | None = None

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The one axis used. Raises MeshError where it does not exist."""
        mesh.axis_size(self.axis)
        return (self.axis,)

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Storage layouts of the parameters that the step has, and of their optimizer state."""
        out = dict(before)
        for name in self.params.keys() & before.keys():
            have, state = before[name], self.params[name]
            out[name] = Resting(have.param.put(self.axis, state), have.state.put(self.axis, state))
        return out

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """The pins of the solution."""
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
        """Nothing: propagation checks each op strategy."""

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"tensor parallel on {self.axis}, layouts solved for"
