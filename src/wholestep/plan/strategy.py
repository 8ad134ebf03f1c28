"""The interface of strategies: storage layouts of parameters, sharding of batches, fixed layouts of some results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..graph.graph import TrainGraph
from ..layout import AxisState, Layout
from ..mesh import Mesh
from .decision import Decision

if TYPE_CHECKING:
    from .plan import Plan

States = Mapping[str, AxisState]


@dataclass(frozen=True)
class Pins:
    """Layouts that a strategy fixes along its axes; nodes by name, as in `graph.graph.nodes`.

    `results`: layouts of results, by node. `reads`: layouts of operands, by reader and operand. `op_strategies`: names
    of an `OpStrategy` for each group of a node's rule, by node and axis. `decomposed`: ops to decompose first; nodes in
    `op_strategies` are not decomposed. `owners`: of nodes that only some ranks run, who owns their results.

    Example:
        >>> ws.Pins({"addmm": {"tp": ws.AxisState("S", 1)}})  # columns of the result of %addmm are sharded over tp
    """

    results: Mapping[str, States] = field(default_factory=dict[str, States])
    reads: Mapping[tuple[str, str], States] = field(default_factory=dict[tuple[str, str], States])
    op_strategies: Mapping[str, Mapping[str, tuple[str, ...]]] = field(
        default_factory=dict[str, Mapping[str, tuple[str, ...]]]
    )
    decomposed: tuple[str, ...] = ()
    owners: Mapping[str, States] = field(default_factory=dict[str, States])


@dataclass(frozen=True)
class BatchCut:
    """Dim `dim` of a batch tensor is sharded over `axes`, the first outermost.

    Example:
        >>> ws.BatchCut(0, ("dp",))
        BatchCut(dim=0, axes=('dp',))
    """

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """Storage layouts of one parameter, and of its optimizer state, which its reduced gradient has too.

    Example:
        >>> rows = ws.Layout((("dp",), ()))  # dim 0 sharded over dp
        >>> ws.Stored(rows, rows)
    """

    param: Layout
    state: Layout


@runtime_checkable
class Strategy(Protocol):
    """Uses some axes of a mesh. Strategies compose: each refines the layouts of the strategies before it. What a class
    of this one does not say stays as it is: parameters, activations, the batch.

    Example:
        >>> class SharedTokens(ws.Strategy):  # with fields: a frozen dataclass
        ...     def axes(self, mesh):
        ...         return ("seq",)
        ...     def batch_cut(self, mesh, name, ndim):
        ...         return ws.BatchCut(1, ("seq",)) if ndim > 1 else None
        ...     def describe(self, mesh):
        ...         return "tokens on seq"
        >>> plan = ws.plan(graph, "seq=4", SharedTokens())
    """

    @abstractmethod
    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes it uses on `mesh`. Raises MeshError or PlanError if it does not fit."""
        ...

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Storage layouts of each parameter; `before` is those of the strategies before, at first replicated."""
        return dict(before)

    def storage_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which parameters are sharded in storage only: they are gathered where they are read."""
        return ()

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Results and operands whose layout it fixes along its axes."""
        return Pins()

    @property
    def shares_batches(self) -> bool:
        """True if ranks may get parts of one batch (`batch_cut`)."""
        return type(self).batch_cut is not Strategy.batch_cut

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """How its axes shard the batch tensor `name`; None where all ranks have the same one, or each another."""
        return None

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Raise PlanError if the completed plan breaks a promise of the strategy."""

    @abstractmethod
    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """Chooses strategies (`wholestep.Auto`)."""

    def choose(self, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout] | None = None) -> Plan:
        """The plan of the strategies that it chooses. Raises PlanError if none fits."""
        ...
