"""Steps of a deep model by batch and number of micro-batches, captured with few layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from wholestep.cost.software import OWN, Software
from wholestep.errors import PlanError
from wholestep.graph.graph import LocalGraph, TrainGraph
from wholestep.hardware.hardware import Hardware
from wholestep.mesh import Mesh
from wholestep.passes.base import run_passes
from wholestep.plan.make_plan import stored_bytes
from wholestep.plan.plan import Plan
from wholestep.plan.strategies import Strategies
from wholestep.planner.bounds import Costs, costs_of
from wholestep.planner.folded_step import FEWEST, CaptureStep, FoldedStep, from_few_layers
from wholestep.planner.recompute_kinds import RecomputeKind, passes_of, recomputing
from wholestep.planner.resolve import planned_program

from .micro_batch_bytes import peak_beside_gradients

Programs = tuple[tuple[Plan, LocalGraph], ...]


@dataclass(frozen=True)
class MadeCosts:
    """Costs of a step, and the most bytes that a rank holds besides gradients of parameters, which may add up."""

    costs: Costs
    beside_gradients_bytes: int


@dataclass(frozen=True)
class MadeStep:
    """Plans and programs of a step: of all layers (`pair` is None), or of two numbers of layers. `programs` recompute,
    and are not scheduled; `kind_costs` are their costs.
    """

    step: FoldedStep | None
    pair: tuple[int, int] | None
    planned: Programs
    hardware: Hardware
    software: Software = OWN
    programs: dict[RecomputeKind, Programs] = field(default_factory=dict[RecomputeKind, "Programs"], compare=False)
    kind_costs: dict[RecomputeKind, MadeCosts] = field(default_factory=dict[RecomputeKind, "MadeCosts"], compare=False)

    def of(self, kind: RecomputeKind) -> Programs:
        """Plans and programs that recompute, not scheduled."""
        if kind not in self.programs:
            self.programs[kind] = tuple((plan, run_passes(local, recomputing(kind))) for plan, local in self.planned)
        return self.programs[kind]

    def costs(self, kind: RecomputeKind) -> MadeCosts:
        """Costs of the whole step with a kind of recomputation."""
        if kind not in self.kind_costs:
            planned, passes = self.of(kind), passes_of("none", self.hardware, software=self.software)
            if self.step is None or self.pair is None:
                (plan, local), *_ = planned
                programs = [run_passes(local, passes)]
                costs = costs_of(programs[0], plan, self.hardware, self.software)
            else:
                programs = self.step.scheduled(self.pair, planned, passes)
                plans = [plan for plan, _ in planned]
                costs = self.step.costs_from(self.pair, list(zip(plans, programs, strict=True)))
            beside = self._whole([peak_beside_gradients(program) for program in programs])
            self.kind_costs[kind] = MadeCosts(costs, round(beside))
        return self.kind_costs[kind]

    def whole(self, quantity: Callable[[LocalGraph], float], kind: RecomputeKind = "none") -> float:
        """A quantity that is linear in the number of layers, of the whole step before it is scheduled."""
        return self._whole([quantity(local) for _, local in self.of(kind)])

    def _whole(self, quantities: Sequence[float]) -> float:
        if self.step is None or self.pair is None:
            return quantities[0]
        return self.step.whole(self.pair, (quantities[0], quantities[1]))


@dataclass
class ShortSteps:
    """The steps of a model with `layers` layers. One with a micro-batch is captured with few of them, or with all where
    these are not equal; one with several is captured with the numbers of layers that the first is folded to. What was
    planned once is kept. `model`: with all layers, which are compared before few stand for them.
    """

    capture: CaptureStep
    layers: int
    hardware: Hardware
    software: Software = OWN
    model: nn.Module | None = None
    steps: dict[int, FoldedStep | TrainGraph] = field(default_factory=dict[int, FoldedStep | TrainGraph])
    several: dict[tuple[int, int, int], TrainGraph] = field(default_factory=dict[tuple[int, int, int], TrainGraph])
    planned: dict[tuple[object, ...], MadeStep] = field(default_factory=dict[tuple[object, ...], MadeStep])

    def step(self, batch: int) -> FoldedStep | TrainGraph:
        """The step with few layers; all of them where it cannot be extrapolated from few."""
        if batch not in self.steps:
            capture = partial(self.capture, batch, 1)
            self.steps[batch] = from_few_layers(capture, self.layers, self.hardware, self.software, self.model)
        return self.steps[batch]

    def _graph(self, step: FoldedStep | TrainGraph, blocks: int | None, batch: int, micro_batches: int) -> TrainGraph:
        """The step with so many equal blocks, or with all layers."""
        if micro_batches == 1:
            return step.with_blocks(blocks or step.count) if isinstance(step, FoldedStep) else step
        layers = self.layers
        if isinstance(step, FoldedStep) and blocks is not None:
            layers -= (step.count - blocks) * step.repeats.period
        key = batch, micro_batches, layers
        if key not in self.several:
            self.several[key] = self.capture(batch, micro_batches, layers)
        return self.several[key]

    def whole_step(self, batch: int) -> TrainGraph:
        """The step of one micro-batch with all layers."""
        return self._graph(self.step(batch), None, batch, 1)

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
        step = self.step(batch)
        pair = step.blocks(mesh, strategies) if isinstance(step, FoldedStep) else None
        return self._of(step, pair, mesh, strategies, batch, micro_batches)

    def _of(
        self, step: FoldedStep | TrainGraph, pair: tuple[int, int] | None, mesh: Mesh, strategies: Strategies,
        batch: int, micro_batches: int,
    ) -> MadeStep:  # fmt: skip
        key = mesh, repr(strategies), batch, micro_batches, pair
        if key not in self.planned:
            graphs = [self._graph(step, blocks, batch, micro_batches) for blocks in (pair or (None,))]
            planned = tuple(planned_program(graph, mesh, strategies, None, self.hardware) for graph in graphs)
            folded = step if isinstance(step, FoldedStep) else None
            self.planned[key] = MadeStep(folded, pair, planned, self.hardware, self.software)
        return self.planned[key]

    def whole(self, mesh: Mesh, strategies: Strategies, batch: int, kind: RecomputeKind) -> LocalGraph:
        """The program of one micro-batch with all layers, after all passes.

        Raises:
            PlanError: it cannot be planned.
        """
        local = planned_program(self.whole_step(batch), mesh, strategies, None, self.hardware)[1]
        return run_passes(local, passes_of(kind, self.hardware, software=self.software), owned=True)

    def stored_bytes(self, mesh: Mesh, strategies: Strategies) -> int:
        """Bytes that a rank keeps between steps.

        Raises:
            PlanError: the strategy cannot store the model.
        """
        step = self.step(min(self.steps, default=1))
        if isinstance(step, FoldedStep):
            return step.stored_bytes(mesh, strategies, None)
        return stored_bytes(step, mesh, strategies, None)


def repeated(single: Costs, double: Costs, micro_batches: int) -> Costs:
    """Costs of a step with so many micro-batches from those with one and with two. Each further one takes what the
    second takes; the peak is that of one.
    """
    if micro_batches < 1:
        raise PlanError(f"{micro_batches} micro-batches", "at least 1", "correct it")
    grown = single.towards(double, micro_batches - 1)
    return replace(grown, rest_bytes=single.rest_bytes, peak_bytes=single.peak_bytes, by_kind=single.by_kind)


def grown(step: Costs, smaller: Costs, larger: Costs) -> Costs:
    """`step` plus `larger` minus `smaller`: what a larger step costs besides, known from smaller ones."""
    names = ("peak_bytes", "sent_bytes", "collectives", "step_s", "exposed_s", "model_s", "again_s", "host_s")
    added = {name: getattr(step, name) + getattr(larger, name) - getattr(smaller, name) for name in names}
    kinds = {**step.by_kind, **larger.by_kind}
    sizes = {k: step.by_kind.get(k, 0) + larger.by_kind.get(k, 0) - smaller.by_kind.get(k, 0) for k in kinds}
    positive = {kind: size for kind, size in sizes.items() if size > 0}
    return replace(step, **added, by_kind=positive, reserved_bytes=None)


def accumulating(single: MadeCosts, gradient_bytes: int) -> Costs:
    """Costs of one micro-batch of several: a rank holds `gradient_bytes` that add up, and the most that it holds
    besides gradients.
    """
    peak = max(single.beside_gradients_bytes + gradient_bytes, single.costs.peak_bytes)
    by_kind = dict(single.costs.by_kind)
    by_kind["gradient"] = by_kind.get("gradient", 0) + max(peak - single.costs.peak_bytes, 0)
    return replace(single.costs, peak_bytes=peak, by_kind=by_kind)
