"""Pipelines of a deep model from steps with few layers: three short stages stand for any number of them.

The first stage, the last one, and one between them are planned with one and with two of the equal layers each. What a
stage does is linear in its layers, so that costs what the distinct stages cost, however many ranks and layers there
are. The order of blocks is then simulated with all stages and all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from ..backend.pipeline import pipeline
from ..cost.stage_costs import BlockPrices
from ..cost.stage_orders import APART, BlockCost
from ..cost.stage_work import StageWork, exchanges, is_chain, work_of
from ..cost.staged import Exchange, StagedStep, chain, staged_step
from ..errors import PlanError
from ..graph import meta
from ..graph.folding.repeats import find_repeats
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.stage_part import transfer
from ..hardware.hardware import Hardware
from ..mesh import Axis, Mesh
from ..partition.lower import lowered
from ..partition.stage_blocks import StageCut
from ..partition.stage_program import stage_program
from ..passes.base import Pass, run_passes
from ..plan.micro_batches import MicroBatches
from ..plan.pipelines import Pipeline
from ..plan.strategies import Strategies, compose
from .bounds import Costs
from .folded_step import FoldedStep
from .resolve import plan_strategies
from .short_steps import CaptureStep

_PIECES = 2  # that a short step has: blocks are those of any number
_FEW, _MORE = 1, 2  # equal layers in each stage of the two short steps
_SHORT = 3  # stages of a short step: the first, one between, the last


def stage_passes() -> tuple[Pass, ...]:
    """The passes that `compile` applies to the program of a stage, without its schedule: merged collectives are not
    linear in layers. Those along other axes count one by one, where they start.
    """
    return pipeline(schedule=None)


@dataclass(frozen=True)
class StagedSetup:
    """A pipeline on a mesh: `strategies` beside it, and the stages. `layers`: equal layers of each stage, in the order
    of the forward; None: stages take about the same time.
    """

    mesh: Mesh
    strategies: Strategies
    layers: tuple[int, ...] | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The strategy along the axis of stages."""
        found = self.strategies.pipeline
        assert found is not None, "a setup with stages"
        return found

    @property
    def pieces(self) -> int:
        """Micro-batches. Raises PlanError where their number is left open."""
        found = next((part.pieces for part in self.strategies.parts if isinstance(part, MicroBatches)), 1)
        if not isinstance(found, int):
            raise PlanError("a pipeline with MicroBatches('auto')", "a number of micro-batches", "give micro_batches=")
        return found

    @property
    def ranks(self) -> int:
        """Ranks along the axis of stages."""
        return self.mesh.axis_size(self.pipeline.axis)

    @property
    def stages(self) -> int:
        """Stages, all chunks counted."""
        return self.ranks * self.pipeline.chunks_of_rank

    def short(self, stages: Sequence[Sequence[str]]) -> tuple[Mesh, Strategies]:
        """Mesh and strategies of a step with few stages, which have the modules `stages`."""
        axis = self.pipeline.axis
        mesh = Mesh(tuple(Axis(one.name, len(stages)) if one.name == axis else one for one in self.mesh.axes))
        few = Pipeline(axis, stages, _PIECES, "1f1b")
        parts = tuple(part for part in self.strategies.parts if not isinstance(part, (Pipeline, MicroBatches)))
        return mesh, compose([*parts, few])


@dataclass(frozen=True)
class ShortStages:
    """The program of a step with few stages, and that of each stage."""

    local: LocalGraph
    programs: tuple[LocalGraph, ...]
    known: dict[object, list[StageWork]] = field(default_factory=dict[object, list[StageWork]])

    def works(self, prices: BlockPrices, order: str) -> list[StageWork]:
        """What each stage does, at these prices."""
        key = prices, order in APART
        if key not in self.known:
            position = {name: i for i, name in enumerate(exchanges(self.local))}
            whole, apart = self.costs(prices, order)
            self.known[key] = [
                work_of(program, position, _own(whole, stage), _own(apart, stage), prices)
                for stage, program in enumerate(self.programs)
            ]
        return self.known[key]

    def costs(self, prices: BlockPrices, order: str) -> tuple[dict[str, BlockCost], dict[str, BlockCost]]:
        """What blocks take, and what they take with gradients of weights apart, for an order that moves those."""
        whole = _costs(self.local, prices, False)
        return whole, _costs(self.local, prices, True) if order in APART else whole


def _costs(local: LocalGraph, prices: BlockPrices, fillers: bool) -> dict[str, BlockCost]:
    loop = next(loop for node in local.graph.nodes if (loop := loop_of(node)) is not None and loop.stages is not None)
    axis = local.stage_axis
    return StageCut(loop, local.mesh.axis_size(axis), fillers).costs(axis, prices)


