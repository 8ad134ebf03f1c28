"""Steps of a deep model by batch and number of micro-batches, captured with few layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from wholestep.cost.memory import curve
from wholestep.cost.software import OWN, Software
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph, Role, TrainGraph
from wholestep.graph.storage import Storage, storages
from wholestep.hardware.hardware import Hardware
from wholestep.mesh import Mesh
from wholestep.passes.base import run_passes
from wholestep.passes.forward_backward import forward_backward
from wholestep.plan.make_plan import stored_bytes
from wholestep.plan.plan import Plan
from wholestep.plan.strategies import Strategies
from wholestep.planner.bounds import Costs, costs_of
from wholestep.planner.folded_step import FEWEST, FoldedStep, from_few_layers
from wholestep.planner.recompute_kinds import RecomputeKind, passes_of, recomputing
from wholestep.planner.resolve import planned_program

Programs = tuple[tuple[Plan, LocalGraph], ...]


@dataclass(frozen=True)
class ShortStep:
    """Plans and programs of a step: of all layers (`pair` is None), or of two numbers of layers. `programs` recompute,
    and are not scheduled; `kind_costs` are their costs.
    """

    step: FoldedStep | None
    pair: tuple[int, int] | None
    planned: Programs
    hardware: Hardware
    software: Software = OWN
    programs: dict[RecomputeKind, Programs] = field(default_factory=dict[RecomputeKind, "Programs"], compare=False)
    kind_costs: dict[RecomputeKind, tuple[Costs, int]] = field(default_factory=dict[RecomputeKind, "tuple[Costs, int]"])

    def of(self, kind: RecomputeKind) -> Programs:
        """Plans and programs that recompute, not scheduled."""
        if kind not in self.programs:
            self.programs[kind] = tuple((plan, run_passes(local, recomputing(kind))) for plan, local in self.planned)
        return self.programs[kind]

    def costs(self, kind: RecomputeKind) -> tuple[Costs, int]:
        """Costs of the whole step with a kind of recomputation, and the most bytes that a rank holds besides gradients
        of parameters, which may add up.
        """
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
            self.kind_costs[kind] = costs, round(self._whole([peak_beside_gradients(program) for program in programs]))
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
    """The steps of a model with `layers` layers, which `capture` builds: from sequences of a rank at a time,
    micro-batches and layers. One with a micro-batch is captured with few of them, or with all where these are not
    equal; one with several is captured with the numbers of layers that the first is folded to. What was planned once is
    kept. `model`: with all layers, which are compared before few stand for them.
    """

    capture: Callable[[int, int, int], TrainGraph]
    layers: int
    hardware: Hardware
    software: Software = OWN
    model: nn.Module | None = None
    steps: dict[int, FoldedStep | TrainGraph] = field(default_factory=dict[int, FoldedStep | TrainGraph])
    several: dict[tuple[int, int, int], TrainGraph] = field(default_factory=dict[tuple[int, int, int], TrainGraph])
    planned: dict[tuple[object, ...], ShortStep] = field(default_factory=dict[tuple[object, ...], ShortStep])

    def step(self, batch: int) -> FoldedStep | TrainGraph:
        """The step with few layers; all of them where it cannot be extrapolated from few."""
        if batch not in self.steps:
            capture = partial(self.capture, batch, 1)
            self.steps[batch] = from_few_layers(capture, self.layers, self.hardware, self.software, self.model)
        return self.steps[batch]

    def costs(self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int, kind: RecomputeKind) -> Costs:
        """Costs of a step. What one micro-batch adds to another is known from the fewest layers, and so are gradients
        that add up.

        Raises:
            PlanError: the strategy cannot be planned.
        """
        step = self.step(batch)
        pair = step.blocks(mesh, strategies) if isinstance(step, FoldedStep) else None
        first, beside_bytes = self._of(mesh, strategies, batch, 1, pair).costs(kind)
        if micro_batches == 1:
            return first
        one, two = (self.fewest(mesh, strategies, batch, count) for count in (1, 2))
        added_bytes = max(beside_bytes + round(two.whole(held_between)) - first.peak_bytes, 0)
        return repeated(first, one.costs(kind)[0], two.costs(kind)[0], micro_batches, added_bytes)

    def fewest(self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int = 1) -> ShortStep:
        """Plan and program with the fewest layers: what has no buckets is exact already, and so is what one micro-batch
        adds to another, where buckets are the same.
        """
        pair = FEWEST if isinstance(self.step(batch), FoldedStep) else None
        return self._of(mesh, strategies, batch, micro_batches, pair)

    def _of(
        self, mesh: Mesh, strategies: Strategies, batch: int, micro_batches: int, pair: tuple[int, int] | None
    ) -> ShortStep:
        key = mesh, repr(strategies), batch, micro_batches, pair
        if key not in self.planned:
            graphs = [self._graph(batch, micro_batches, blocks) for blocks in (pair or (None,))]
            planned = tuple(planned_program(graph, mesh, strategies, None, self.hardware) for graph in graphs)
            folded = step if isinstance(step := self.step(batch), FoldedStep) else None
            self.planned[key] = ShortStep(folded, pair, planned, self.hardware, self.software)
        return self.planned[key]

    def _graph(self, batch: int, micro_batches: int, blocks: int | None = None) -> TrainGraph:
        """The step with so many equal blocks, or with all layers."""
        step, layers = self.step(batch), self.layers
        if micro_batches == 1:
            return step.with_blocks(blocks or step.count) if isinstance(step, FoldedStep) else step
        if isinstance(step, FoldedStep) and blocks is not None:
            layers -= (step.count - blocks) * step.repeats.period
        key = batch, micro_batches, layers
        if key not in self.several:
            self.several[key] = self.capture(batch, micro_batches, layers)
        return self.several[key]

    def whole(self, mesh: Mesh, strategies: Strategies, batch: int, kind: RecomputeKind) -> LocalGraph:
        """The program of one micro-batch with all layers, after all passes.

        Raises:
            PlanError: it cannot be planned.
        """
        local = planned_program(self._graph(batch, 1), mesh, strategies, None, self.hardware)[1]
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


def repeated(step: Costs, one: Costs, two: Costs, micro_batches: int, added_bytes: int) -> Costs:
    """Costs of a step with so many micro-batches, two or more, from those with one, and from what the second adds to
    another step. Each further one takes what the second takes. `added_bytes`: of gradients at the peak.
    """
    names = ("sent_bytes", "collectives", "step_s", "exposed_s", "model_s", "again_s", "host_s")
    more: dict[str, Any] = {
        name: max(getattr(step, name) + (micro_batches - 1) * (getattr(two, name) - getattr(one, name)), 0)
        for name in names
    }
    kinds = {**step.by_kind, "gradient": step.by_kind.get("gradient", 0) + added_bytes}
    return replace(step, **more, peak_bytes=step.peak_bytes + added_bytes, by_kind=kinds, reserved_bytes=None)


def peak_beside_gradients(program: LocalGraph) -> int:
    """The most bytes that a rank holds besides the gradients of parameters, which a backward leaves and others read,
    and what is made of them.
    """
    varying, main = forward_backward(program, later_stages=False)
    all_storages, calls = storages(program.graph), sum(node.op == "call_function" for node in program.graph.nodes)
    gradients = {
        (storage.node, storage.index) for storage in all_storages
        if storage.node in main and meta.is_backward(storage.node)
        and any(user in varying and user not in main for member in storage.members for user in member.users)
    }  # fmt: skip

    def counts(storage: Storage) -> bool:
        node, index = storage.node, storage.index
        return storage.first < 0 or node not in varying or (node in main and (node, index) not in gradients)

    return max(curve([storage for storage in all_storages if counts(storage)], calls), default=0)


def held_between(local: LocalGraph) -> int:
    """Bytes of what depends on the batch that a rank holds when it begins the last of several micro-batches, each an
    input of its own: gradients that add up, as they are then. Some are whole on each rank until they are summed along
    tensor parallelism.
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    batches = [node for graph_input, node in local.placeholders() if graph_input.role is Role.BATCH]
    begins = max((min(place[user] for user in node.users) for node in batches if node.users), default=0)
    varying, _ = forward_backward(local, later_stages=False)
    live = [storage for storage in storages(local.graph) if storage.node in varying and 0 <= storage.first < begins]
    return sum(storage.size_bytes for storage in live if storage.last is not None and storage.last >= begins)
