"""`Auto` with a pipeline: stages, chunks, order, micro-batches and the style beside them, by simulation of all stages.

Every candidate is planned with all layers, and its stages are simulated after the passes that run them. So candidates
are few: of a mesh, chunks and micro-batches are chosen with one style, and others are tried with the best of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost.software import OWN, Software
from ..cost.stage_costs import BlockPrices
from ..errors import BudgetError, PlanError, WholestepError
from ..graph.graph import TrainGraph
from ..graph.text import human, human_at_least
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Axis, Mesh
from ..plan.micro_batches import MicroBatches
from ..plan.pipelines import Pipeline
from ..plan.plan import Plan
from ..plan.strategies import Strategies, compose
from .candidates import Template, batches, is_open
from .fit_stages import fit_stages, least_bytes
from .resolve import planned_program
from .search_result import Candidate, SearchResult, Status, Watch, first_line, unwatched
from .staged_plan import costs_of_staged, fullest_reserves, staged

_CHUNKS = (1, 2, 4)
_FIRST = "zero1"  # gathers nothing while pieces run, and keeps least of the styles that do not


@dataclass
class StagedAuto:
    """The search for pipelines of one step.

    Args:
        pipeline: what the user fixed of stages, order, chunks and micro-batches. Options that are None are searched.
        beside: the templates of a mesh without the axis of stages.
        budget_bytes: that the tensors of a rank may take; None for no bound.
        recompute: stages that do not fit may rematerialize values.
        placed, watch, software: as in `Auto.search`.
    """

    graph: TrainGraph
    hardware: Hardware
    pipeline: Pipeline
    beside: Callable[[Mesh], Sequence[Template]]
    micro_batches: MicroBatches | None = None
    budget_bytes: int | None = None
    recompute: bool = True
    placed: Mapping[str, Layout] | None = None
    watch: Watch = unwatched
    software: Software = OWN
    rows: list[Candidate] = field(default_factory=list[Candidate])
    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])

    def run(self, meshes: Iterable[Mesh]) -> SearchResult:
        """The best pipeline on any of `meshes`.

        Raises:
            PlanError: none can be planned; of kind BudgetError where none fits.
        """
        for mesh in meshes:
            self._mesh(mesh)
        fits = [row for row in self.rows if row.status is Status.SLOWER]
        if not fits:
            raise self._nothing()
        best = min(fits, key=lambda row: row.rank)
        chosen = replace(best, status=Status.CHOSEN)
        rows = sorted((chosen if row is best else row for row in self.rows), key=lambda row: row.rank)
        return SearchResult(self.plans[f"{best.name} on {best.mesh}"], chosen, tuple(rows), self.budget_bytes)

    def _mesh(self, mesh: Mesh) -> None:
        stages = mesh.axis_size(self.pipeline.axis)
        stage_mesh = Mesh(tuple(axis for axis in mesh.axes if axis.name != self.pipeline.axis) or (Axis("dp", 1),))
        templates = list(self.beside(stage_mesh)) if mesh.size > stages else [Template("", ())]
        templates.sort(key=lambda template: template.key is None or template.key.style != _FIRST)
        best: tuple[Candidate, Pipeline, int] | None = None
        for number, template in enumerate(templates):
            variants = self._variants(mesh, template) if number == 0 or best is None else [best[1:]]
            slower, last = set[Pipeline](), dict[Pipeline, float]()
            for pipe, pieces in variants:
                if pipe in slower:
                    continue
                row = self._tried(mesh, template, pipe, pieces)
                if row.status is Status.SLOWER and (best is None or row.rank < best[0].rank):
                    best = row, pipe, pieces
                if row.costs is not None and row.status is Status.SLOWER and row.batch_s > last.get(pipe, row.batch_s):
                    slower.add(pipe)  # in more pieces it is slower still
                last[pipe] = row.batch_s

    def _variants(self, mesh: Mesh, template: Template) -> list[tuple[Pipeline, int]]:
        """Orders and chunks, each with growing numbers of pieces."""
        fixed, stages = self.pipeline, mesh.axis_size(self.pipeline.axis)
        pipes = [fixed]
        if fixed.schedule == "auto" and fixed.chunks is None and fixed.stages is None and fixed.placement == "loop":
            pipes = [fixed if n == 1 else replace(fixed, schedule="interleaved", chunks=n) for n in _CHUNKS]
            pipes.append(replace(fixed, placement="v"))
        elif fixed.schedule == "interleaved" and fixed.chunks is None and fixed.stages is None:
            pipes = [replace(fixed, chunks=n) for n in _CHUNKS[1:]]
        pieces = self.micro_batches.pieces if self.micro_batches is not None else fixed.micro_batches
        if isinstance(pieces, int) and pieces > 1:
            return [(pipe, pieces) for pipe in pipes]
        if isinstance(template.strategies, WholestepError):
            return [(pipes[0], stages)]
        probe = compose([*template.strategies, replace(fixed, micro_batches=2)])
        most = max(probe.rows(self.graph, mesh), default=1)
        counts = [n for n in (stages << power for power in range(most.bit_length())) if 1 < n <= most]
        return [(pipe, n) for pipe in pipes for n in counts or [most]]

    def _tried(self, mesh: Mesh, template: Template, pipe: Pipeline, pieces: int) -> Candidate:
        shape = " in a V" if pipe.placement == "v" else ""
        chunks = f", {pipe.chunks_of_rank} chunks{shape}" if pipe.chunks_of_rank > 1 else ""
        parts = (template.name, f"{pipe.schedule}{chunks}", f"{pieces} micro-batches")
        row = Candidate(", ".join(filter(None, parts)), mesh, None, template.key)
        self.watch(row.name)
        try:
            if isinstance(template.strategies, WholestepError):
                raise template.strategies
            row = self._simulated(row, compose([*template.strategies, replace(pipe, micro_batches=pieces)]), pipe)
        except WholestepError as error:
            row = replace(row, status=Status.NO_PLAN, why=first_line(error))
        self.rows.append(row)
        return row

    def _simulated(self, row: Candidate, strategies: Strategies, pipe: Pipeline) -> Candidate:
        planned, local = planned_program(self.graph, row.mesh, strategies, self.placed, self.hardware)
        prices = BlockPrices(self.hardware, row.mesh, self.software)
        step, again = staged(local, prices, pipe.schedule), tuple[str, ...]()
        costs = costs_of_staged(step)
        budget, needs, status = self.budget_bytes, costs.peak_bytes, Status.SLOWER
        if budget is not None and needs > budget:
            status = Status.OVER_AT_PEAK
            if self.recompute:
                try:
                    fit = fit_stages(local, budget, prices)
                except PlanError:
                    needs = least_bytes(local, prices)
                else:
                    needs, again, status = fit.peak_bytes, fit.rematerialized, Status.SLOWER
                    step, local = fit.step(prices), fit.local
                    costs = replace(costs_of_staged(step), peak_bytes=needs)
        reserved = fullest_reserves(step, local, self.hardware, self.software)
        costs = replace(costs, reserved_bytes=reserved)
        count = batches(strategies, row.mesh)
        self.plans[f"{row.name} on {row.mesh}"] = planned
        return replace(
            row, strategies=strategies, batches=count, batch_s=costs.step_s / count, bound_s=costs.model_s / count,
            needs_bytes=needs, costs=costs, rematerialized=again, status=status,
        )  # fmt: skip

    def _nothing(self) -> PlanError:
        over = [row for row in self.rows if row.status is Status.OVER_AT_PEAK]
        if not over or self.budget_bytes is None:
            why = f"{self.rows[0].name}: {self.rows[0].why}" if self.rows else "no mesh has an axis of stages"
            needed = "stages, chunks and micro-batches that the model and the batch have"
            return PlanError(f"no pipeline can be planned: {why}", needed, "give fewer stages, or a larger batch")
        nearest = min(over, key=lambda row: row.needs_bytes)
        short = human(nearest.needs_bytes - self.budget_bytes)
        remark = ", with all tensors rematerialized that help" if self.recompute else ""
        return BudgetError(
            f"no pipeline fits: the nearest, {nearest.name} on {nearest.mesh}, needs {human(nearest.needs_bytes)} on a "
            f"rank{remark}, {short} more than there are",
            f"at most {human(self.budget_bytes)}",
            f"give memory_bytes={human_at_least(nearest.needs_bytes)!r} or more, or more stages",
        )  # fmt: skip


def staged_meshes(mesh: Mesh, axis: str, flat: Iterable[Mesh]) -> list[Mesh]:
    """`mesh`, or of an open one those of `flat`, of as many ranks, whose first axis leaves 2, 4 or more to `axis`."""
    if not is_open(mesh):
        return [mesh]
    meshes: list[Mesh] = []
    for flat_mesh in flat:
        first, *rest = flat_mesh.axes
        for stages in (1 << power for power in range(1, first.size.bit_length())):
            if first.size % stages == 0 and "shard" not in flat_mesh.names:
                outer = [Axis(first.name, first.size // stages)] if first.size > stages else []
                axes = [*outer, Axis(axis, stages), *rest]
                meshes.append(Mesh(tuple(axes)))
    return meshes