def _own(costs: dict[str, BlockCost], stage: int) -> list[BlockCost]:
    own = [block for block in costs.values() if block.stage == stage]
    return sorted(own, key=lambda block: (block.level, block.is_filler))


def _exchanges(local: LocalGraph, prices: BlockPrices, ranks: int) -> list[Exchange]:
    """What stages exchange outside of loops; the last stage of `local` is the last of `ranks`."""
    last, found = local.mesh.axis_size(local.stage_axis) - 1, list[Exchange]()
    for node in exchanges(local).values():
        if node.target is transfer:
            source, target = (ranks - 1 if at == last else cast(int, at) for at in node.args[1:3])
            us = prices.sent_us(meta.size_bytes(node), local.stage_axis)
            found.append(Exchange(source=source, target=target, us=us))
        else:
            found.append(Exchange(is_loop=loop_of(node) is not None))
    return found


def staged(local: LocalGraph, prices: BlockPrices, order: str, passes: Sequence[Pass] | None = None) -> StagedStep:
    """The step of a program of all stages, as `partition` returns it.

    Raises:
        PlanError: stages share no loop, or several.
    """
    loops = [node for node in local.graph.nodes if (loop := loop_of(node)) is not None and loop.stages is not None]
    if len(loops) != 1:
        found = f"a pipeline in which stages share {len(loops) or 'no'} loops over micro-batches"
        raise PlanError(found, "one loop", "give two or more micro-batches")
    found = loop_of(loops[0])
    assert found is not None, "a loop"
    short = _stages_of(local, passes)
    whole, apart = short.costs(prices, order)
    works = [[(work, None)] for work in short.works(prices, order)]
    return staged_step(works, whole, apart, _exchanges(local, prices, len(works)), found.pieces, order)


def _stages_of(local: LocalGraph, passes: Sequence[Pass] | None) -> ShortStages:
    count = local.mesh.axis_size(local.stage_axis)
    passes = stage_passes() if passes is None else passes
    return ShortStages(local, tuple(run_passes(stage_program(local, at), passes) for at in range(count)))


@dataclass
class ShortPipelines:
    """Pipelines of a model with `layers` layers, which `capture` builds with few of them: from the sequences in the
    batch, 1, and layers. `folded` and `short`: what was captured and planned, for models that differ in `layers` alone.
    """

    capture: CaptureStep
    layers: int
    hardware: Hardware
    folded: dict[int, tuple[FoldedStep, int]] = field(default_factory=dict[int, "tuple[FoldedStep, int]"])
    short: dict[object, ShortStages] = field(default_factory=dict[object, ShortStages])

    def step(
        self, setup: StagedSetup, batch: int, passes: Sequence[Pass] | None = None, prices: BlockPrices | None = None
    ) -> StagedStep:
        """The step for `batch` sequences of a rank at a time, simulated at `prices`, by default those of the hardware.
        All layers are captured where three stages do not stand for more of them.

        Raises:
            PlanError: the pipeline cannot be planned.
        """
        if setup.pieces < 2:
            raise PlanError("a pipeline of one micro-batch", "a loop over two or more", "raise micro_batches=")
        prices, passes = prices or BlockPrices(self.hardware, setup.mesh), passes or stage_passes()
        folded = self._folded(batch)
        found = None if folded is None else self._short(setup, folded, batch, passes)
        if folded is None or found is None:
            if setup.layers is not None:
                needed = "a chain of equal layers, as many as there are stages"
                raise PlanError("layers= of a step that three stages do not stand for", needed, "leave it out")
            return self._whole(setup, batch, passes, prices)
        order = setup.pipeline.schedule
        few, more = (short.works(prices, order) for short in found)
        layers = setup.layers or spread(few, more, folded.count, setup.stages)
        if len(layers) != setup.stages or sum(layers) != folded.count:
            text = f"{sum(layers)} layers in {len(layers)} stages"
            raise PlanError(text, f"{folded.count} in {setup.stages}", "correct layers=")
        works = [
            _with_layers(few, more, stage, setup.stages, count, folded.count) for stage, count in enumerate(layers)
        ]
        whole, apart = (chain(works, setup.ranks, fillers) for fillers in (False, True))
        by_rank = [
            [(works[stage], layers[stage] * folded.repeats.period)
             for stage in range(rank, setup.stages, setup.ranks)]
            for rank in range(setup.ranks)
        ]  # fmt: skip
        outside = _exchanges(found[0].local, prices, setup.ranks)
        return staged_step(by_rank, whole, apart, outside, setup.pieces, order)

    def _whole(self, setup: StagedSetup, batch: int, passes: Sequence[Pass], prices: BlockPrices) -> StagedStep:
        graph = self.capture(batch * setup.pieces, 1, self.layers)
        planned = plan_strategies(graph, setup.mesh, setup.strategies, None, self.hardware)
        return staged(lowered(graph, planned), prices, setup.pipeline.schedule, passes)

    def _folded(self, batch: int) -> FoldedStep | None:
        """The step with enough equal layers for the short stages; None where it has too few."""
        if batch not in self.folded:
            found = self._captured(batch, _SHORT * _MORE)
            if found is None:
                return None
            self.folded[batch] = found
        folded, layers = self.folded[batch]
        left_out, rest = divmod(self.layers - layers, folded.repeats.period)
        return None if rest or left_out < 0 else replace(folded, left_out=left_out)

    def _captured(self, batch: int, layers: int) -> tuple[FoldedStep, int] | None:
        layers = min(layers, self.layers)
        graph = self.capture(batch * _PIECES, 1, layers)
        repeats = find_repeats(graph)
        if repeats is not None and repeats.count >= _SHORT * _MORE:
            return FoldedStep(graph, repeats, self.hardware), layers
        if repeats is None or layers == self.layers:
            return None
        return self._captured(batch, layers + (_SHORT * _MORE - repeats.count) * repeats.period)

    def _short(
        self, setup: StagedSetup, folded: FoldedStep, batch: int, passes: Sequence[Pass]
    ) -> tuple[ShortStages, ShortStages] | None:
        """The two short steps; None where they do not stand for more stages."""
        count = min(setup.stages, _SHORT)
        parts = tuple(part for part in setup.strategies.parts if not isinstance(part, (Pipeline, MicroBatches)))
        made: list[ShortStages] = []
        for each in (_FEW, _MORE):
            mesh, strategies = setup.short([_modules(folded, each, at) for at in range(count)])
            key = mesh, repr(parts), batch, each, repr(passes)
            if key not in self.short:
                graph = folded.with_blocks(each * count)
                planned = plan_strategies(graph, mesh, strategies, None, self.hardware)
                self.short[key] = _stages_of(lowered(graph, planned), passes)
            made.append(self.short[key])
        few, more = made
        same = [type(node.target) for node in exchanges(few.local).values()] == [
            type(node.target) for node in exchanges(more.local).values()
        ]
        return (few, more) if same and is_chain(few.local) and is_chain(more.local) else None


