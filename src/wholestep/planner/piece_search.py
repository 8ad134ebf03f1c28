"""Chooses the number of micro-batches: the fastest step, by simulation, that fits into a budget of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..backend.default_passes import default_passes
from ..graph.gc_control import existing_objects_frozen
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..passes.base import Pass
from ..plan.micro_batches import MicroBatches
from ..plan.strategies import Strategies
from .candidates import Template
from .evaluate import Evaluator
from .folded_step import fold_step
from .search import Search
from .search_result import SearchResult, Watch, unwatched


@dataclass(frozen=True)
class PieceSearch:
    """Chooses the number of pieces of strategies that are otherwise given.

    Args:
        strategies: with `MicroBatches("auto")` among them.
        budget_bytes: bytes that the tensors of a rank may take.
        may_regather: gathered parameters may be gathered again, for each piece or in the backward.
        hardware: to predict times for; by default the hardware that `search` is given.
    """

    strategies: Strategies
    budget_bytes: int
    may_regather: bool = True
    hardware: Hardware | None = None

    def describe(self, mesh: Mesh) -> str:
        """One line that is the same on all ranks that ask for the same."""
        return f"{self.strategies.describe(mesh)} within {self.budget_bytes:,} bytes"

    def base(self, mesh: Mesh | None) -> Strategies:
        """How ranks share batches, whatever is chosen."""
        return self.strategies

    def candidates(self, mesh: Mesh, same_batches: bool = True) -> list[tuple[Mesh, Template]]:
        """The step on whole batches: with gathered parameters kept, and where it may, gathered again."""
        uncut, data = self.strategies.in_pieces(MicroBatches(1)), self.strategies.data
        if data is None or not data.kind.gathers_parameters or not self.may_regather:
            return [(mesh, Template(data.kind.name if data else "one batch", uncut.parts))]
        names = {False: f"{data.kind.name}, kept", True: f"{data.kind.name}, re-gathered"}
        return [(mesh, Template(name, uncut.gathering(again).parts)) for again, name in names.items()]

    @existing_objects_frozen()
    def search(
        self, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout] | None = None, same_batches: bool = True,
        hardware: Hardware | None = None, passes: Sequence[Pass] | None = None, watch: Watch | None = None,
    ) -> SearchResult:  # fmt: skip
        """Every number that was tried with its outcome, and the winner's plan. Arguments as of `Auto.search`.

        Raises:
            PlanError: none fits, or none can be planned.
        """
        hardware = hardware or self.hardware or Hardware.default()
        passes = tuple(default_passes(hardware) if passes is None else passes)
        evaluator = Evaluator(
            graph, hardware, self.budget_bytes, passes, True, placed, watch or unwatched,
            fold_step(graph, hardware, placed), micro_batches=self.strategies.micro_batches,
            may_regather=self.may_regather,
        )  # fmt: skip
        search = Search(evaluator).run(self.candidates(mesh))
        return replace(search, by='MicroBatches("auto")')
