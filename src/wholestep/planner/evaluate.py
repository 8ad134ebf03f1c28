"""Evaluates candidates: bytes between steps, plan and program, lower bound, simulated costs, least memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..cost.memory import peak_memory
from ..cost.software import OWN, Software
from ..cost.stage_costs import BlockPrices
from ..cost.staged import StagedStep
from ..errors import PlanError, WholestepError
from ..graph.graph import LocalGraph, TrainGraph
from ..graph.text import human
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..passes.base import Pass, run_passes
from ..passes.bucket_sizes import smaller_buckets
from ..passes.fit_memory import FitMemory
from ..plan.decision import NO_SAVING, Saving
from ..plan.make_plan import stored_bytes
from ..plan.micro_batches import MicroBatches
from ..plan.plan import Plan
from ..plan.strategies import compose
from ..tuning import TUNING
from .bounds import costs_of, fingerprint, lower_bound
from .candidates import Template, batches
from .fit_stages import fit_stages, least_bytes
from .folded_memory import FoldedFit
from .folded_step import FEWEST, FoldedStep
from .recompute_kinds import saving_passes
from .resolve import planned_program
from .search_result import Candidate, Status, Watch, first_line, unwatched
from .staged_plan import costs_of_staged, fullest_reserves, staged

Programs = Sequence[tuple[Plan, LocalGraph]]
"""Plans and programs: of the whole step, or of the two folded ones."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates candidates for one step, whose programs go through `passes`. `recompute`: tensors may be rematerialized
    to fit the budget of a rank. `folded` is the step with fewer equal layers; None to plan all layers always.
    `micro_batches`: batches of candidates that do not fit may be cut into pieces. `may_regather`: to fit, gathered
    parameters that a candidate keeps may be gathered again. `saves`: products may be tiled, and saved values wait on
    the host.
    """

    graph: TrainGraph
    hardware: Hardware
    budget_bytes: int | None
    passes: tuple[Pass, ...]
    recompute: bool = True
    placed: Mapping[str, Layout] | None = None
    watch: Watch = unwatched
    folded: FoldedStep | None = None
    software: Software = OWN
    micro_batches: MicroBatches | None = None
    may_regather: bool = True
    saves: bool = False

    def candidate(self, mesh: Mesh, template: Template) -> Candidate:
        """A template with the bytes that it stores between steps; nothing is planned."""
        if isinstance(template.strategies, WholestepError):
            return Candidate(template.name, mesh, None, status=Status.NO_PLAN, why=first_line(template.strategies))
        strategies = compose(template.strategies)
        symmetric = compose(template.symmetric) if template.symmetric else strategies
        row = Candidate(template.name, mesh, strategies, template.key, batches(strategies, mesh), symmetric=symmetric)
        if row.order is not None:
            return row
        try:
            blocks = self.folded.blocks(mesh, symmetric, self.placed) if self.folded else None
            if self.folded and blocks:
                rest = self.folded.stored_bytes(mesh, symmetric, self.placed)
            else:
                rest = stored_bytes(self.graph, mesh, strategies, self.placed)
        except WholestepError as error:
            return Candidate(template.name, mesh, None, status=Status.NO_PLAN, why=first_line(error))
        row = replace(row, needs_bytes=rest, blocks=blocks)
        return replace(row, status=Status.OVER_AT_REST) if self.is_over(rest) else row

    def is_over(self, size_bytes: int, tolerance: float = 1.0) -> bool:
        """True for more bytes than the budget, times `tolerance`."""
        return self.budget_bytes is not None and size_bytes > self.budget_bytes * tolerance

    def in_more_pieces(self, row: Candidate) -> Candidate | None:
        """`row` in the next larger number of pieces; None where its batch has no more, or is not to be cut."""
        if self.micro_batches is None or row.strategies is None or row.order is not None or row.saving != NO_SAVING:
            return None
        rows = row.strategies.in_pieces(self.micro_batches).rows(self.graph, row.mesh)
        number = next((n for n in piece_counts(max(rows, default=1)) if n > row.pieces), None)
        if number is None:
            return None
        micro_batches, uncut = replace(self.micro_batches, pieces=number), row.uncut or row.name
        symmetric = row.symmetric and row.symmetric.in_pieces(micro_batches)
        return Candidate(
            f"{uncut}, {number} micro-batches", row.mesh, row.strategies.in_pieces(micro_batches), batches=row.batches,
            blocks=row.blocks, symmetric=symmetric, pieces=number, uncut=uncut,
        )  # fmt: skip

    def passes_of(self, row: Candidate) -> tuple[Pass, ...]:
        """What the programs of a candidate go through."""
        return saving_passes(self.passes, row.saving)

    def leaner(self, row: Candidate) -> list[list[Candidate]]:
        """`row` in more and more tiles, and with saved values on the host where devices have one: two series, which end
        with the leanest. None with pieces or stages.
        """
        if not self.saves or row.strategies is None or row.strategies.pieces > 1 or row.order is not None:
            return []
        tiled = [Saving(tiles) for tiles in TUNING.tiles_tried]
        series = [tiled, [Saving(1, 1), replace(tiled[-1], ahead=1)]][
            : 1 if self.hardware.host_copy_us(1) is None else 2
        ]
        lean = replace(row, key=None, status=Status.SLOWER)
        return [[replace(lean, name=f"{row.name}{saving}", saving=saving) for saving in each] for each in series]

    def keeping(self, row: Candidate, size_bytes: int) -> Candidate:
        """`row`, which gathers parameters again for each piece, with so many bytes of them kept."""
        assert row.strategies is not None, "it has a plan"
        name = f"{row.name}, {human(size_bytes)} of parameters kept"
        strategies = row.strategies.gathering(None, size_bytes)
        return Candidate(
            name, row.mesh, strategies, batches=row.batches, symmetric=strategies, pieces=row.pieces, uncut=row.uncut
        )

    def planned(self, row: Candidate, graph: TrainGraph, doing: str = "") -> tuple[Plan, LocalGraph]:
        """Plan and program on `graph`, the step or a folded one; raises if there is none."""
        strategies = row.strategies if graph is self.graph else row.symmetric
        assert strategies is not None, "it has a plan"
        if doing:
            self.watch(f"{doing}{row.name}")
        return planned_program(graph, row.mesh, strategies, self.placed, self.hardware)

    def programs(self, row: Candidate, blocks: tuple[int, int] | None, fewest: Programs = ()) -> Programs:
        """Plans and programs of the steps with so many equal layers, or of the whole; `fewest`: those with `FEWEST`."""
        if not self.folded or not blocks:
            return [self.planned(row, self.graph)]
        by_blocks = dict(zip(FEWEST, fewest, strict=False))
        return [by_blocks.get(n) or self.planned(row, self.folded.with_blocks(n)) for n in blocks]

    def steps(self, row: Candidate) -> Iterator[tuple[Candidate, Any]]:
        """`row` with its lower bound, and a mark that programs share which are equal; then with its costs, and its plan
        or that of few layers.
        """
        folded = row.blocks if self.folded else None
        programs = self.programs(row, FEWEST if folded else None)
        itself = row.symmetric == row.strategies if folded else row.order is None
        row = self.bounded(row, programs)
        yield row, hash((*(fingerprint(local) for _, local in programs), row.saving, "" if itself else row.name))
        if folded not in (None, FEWEST):
            programs = self.programs(row, folded, fewest=programs)
        yield self.simulated(row, programs), programs[-1][0]

    def evaluated(self, row: Candidate) -> Candidate:
        """With its costs, or the reason why it has no plan; nothing bounds it."""
        if row.strategies is None:
            return row
        try:
            return self.simulated(row, self.programs(row, row.blocks))
        except WholestepError as error:
            if row.blocks:  # a pattern names a layer
                return self.evaluated(replace(row, blocks=None))
            return replace(row, status=Status.NO_PLAN, why=first_line(error), costs=None, batch_s=float("inf"))

    def bounded(self, row: Candidate, programs: Programs) -> Candidate:
        """With its lower bound."""
        bound, *larger = (lower_bound(local, self.hardware, self.software) for _, local in programs)
        if self.folded and row.blocks:
            bound = self.folded.whole(FEWEST, (bound, larger[0]))
        return replace(row, bound_s=bound.us(self.hardware, row.mesh) / 1e6 / row.batches)

    def simulated(self, row: Candidate, programs: Programs) -> Candidate:
        """With its costs: of the whole step, or extrapolated. The `programs` are not used again. Stages run passes of
        their own.
        """
        if row.order is not None:
            return self._staged(row, staged(programs[0][1], self._prices(row), row.order), programs[0][1])
        if self.folded and row.blocks:
            return row.priced(self.folded.priced(row.blocks, programs, self.passes_of(row)))
        return self.priced(row, programs[0][0], run_passes(programs[0][1], self.passes_of(row), owned=True))

    def priced(self, row: Candidate, planned: Plan, program: LocalGraph) -> Candidate:
        """With the costs of a program that has been through all passes."""
        return row.priced(costs_of(program, planned, self.hardware, self.software))

    # -- memory ----------------------------------------------------------------------------------------
    def fitting(self, row: Candidate) -> FitMemory:
        """Fits a program into the budget, by rematerialization."""
        may_regather = row.may_regather and self.may_regather
        return FitMemory(self.budget_bytes or 0, self.hardware, may_regather, self.passes_of(row))

    def folded_fit(self, row: Candidate) -> FoldedFit:
        """The same on the folded steps."""
        assert self.folded is not None, "the candidate was simulated with few layers"
        assert row.blocks is not None, "the candidate was simulated with few layers"
        (_, smaller), (_, larger) = self.programs(row, row.blocks)
        return FoldedFit(self.folded, row.blocks, (smaller, larger), self.fitting(row))

    def fitted(self, row: Candidate, planned: Plan, local: LocalGraph) -> Candidate:
        """Within the budget by rematerialization in the whole step, or with the least bytes that it needs."""
        if row.order is not None:
            return self._fitted_stages(row, local)
        fit = self.fitting(row)
        try:
            fitting = fit.choose(local)
        except PlanError:
            return replace(row, needs_bytes=fit.least(local)[1])
        row = self.priced(row, planned, fit.run(local, fitting))
        return replace(row, status=Status.SLOWER, rematerialized=fitting.names)

    def _prices(self, row: Candidate) -> BlockPrices:
        return BlockPrices(self.hardware, row.mesh, self.software)

    def _staged(self, row: Candidate, step: StagedStep, local: LocalGraph) -> Candidate:
        reserved = fullest_reserves(step, local, self.hardware, self.software)
        return row.priced(replace(costs_of_staged(step), reserved_bytes=reserved))

    def _fitted_stages(self, row: Candidate, local: LocalGraph) -> Candidate:
        prices = self._prices(row)
        try:
            fit = fit_stages(local, self.budget_bytes or 0, prices)
        except PlanError:
            return replace(row, needs_bytes=least_bytes(local, prices))
        row = self._staged(row, fit.step(prices), fit.local)
        assert row.costs is not None, "it was simulated"
        return replace(
            row, costs=replace(row.costs, peak_bytes=fit.peak_bytes), needs_bytes=fit.peak_bytes, status=Status.SLOWER,
            rematerialized=fit.rematerialized,
        )  # fmt: skip

    def least(self, row: Candidate) -> Candidate:
        """With the least bytes that it needs."""
        try:
            _, local = self.planned(row, self.graph, "the least memory of ")
        except WholestepError:
            return replace(row, needs_bytes=1 << 62)
        if not self.recompute:
            ran = (run_passes(local, passes) for passes in smaller_buckets(self.passes_of(row)))
            return replace(row, needs_bytes=min(peak_memory(program).size_bytes for program in ran))
        if self.folded is not None and row.blocks and row.pieces == 1:
            folded = self.folded_fit(row)
            least = folded.least()
            fitting = folded.unfolded(local, least)
            if fitting is not None:
                peak = peak_memory(self.fitting(row).run(local, fitting)).size_bytes
                return replace(row, needs_bytes=max(peak, ceil(least.peak_bytes)))
        return replace(row, needs_bytes=self.fitting(row).least(local)[1])


def piece_counts(rows: int) -> list[int]:
    """The numbers of pieces that are tried for `rows` samples of a rank, growing: those that divide it, and where the
    next one is more than twice the last, as many as `torch.chunk` makes of twice the last.

    Example:
        >>> piece_counts(12), piece_counts(13)
        ([2, 3, 4, 6, 12], [2, 4, 7, 13])
    """
    counts, last = list[int](), 1
    while last < rows:
        least = max(round(last * TUNING.pieces_growth), last + 1)
        dividing = (n for n in range(least, min(2 * last, rows) + 1) if rows % n == 0)
        last = next(dividing, -(-rows // -(-rows // (2 * last))))
        counts.append(last)
    return counts