def _modules(folded: FoldedStep, each: int, stage: int) -> list[str]:
    """The equal layers of a stage of a short step, by path."""
    repeats = folded.repeats
    first = repeats.first + stage * each * repeats.period
    return [f"{repeats.prefix}.{first + number}" for number in range(each * repeats.period)]


def _with_layers(
    few: Sequence[StageWork], more: Sequence[StageWork], stage: int, stages: int, count: int, layers: int
) -> StageWork:
    """The work of a stage with `count` of all equal `layers`: that of the first, the last, or one between them."""
    kind, short = 0 if stage == 0 else len(few) - 1 if stage == stages - 1 else 1, len(few)
    times, times_all = count - _FEW, layers / short - _FEW
    return few[kind].towards(more[kind], times / (_MORE - _FEW), times_all / (_MORE - _FEW))


def spread(few: Sequence[StageWork], more: Sequence[StageWork], layers: int, stages: int) -> tuple[int, ...]:
    """The equal layers of each stage, so that the longest one is as short as it can be: one after the other goes where
    it adds least. Every stage has one, but the first and the last, which have what stands around them.

    Raises:
        PlanError: there are too few.
    """

    def us(stage: int, count: int) -> float:
        return sum(block.us for block in _with_layers(few, more, stage, stages, count, layers).whole)

    found = [0, *[1] * (stages - 2), 0]
    if layers < sum(found):
        raise PlanError(f"{stages} stages of {layers} equal layers", f"at most {layers + 2}", "give fewer chunks")
    each = [(us(stage, 1), us(stage, 2) - us(stage, 1)) for stage in range(stages)]
    for _ in range(layers - sum(found)):
        at = min(range(stages), key=lambda stage: each[stage][0] + each[stage][1] * found[stage])
        found[at] += 1
    return tuple(found)


def costs_of_staged(made: StagedStep) -> Costs:
    """The costs of a step for `Figures`: bytes of the fullest stage, times of a rank on average."""
    full = made.fullest
    return Costs(
        full.rest_bytes, full.peak_bytes, made.sent_bytes, made.collectives, made.step_us / 1e6, made.waited_us / 1e6,
        made.model_us / 1e6, made.again_us / 1e6, 0.0, full.kinds, idle_s=made.bubble * made.step_us / 1e6,
    )  # fmt: skip
