"""Predicts a deep pipeline from three short stages: the cost of a stage is linear in its layers.

The first stage, the last one, and one between them are planned with one and with two of the equal layers each. What a
stage does is linear in its layers, so that costs what the distinct stages cost, however many ranks and layers there
are. The order of blocks is then simulated with all stages and all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import cast

from torch import nn

from ..backend.default_passes import default_passes
from ..cost.block_runs import BlockCost
from ..cost.compute import precision_of
from ..cost.extrapolate import extrapolated
from ..cost.memory import peak_of_pieces
from ..cost.reserved import reserved_bytes
from ..cost.software import Software
from ..cost.stage_costs import BlockPrices, block_costs
from ..cost.stage_orders import APART
from ..cost.stage_work import StageWork, exchanges, is_chain, work_of
from ..cost.staged import Exchange, StagedStep, Variant, chain, staged_step
from ..cost.timeline import phase
from ..errors import PlanError
from ..graph import meta
from ..graph.folding.repeats import find_repeats
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.stage_part import transfer
from ..graph.written_out import blocks_in
from ..hardware.hardware import Hardware
from ..mesh import Axis, Mesh
from ..partition.stage_blocks import cuts_for, stages_of
from ..partition.stage_program import stage_program
from ..passes.base import Pass, run_passes
from ..passes.bucket import collective_traffic
from ..passes.context import CollectiveTraffic, Context
from ..passes.schedule import Schedule
from ..plan.pipelines import Pipeline
from ..plan.strategies import Strategies, compose
from .bounds import Costs
from .folded_step import CaptureStep, FoldedStep
from .resolve import planned_program

Traffic = Sequence[CollectiveTraffic] | None
_PIECES = 2  # that a short step has: blocks are those of any number
_FEW, _MORE = 1, 2  # equal layers in each stage of the two short steps: with more, no prediction was nearer
_SHORT = 3  # stages of a short step: the first, one between, the last


def stage_passes(mesh: Mesh, axis: str, prices: BlockPrices) -> tuple[Pass, ...]:
    """The passes that `compile` applies to the program of a stage, with the overlap that the software has."""
    schedule = Schedule(prices.hardware) if mesh.size > mesh.axis_size(axis) else None
    return default_passes(schedule=schedule, software=prices.software)


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
        strategy = self.strategies.pipeline
        assert strategy is not None, "a setup with stages"
        return strategy

    @property
    def pieces(self) -> int:
        """Micro-batches. Raises PlanError where their number is left open."""
        return self.strategies.pieces

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
        stage_axis = self.pipeline.axis
        mesh = Mesh(tuple(Axis(axis.name, len(stages)) if axis.name == stage_axis else axis for axis in self.mesh.axes))
        pipe = Pipeline(stage_axis, stages, _PIECES, "gpipe")
        return mesh, compose([*self.strategies.beside_stages, pipe])


@dataclass
class ShortStages:
    """The program of a step with few stages; kept: those of each stage, before passes and after, its blocks with what
    they take at some prices, and what stages do.
    """

    local: LocalGraph
    priced: dict[object, dict[str, BlockCost]] = field(default_factory=dict[object, "dict[str, BlockCost]"])
    plain: dict[bool, list[LocalGraph]] = field(default_factory=dict[bool, "list[LocalGraph]"])
    passed: dict[object, LocalGraph] = field(default_factory=dict[object, LocalGraph])
    stage_works: dict[object, list[StageWork]] = field(default_factory=dict[object, "list[StageWork]"])

    def works(
        self, prices: BlockPrices, apart: bool, passes: Sequence[Pass], traffic: Traffic = None
    ) -> list[StageWork]:
        """What each stage does, at these prices, in programs that went through `passes`; `apart`: with gradients of
        weights in blocks of their own. `traffic`: of each stage in the step that this one stands for, from which
        buckets are sized; None: what it carries here.
        """
        key = prices, apart, repr(passes), None if traffic is None else tuple(traffic)
        if key not in self.stage_works:
            position = {name: i for i, name in enumerate(exchanges(self.local))}
            costs, programs = self.costs(prices, apart, passes, traffic), self._ran(apart, passes, traffic)
            self.stage_works[key] = [
                work_of(plain, program, position, _own(costs, stage), prices)
                for stage, (plain, program) in enumerate(zip(self.programs(False), programs, strict=True))
            ]
        return self.stage_works[key]

    @property
    def count(self) -> int:
        """The number of stages."""
        return self.local.mesh.axis_size(self.local.stage_axis)

    def programs(self, apart: bool) -> list[LocalGraph]:
        """The program of each stage before passes; `apart`: with gradients of weights in blocks of their own."""
        if apart not in self.plain:
            together = _with_blocks(self.local, apart)
            self.plain[apart] = [stage_program(together, at) for at in range(self.count)]
        return self.plain[apart]

    def traffic(self) -> list[CollectiveTraffic]:
        """What each stage reduces, and gathers more than once."""
        return [collective_traffic(program) for program in self.programs(False)]

    def costs(
        self, prices: BlockPrices, apart: bool, passes: Sequence[Pass], traffic: Traffic = None
    ) -> dict[str, BlockCost]:
        """Costs of blocks with weight gradients inside the backward, or apart from it (zero-bubble orders)."""
        key = prices, apart, repr(passes), None if traffic is None else tuple(traffic)
        if key not in self.priced:
            blocks = [blocks_in(program.graph.nodes) for program in self._ran(apart, passes, traffic)]
            self.priced[key] = block_costs(blocks, self.local.stage_axis, prices)
        return self.priced[key]

    def busy_us(self, prices: BlockPrices) -> list[float]:
        """Microseconds of each stage for a piece, before passes."""
        costs = self.costs(prices, False, ()).values()
        return [sum(block.us for block in costs if block.stage == stage) for stage in range(self.count)]

    def _ran(self, apart: bool, passes: Sequence[Pass], traffic: Traffic) -> list[LocalGraph]:
        """The program of each stage after passes, with buckets that are sized for `traffic`."""
        programs = list[LocalGraph]()
        for stage, program in enumerate(self.programs(apart)):
            context = Context(traffic=None if traffic is None else traffic[stage])
            key = apart, stage, repr(passes), context.traffic
            if key not in self.passed:
                self.passed[key] = run_passes(program, passes, context=context)
            programs.append(self.passed[key])
        return programs


def _with_blocks(local: LocalGraph, apart: bool) -> LocalGraph:
    """`local` in an order whose blocks have gradients of weights apart, or not."""
    copy = local.copy()
    for node in copy.graph.nodes:
        loop = loop_of(node)
        if loop is None or loop.stages is None:
            continue
        if loop.stages.has_fillers != apart:
            order, device = "zero_bubble" if apart else "1f1b", loop.stages.parts[0].device
            cuts = cuts_for(loop, local.mesh, local.stage_axis, order)
            stages = stages_of(*cuts, local.mesh, local.stage_axis, order, Hardware.default(), device)
            node.target = replace(loop, stages=stages)
    return copy


def _splits(order: str) -> tuple[bool, ...]:
    """Whether gradients of weights are in blocks of their own, in the variants that an order is chosen from."""
    return (False, True) if order in APART else (False,)


def _own(costs: dict[str, BlockCost], stage: int) -> dict[str, BlockCost]:
    blocks = {name: block for name, block in costs.items() if block.stage == stage}
    return dict(sorted(blocks.items(), key=lambda item: (item[1].level, item[1].is_filler)))


def _exchanges(local: LocalGraph, prices: BlockPrices, ranks: int) -> list[Exchange]:
    """What stages exchange outside of loops; the last stage of `local` is the last of `ranks`."""
    last, exchanged, at_phase = local.mesh.axis_size(local.stage_axis) - 1, list[Exchange](), "forward"
    for node in exchanges(local).values():
        if meta.is_backward(node) or at_phase == "backward":  # parameters may be sent before, and the loss behind it
            at_phase = "update" if phase(node) == "update" else "backward"
        if node.target is transfer:
            source, target = (ranks - 1 if at == last else cast(int, at) for at in node.args[1:3])
            size = meta.size_bytes(node)
            us = prices.sent_us(size, local.stage_axis) + 2 * prices.end_us(size, local.stage_axis)
            exchanged.append(Exchange(source=source, target=target, us=us, phase=at_phase))
        else:
            exchanged.append(Exchange(is_loop=loop_of(node) is not None, phase=at_phase))
    return exchanged


def staged(
    local: LocalGraph, prices: BlockPrices, order: str | None = None, passes: Sequence[Pass] | None = None
) -> StagedStep:
    """The step of a program of all stages, as `partition` returns it, after the passes that `compile` applies to each
    stage. `order`: by name, chosen at these prices; None: that of the program. With one micro-batch there is none.

    Raises:
        PlanError: stages share several loops over micro-batches.
    """
    loops = [loop for node in local.graph.nodes if (loop := loop_of(node)) is not None and loop.stages is not None]
    if len(loops) > 1:
        finding = f"a pipeline in which stages share {len(loops)} loops over micro-batches"
        raise PlanError(finding, "one loop", "give one micro-batch, or let the step have one forward and backward")
    shared = loops[0].stages if loops else None
    named = order or ("zero_bubble" if shared is not None and shared.has_fillers else "1f1b")
    short, variants = ShortStages(local), list[Variant]()
    passes = stage_passes(local.mesh, local.stage_axis, prices) if passes is None else passes
    for apart in _splits(named):
        works, costs = short.works(prices, apart, passes), short.costs(prices, apart, passes)
        names = [name for stage in range(short.count) for name in _own(costs, stage)]
        edges = dict(zip(names, (block for work in works for block in work.blocks), strict=True))
        blocks = {n: replace(c, first=edges[n].first, last=edges[n].last) for n, c in costs.items()}
        variants.append(([[(work, None)] for work in works], blocks))
    peaks: tuple[int, ...] = ()
    if shared is not None and order is None:  # of the program in its order, exactly
        programs, works = short.programs(shared.has_fillers), [work for ((work, _),) in variants[-1][0]]
        peaks = tuple(peak_of_pieces(p) - round(w.loop_bytes) for p, w in zip(programs, works, strict=True))
    step = staged_step(
        variants, _exchanges(local, prices, short.count), loops[0].pieces if loops else 1, order or shared or named,
        prices.hardware.ranks_per_core, peaks,
    )  # fmt: skip
    return replace(step, precision=precision_of(local))


@dataclass(frozen=True)
class ShortPair:
    """Two short steps, whose stages have `_FEW` and `_MORE` equal layers each: what stages do is linear in these."""

    steps: tuple[ShortStages, ShortStages]

    def works(
        self, layers: Sequence[int], count: int, prices: BlockPrices, apart: bool, passes: Sequence[Pass],
        traffic: Traffic,
    ) -> list[StageWork]:  # fmt: skip
        """The work of stages with so many each of all `count` equal layers."""
        smaller, larger = (short.works(prices, apart, passes, traffic) for short in self.steps)
        times_all = _times(count / len(smaller))
        return [
            smaller[kind].towards(larger[kind], _times(stage_layers), times_all)
            for kind, stage_layers in zip(_kinds(len(layers), len(smaller)), layers, strict=True)
        ]

    def traffic(self, layers: Sequence[int], ranks: int) -> list[CollectiveTraffic]:
        """What the program of a rank with each kind of stage carries, all its chunks counted, of the rank with most."""
        smaller, larger = (short.traffic() for short in self.steps)
        kinds = _kinds(len(layers), len(smaller))

        def of_stage(stage: int) -> tuple[int, ...]:
            kind = kinds[stage]
            return astuple(extrapolated(smaller[kind], larger[kind], _times(layers[stage])))

        of_rank = [
            [sum(values) for values in zip(*map(of_stage, range(rank, len(layers), ranks)), strict=True)]
            for rank in range(ranks)
        ]  # fmt: skip
        most = [
            [max(of_rank[stage % ranks][i] for stage, kind in enumerate(kinds) if kind == short) for i in (0, 1)]
            for short in {*kinds}
        ]  # fmt: skip
        by_kind = dict(zip({*kinds}, most, strict=True))
        return [CollectiveTraffic(*map(round, by_kind.get(short, (0, 0)))) for short in range(len(smaller))]


@dataclass
class ShortPipelines:
    """Pipelines of a model with `layers` layers, which `capture` builds with few of them. `model`: as in
    `from_few_layers`. `folded` and `short`: what was captured and planned, for
    models that differ in `layers` alone.
    """

    capture: CaptureStep
    layers: int
    hardware: Hardware
    model: nn.Module | None = None
    folded: dict[int, tuple[FoldedStep, int]] = field(default_factory=dict[int, "tuple[FoldedStep, int]"])
    short: dict[object, ShortStages] = field(default_factory=dict[object, ShortStages])

    def step(
        self, setup: StagedSetup, batch: int, passes: Sequence[Pass] | None = None, prices: BlockPrices | None = None
    ) -> StagedStep:
        """The step for `batch` sequences of a rank at a time, simulated at `prices`, by default those of the hardware.
        All layers are captured where three stages do not stand for more of them, or have one micro-batch.

        Raises:
            PlanError: the pipeline cannot be planned.
        """
        prices = prices or BlockPrices(self.hardware, setup.mesh)
        passes = passes or stage_passes(setup.mesh, setup.pipeline.axis, prices)
        loops = setup.pieces >= _PIECES and setup.pipeline.placement == "loop"
        pair = self._short(setup, batch) if loops else None
        if pair is None:
            if setup.layers is not None:
                needed = "a chain of equal layers, as many as there are stages"
                raise PlanError("layers= of a step that three stages do not stand for", needed, "leave it out")
            graph = self.capture(batch * setup.pieces, self.layers)
            local = planned_program(graph, setup.mesh, setup.strategies, None, self.hardware)[1]
            return staged(local, prices, setup.pipeline.schedule, passes)
        layers = self._layers(setup, batch, pair, prices)
        return self._from(pair, setup, batch, layers, prices, passes, pair.traffic(layers, setup.ranks))

    def estimate(self, setup: StagedSetup, similar: StagedSetup, batch: int, prices: BlockPrices) -> StagedStep | None:
        """About `step`, from the short stages of `similar`, where only sizes of the data and stage axes differ: in what
        they reduce and update. Nothing is planned if `similar` has been. None where short stages do not stand for it.

        Raises:
            PlanError: as `step`.
        """
        pair = self._short(similar, batch, _SHORT) if setup.pieces >= _PIECES else None
        if pair is None:
            return None
        passes = stage_passes(setup.mesh, setup.pipeline.axis, prices)
        layers = self._layers(setup, batch, pair, prices)
        return self._from(pair, setup, batch, layers, prices, passes, None)

    def _layers(self, setup: StagedSetup, batch: int, pair: ShortPair, prices: BlockPrices) -> tuple[int, ...]:
        """The equal layers of each stage."""
        count = self._equal_layers(batch)[0]
        smaller, larger = (short.busy_us(prices) for short in pair.steps)
        layers = setup.layers or spread(smaller, larger, count, setup.stages)
        if len(layers) != setup.stages or sum(layers) != count:
            text = f"{sum(layers)} layers in {len(layers)} stages"
            raise PlanError(text, f"{count} in {setup.stages}", "correct layers=")
        return layers

    def _from(
        self, pair: ShortPair, setup: StagedSetup, batch: int, layers: Sequence[int], prices: BlockPrices,
        passes: Sequence[Pass], traffic: Traffic,
    ) -> StagedStep:  # fmt: skip
        """The step of stages with so many layers each."""
        order, (count, period) = setup.pipeline.schedule, self._equal_layers(batch)
        variants = list[Variant]()
        for apart in _splits(order):
            works = pair.works(layers, count, prices, apart, passes, traffic)
            repeats = list(zip(works, (number * period for number in layers), strict=True))
            variants.append(([repeats[rank :: setup.ranks] for rank in range(setup.ranks)], chain(works, setup.ranks)))
        outside = _exchanges(pair.steps[0].local, prices, setup.ranks)
        step = staged_step(variants, outside, setup.pieces, order, prices.hardware.ranks_per_core)
        return replace(step, precision=precision_of(pair.steps[0].local))

    def _equal_layers(self, batch: int) -> tuple[int, int]:
        """How many equal layers the step has, each of so many modules."""
        folded, layers = self.folded[batch]
        period = folded.repeats.period
        return folded.repeats.count + (self.layers - layers) // period, period

    def _folded(self, batch: int, blocks: int) -> FoldedStep | None:
        """The step with so many equal layers or more; None where it has too few."""
        if batch not in self.folded:
            captured = self._captured(batch, _SHORT, _SHORT)
            if captured is None or not (self.model is None or captured[0].stands_for(self.model)):
                return None
            self.folded[batch] = captured
        folded, layers = self.folded[batch]
        left_out, rest = divmod(self.layers - layers, folded.repeats.period)
        many = left_out >= 0 and folded.repeats.count + left_out >= blocks
        return replace(folded, left_out=left_out) if many and not rest else None

    def _captured(self, batch: int, layers: int, blocks: int) -> tuple[FoldedStep, int] | None:
        layers = min(layers, self.layers)
        graph = self.capture(batch * _PIECES, layers)
        repeats = find_repeats(graph)
        if repeats is not None and repeats.count >= blocks:
            return FoldedStep(graph, repeats, self.hardware), layers
        if repeats is None or layers == self.layers:
            return None
        return self._captured(batch, layers + (blocks - repeats.count) * repeats.period, blocks)

    def _short(self, setup: StagedSetup, batch: int, count: int = 0) -> ShortPair | None:
        """The two short steps, of `count` stages; None where they do not stand for more stages."""
        count, folded = count or min(setup.stages, _SHORT), self._folded(batch, _SHORT * _MORE)
        if folded is None:
            return None
        parts = setup.strategies.beside_stages
        steps: list[ShortStages] = []
        for each in (_FEW, _MORE):
            mesh, strategies = setup.short([_modules(folded, each, at) for at in range(count)])
            key = mesh, repr(parts), batch, each
            if key not in self.short:
                graph = folded.with_blocks(each * count)
                self.short[key] = ShortStages(planned_program(graph, mesh, strategies, None, self.hardware)[1])
            steps.append(self.short[key])
        smaller, larger = steps
        same = [type(node.target) for node in exchanges(smaller.local).values()] == [
            type(node.target) for node in exchanges(larger.local).values()
        ]
        return ShortPair((smaller, larger)) if same and all(is_chain(short.local) for short in steps) else None


def _kinds(stages: int, short: int) -> list[int]:
    """Which stage of a short step stands for each: the first, the last, or one between them."""
    return [0 if stage == 0 else short - 1 if stage == stages - 1 else 1 for stage in range(stages)]


def _times(layers: float) -> float:
    """How often a stage with so many layers has what a stage with `_MORE` has beyond one with `_FEW`."""
    return (layers - _FEW) / (_MORE - _FEW)


def _modules(folded: FoldedStep, each: int, stage: int) -> list[str]:
    """The equal layers of a stage of a short step, by path."""
    repeats = folded.repeats
    first = repeats.first + stage * each * repeats.period
    return [f"{repeats.prefix}.{first + number}" for number in range(each * repeats.period)]


def spread(one_layer: Sequence[float], two_layers: Sequence[float], layers: int, stages: int) -> tuple[int, ...]:
    """The equal layers of each stage, so that the longest one is as short as it can be: one after the other goes where
    it adds least. Every stage has one, but the first and the last, which have what stands around them. `one_layer`,
    `two_layers`: microseconds of each kind of stage for a piece, with so many.

    Raises:
        PlanError: there are too few.
    """
    counts = [0, *[1] * (stages - 2), 0]
    if layers < sum(counts):
        raise PlanError(f"{stages} stages of {layers} equal layers", f"at most {layers + 2}", "give fewer chunks")
    each = [(one_layer[kind], two_layers[kind] - one_layer[kind]) for kind in _kinds(stages, len(one_layer))]
    for _ in range(layers - sum(counts)):
        at = min(range(stages), key=lambda stage: each[stage][0] + each[stage][1] * counts[stage])
        counts[at] += 1
    return tuple(counts)


def fullest_reserves(step: StagedStep, local: LocalGraph, hardware: Hardware, software: Software) -> int | None:
    """What the allocator of a device reserves at the fullest stage of `step`; None where devices have none. `local`:
    the program of all stages with all layers.
    """
    if not hardware.has_gpus:
        return None
    program = stage_program(local, step.stages.index(step.fullest))
    return reserved_bytes(run_passes(program, default_passes(schedule=None)), hardware, software)


def costs_of_staged(step: StagedStep) -> Costs:
    """The costs of a step for `Figures`: bytes of the fullest stage, times of a rank on average."""
    full = step.fullest
    return Costs(
        full.rest_bytes, full.peak_bytes, step.sent_bytes, step.collectives, step.step_us / 1e6, step.waited_us / 1e6,
        step.model_us / 1e6, step.again_us / 1e6, 0.0, full.kinds, idle_s=step.bubble * step.step_us / 1e6,
        precision=step.precision,
    )  # fmt: skip
