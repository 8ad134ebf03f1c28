"""Steps of a deep model by batch and number of micro-batches, captured with few layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..errors import PlanError
from ..graph.graph import LocalGraph, TrainGraph
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..partition.lower import lowered
from ..passes.base import Pass
from ..plan.make_plan import stored_bytes
from ..plan.plan import Plan
from ..plan.strategies import Strategies
from .bounds import Costs, costs
from .folded_step import FEWEST, FoldedStep, fold_step
from .resolve import plan_strategies

CaptureStep = Callable[[int, int, int], TrainGraph]
"""From sequences of a rank at a time, micro-batches and layers, to the step."""


@dataclass(frozen=True)
class MadeStep:
    """Plans and programs of a step: of all layers (`pair` is None), or of two numbers of layers."""

    step: FoldedStep | None
    pair: tuple[int, int] | None
    made: tuple[tuple[Plan, LocalGraph], ...]

    def costs(self, passes: tuple[Pass, ...], hardware: Hardware) -> Costs:
        """Costs of the whole step after `passes`."""
        if self.step is None or self.pair is None:
            return costs(self.made[0][1], self.made[0][0], hardware, passes)
        return self.step.priced(self.pair, self.made, passes)

    def whole(self, found: Callable[[LocalGraph], float]) -> float:
        """A quantity that is linear in the number of layers, of the whole step."""
        values = [found(local) for _, local in self.made]
        return (
            values[0] if self.step is None or self.pair is None else self.step.whole(self.pair, (values[0], values[1]))
        )


@dataclass
class ShortSteps:
    """The steps of a model with `layers` layers. One with a micro-batch is captured with few of them, and again with
    more where a strategy needs that, or with all; one with several is captured with the numbers of layers that the
    first is folded to.
    """

    capture: CaptureStep
    layers: int
    hardware: Hardware
    known: dict[int, FoldedStep | TrainGraph] = field(default_factory=dict[int, FoldedStep | TrainGraph])
    several: dict[tuple[int, int, int], TrainGraph] = field(default_factory=dict[tuple[int, int, int], TrainGraph])

    def step(self, batch: int, layers: int = FEWEST[1] + 1) -> FoldedStep | TrainGraph:
        """The step with at least so many layers; all of them where it cannot be extrapolated from few."""
        found = self.known.get(batch)
        if found is None or (isinstance(found, FoldedStep) and found.repeats.layers < layers):
            self.known[batch] = found = self._captured(batch, layers)
        return found

    def _captured(self, batch: int, layers: int) -> FoldedStep | TrainGraph:
        if 2 * layers <= self.layers:
            folded = fold_step(self.capture(batch, 1, layers), self.hardware, layers_left_out=self.layers - layers)
            if folded is not None:
                return folded
        graph = self.capture(batch, 1, self.layers)
        return fold_step(graph, self.hardware) or graph

    def _graph(self, step: FoldedStep | TrainGraph, blocks: int | None, batch: int, micro_batches: int) -> TrainGraph:
        """The step with so many equal blocks, or with all layers."""
        if micro_batches == 1:
            whole = step.graph if isinstance(step, FoldedStep) else step
            return step.with_blocks(blocks) if isinstance(step, FoldedStep) and blocks is not None else whole
        layers = self.layers
        if isinstance(step, FoldedStep) and blocks is not None:
            layers -= (step.count - blocks) * step.repeats.period
        key = batch, micro_batches, layers
        if key not in self.several:
            self.several[key] = self.capture(batch, micro_batches, layers)
        return self.several[key]

    def fewest(self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int = 1) -> MadeStep:
        """Plan and program with the fewest layers: what has no buckets is exact already, and so is what one micro-batch
        adds to another, where buckets are the same.
        """
        step = self.step(batch)
        pair = FEWEST if isinstance(step, FoldedStep) else None
        return self._of(step, pair, mesh, strategies, batch, micro_batches)

    def made(self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int) -> MadeStep:
        """Plan and program for a strategy.

        Raises:
            PlanError: it cannot be planned.
        """
        step, pair = self.step(batch), None
        if isinstance(step, FoldedStep):
            pair = step.blocks(mesh, strategies)
            step = self.step(batch, self.layers if pair is None else pair[1] * step.repeats.period)
        return self._of(step, pair if isinstance(step, FoldedStep) else None, mesh, strategies, batch, micro_batches)

    def _of(
        self, step: FoldedStep | TrainGraph, pair: tuple[int, int] | None, mesh: Mesh, strategies: Strategies,
        batch: int, micro_batches: int,
    ) -> MadeStep:  # fmt: skip
        graphs = [self._graph(step, blocks, batch, micro_batches) for blocks in (pair or (None,))]
        made = tuple(_made(one, mesh, strategies, self.hardware) for one in graphs)
        return MadeStep(step if isinstance(step, FoldedStep) else None, pair, made)

    def stored_bytes(self, mesh: Mesh, strategies: Strategies) -> int:
        """Bytes that a rank keeps between steps.

        Raises:
            PlanError: the strategy cannot store the model.
        """
        step = self.step(min(self.known, default=1))
        if isinstance(step, FoldedStep):
            return step.stored_bytes(mesh, strategies, None)
        return stored_bytes(step, mesh, strategies, None)


def _made(graph: TrainGraph, mesh: Mesh, strategies: Strategies, hardware: Hardware) -> tuple[Plan, LocalGraph]:
    planned = plan_strategies(graph, mesh, strategies, None, hardware)
    return planned, lowered(graph, planned)


def repeated(one: Costs, two: Costs, micro_batches: int) -> Costs:
    """Costs of a step with so many micro-batches from those with one and with two. Each further one takes what the
    second takes; the peak is that of two, as gradients accumulate in place.
    """
    if micro_batches < 1:
        raise PlanError(f"{micro_batches} micro-batches", "at least 1", "correct it")
    grown = one.towards(two, micro_batches - 1)
    same = two if micro_batches > 1 else one
    return replace(grown, rest_bytes=same.rest_bytes, peak_bytes=same.peak_bytes, held=same.held)
