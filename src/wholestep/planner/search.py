"""Branch and bound over candidates: the shortest simulated step within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..cost.compute import peak_us
from ..errors import BudgetError, PlanError, WholestepError
from ..graph.text import human, human_at_least
from ..mesh import Mesh
from ..plan.plan import Plan
from ..tuning import TUNING
from .bounds import rough_estimate_us
from .candidates import Template, TemplateKey
from .evaluate import Evaluator
from .folded_memory import FoldedFit, FoldedFitting
from .search_result import INFINITE, Candidate, SearchResult, Status, first_line

Further = Callable[[Sequence[Candidate]], Sequence[tuple[Mesh, Template]]]
Stages = Callable[[Callable[[Mesh, Template], Candidate]], list[Candidate]]
SURE, SURE_BYTES = TUNING.sure_share, TUNING.sure_bytes_share
"""Tolerances of extrapolated seconds and bytes: candidates within them of the best are simulated with all layers."""


@dataclass
class Search:
    """Candidates are tried in the order of a rough estimate. Each is planned, and simulated unless its lower bound is
    above the best time so far. Candidates over the budget are fitted into it by rematerialization, unless they are
    slower than one that fits.

    With `evaluator.folded` this is done on steps with few equal layers, and costs are extrapolated. Then candidates
    that may win are simulated with all layers, until the best of these leads by more than the tolerance.
    """

    evaluator: Evaluator
    best: Candidate | None = None
    plan: Plan | None = None
    programs: dict[int, str] = field(default_factory=dict[int, str])
    bounds: dict[tuple[Mesh, TemplateKey | str], float] = field(default_factory=dict[Any, float])

    def run(
        self, candidates: Sequence[tuple[Mesh, Template]], further: Further | None = None, stages: Stages | None = None
    ) -> SearchResult:
        """Return the best of `candidates`, of what `further` derives from their outcomes, and of the pipelines of
        `stages`. Raises PlanError if none can be planned, or none fits: it names the one that needs the fewest bytes.
        """
        folded, budget = self.evaluator.folded, self.evaluator.budget_bytes
        rows = self._race(candidates)
        rows += self._race(further(rows)) if further is not None else []
        rows = self._in_pieces(rows)
        rows += self._leaner(rows)
        if folded is not None:
            rows = self._in_pieces(self._confirm(rows))
        rows += self._keeping_some(rows)
        rows += stages(lambda mesh, template: self._first(self.evaluator.candidate(mesh, template))) if stages else []
        before = tuple(rows)
        if self.evaluator.recompute and budget is not None:
            if folded is not None:
                rows = self._fit_folded(rows)
            for i in _by_time(rows):
                faster = self.best is None or rows[i].batch_s < self.best.batch_s
                if faster and rows[i].status is Status.OVER_AT_PEAK and rows[i].blocks is None:
                    rows[i] = self._fit(rows[i])
        rows = self._confirm_near_budget(before, rows)
        if self.best is None:
            raise self._nothing(rows)
        plan = self.plan or self.evaluator.planned(self.best, self.evaluator.graph)[0]
        best = replace(self.best, status=Status.CHOSEN)
        rows = sorted((best if row is self.best else row for row in rows), key=lambda row: row.rank)
        return SearchResult(plan, best, tuple(rows), budget, folded)

    def _race(self, candidates: Sequence[tuple[Mesh, Template]]) -> list[Candidate]:
        """Tries candidates, the most promising first."""
        graph, hardware = self.evaluator.graph, self.evaluator.hardware
        rows, computing_us = [self.evaluator.candidate(*pair) for pair in candidates], peak_us(graph.graph, hardware)[0]

        def estimate_us(i: int) -> float:
            row = rows[i]
            if row.strategies is None:
                return INFINITE
            return rough_estimate_us(graph, row.mesh, row.strategies, hardware, computing_us) / row.batches

        for i in sorted(range(len(rows)), key=estimate_us):
            rows[i] = self._first(rows[i])
        return rows

    def _first(self, row: Candidate) -> Candidate:
        return self._try(row) if row.status is Status.SLOWER else row

    def _confirm(self, rows: list[Candidate]) -> list[Candidate]:
        """Simulates with all layers the candidates that may be the best by extrapolation."""
        self.best = self.plan = None
        self.programs.clear()
        for i in _by_time(rows):
            row, best_s = rows[i], self._best_s
            if row.status is Status.SLOWER and row.batch_s < best_s * (1 + SURE):
                rows[i] = self._simulate(replace(row, blocks=None), "all layers: ")
            elif row.status is Status.BOUNDED and row.bound_s < best_s < INFINITE:
                rows[i] = self._try(replace(row, status=Status.SLOWER, blocks=None))
        return rows

    def _confirm_near_budget(self, before: Sequence[Candidate], rows: list[Candidate]) -> list[Candidate]:
        """Simulates with all layers the candidates that would win, and that extrapolation put slightly over the budget
        `before` rematerialization.
        """
        evaluator = self.evaluator
        for i in _by_time(before):
            row = before[i]
            near = row.status is Status.OVER_AT_PEAK and row.blocks
            if near and not evaluator.is_over(row.needs_bytes, 1 + SURE_BYTES) and row.batch_s < self._best_s:
                again = self._simulate(replace(row, status=Status.SLOWER, blocks=None), "all layers: ")
                if again.status is Status.OVER_AT_PEAK and evaluator.recompute and evaluator.budget_bytes is not None:
                    again = self._fit(again)
                if again.status is Status.SLOWER and rows[i] is not self.best:
                    rows[i] = again
        return rows

    def _try(self, row: Candidate) -> Candidate:
        """Simulates a candidate, unless a template that sends less has a bound above the best."""
        less = self.bounds.get((row.mesh, row.key.sending_less if row.key else row.name), 0.0)
        if self.best is not None and less >= self.best.batch_s:
            return replace(row, status=Status.BOUNDED, bound_s=less)
        return self._simulate(row)

    def _simulate(self, row: Candidate, doing: str = "") -> Candidate:
        """Simulates a candidate, unless its bound is above the best, or its program is that of another candidate."""
        evaluator = self.evaluator
        evaluator.watch(f"{doing}{row.name}")
        steps = evaluator.steps(row)
        try:
            tried, mark = next(steps)
        except WholestepError as error:
            if evaluator.folded and row.blocks:  # a pattern names a layer
                return self._simulate(replace(row, blocks=None), "all layers: ")
            return replace(row, status=Status.NO_PLAN, why=first_line(error))
        self.bounds[row.mesh, row.key or row.name] = tried.bound_s
        if self.best is not None and tried.bound_s >= self.best.batch_s:
            return replace(tried, status=Status.BOUNDED)
        if mark in self.programs:
            return replace(tried, status=Status.SAME, why=self.programs[mark])
        self.programs[mark] = row.name
        try:
            tried, plan = next(steps)
        except WholestepError as error:  # by a pass that is given
            return replace(row, status=Status.NO_PLAN, why=first_line(error))
        if evaluator.is_over(tried.needs_bytes):
            return replace(tried, status=Status.OVER_AT_PEAK)
        return self._compared(tried, plan)

    # -- pieces of a batch -----------------------------------------------------------------------------
    def _in_pieces(self, rows: list[Candidate]) -> list[Candidate]:
        """`rows`, and those over the budget in more and more pieces, until the tensors of one fit."""
        all_rows, last = list(rows), dict[tuple[Mesh, str], Candidate]()
        for row in rows:
            last[row.mesh, row.uncut or row.name] = row
        over = {(row.mesh, row.name) for row in rows if row.status is Status.OVER_AT_PEAK}
        for row in sorted(last.values(), key=lambda row: row.batch_s):
            is_over = (row.mesh, row.name) in over or (row.mesh, row.why) in over
            finer = self.evaluator.in_more_pieces(row) if is_over else None
            while finer is not None:
                all_rows.append(tried := self._try(finer))
                if tried.status is Status.OVER_AT_PEAK:
                    over.add((tried.mesh, tried.name))
                elif tried.status is not Status.NO_PLAN and (tried.mesh, tried.why) not in over:
                    break  # it fits, or is slower than one that does: in more pieces it is slower still
                finer = self.evaluator.in_more_pieces(tried)
        return all_rows

    def _keeping_some(self, rows: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that gather parameters again for each piece, and fit, with as many of them kept as fit."""
        tried, budget = list[Candidate](), self.evaluator.budget_bytes or 0
        for row in rows:
            data = row.strategies.data if row.strategies else None
            if row.pieces == 1 or row.status is not Status.SLOWER or not (data and data.reshard_after_forward):
                continue
            spare = budget - row.needs_bytes
            for part in (spare, spare // 2):
                tried.append(self._try(self.evaluator.keeping(row, part)))
                if tried[-1].status is not Status.OVER_AT_PEAK:
                    break
        return tried

    def _leaner(self, rows: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that are over the budget, and faster than what fits, in more and more tiles until one fits, and
        with saved values on the host. The leanest may recompute too.
        """
        all_kept = list[Candidate]()
        for row in (rows[i] for i in _by_time(rows)):
            is_faster = row.status is Status.OVER_AT_PEAK and row.batch_s < self._best_s
            for *others, leanest in self.evaluator.leaner(row) if is_faster else ():
                fitting = (t for t in map(self._try, others) if t.status in (Status.SLOWER, Status.BOUNDED))
                all_kept.append(next(fitting, None) or self._try(leanest))
        return all_kept

    # -- memory ----------------------------------------------------------------------------------------
    def _fit(self, row: Candidate) -> Candidate:
        """Fits a candidate into the budget on all layers; it stays over it where that fails."""
        if self.best is not None and row.bound_s >= self.best.batch_s:
            return replace(row, status=Status.BOUNDED)
        planned, local = self.evaluator.planned(row, self.evaluator.graph, "made to fit: ")
        row = self.evaluator.fitted(row, planned, local)
        return self._compared(row, planned) if row.status is Status.SLOWER else row

    def _fit_folded(self, rows: list[Candidate]) -> list[Candidate]:
        """Fits candidates on folded steps, then on all layers the ones that may win. The ratio of measured to
        extrapolated time of one, within the tolerance, corrects the next.
        """
        fits: dict[int, FoldedFit] = {}
        most_s = self._best_s
        for i in _by_time(rows):
            row = rows[i]
            over = row.status is Status.OVER_AT_PEAK and row.blocks and row.pieces == 1
            if over and max(row.batch_s, row.bound_s) < most_s * (1 + SURE):
                self.evaluator.watch(f"made to fit: {row.name}")
                fit = self.evaluator.folded_fit(row)
                longest_us = fit.longest_us()
                if longest_us is None:
                    rows[i] = replace(row, needs_bytes=round(fit.least().peak_bytes))
                else:
                    fits[i], most_s = fit, min(most_s, longest_us / 1e6 / row.batches)
        near = {i: fit.best() for i, fit in fits.items() if rows[i].batch_s < most_s * (1 + SURE)}
        timed, ratio = [(fitting.step_us / 1e6 / rows[i].batches, i, fitting) for i, fitting in near.items()], 1.0
        for batch_s, i, fitting in sorted(timed, key=lambda timing: timing[0]):
            peak = round(fitting.peak_bytes)
            rows[i] = replace(rows[i], status=Status.SLOWER, batch_s=batch_s * ratio, needs_bytes=peak, costs=None)
            if self.best is None or rows[i].batch_s < self.best.batch_s:
                rows[i] = self._fit_unfolded(rows[i], fits[i], fitting)
                ratio = min(max(rows[i].batch_s / batch_s, 1 - SURE), 1 + SURE)
        return rows

    def _fit_unfolded(self, row: Candidate, fit: FoldedFit, fitting: FoldedFitting) -> Candidate:
        """All layers with the tensors chosen on folded steps; by a choice of its own where that is over the budget."""
        evaluator = self.evaluator
        planned, local = evaluator.planned(row, evaluator.graph, "all layers: ")
        row = replace(row, blocks=None)
        in_all_layers = replace(fitting, classes=(*fitting.classes, *fitting.partly), partly=(), blocks=0)
        for tried in (fitting, in_all_layers):
            names = fit.unfolded(local, tried)
            fitted = evaluator.priced(row, planned, evaluator.fitting(row).run(local, names)) if names else None
            if names and fitted and not evaluator.is_over(fitted.needs_bytes):
                return self._compared(replace(fitted, rematerialized=names.names), planned)
        return self._fit(replace(row, status=Status.OVER_AT_PEAK))

    def _compared(self, row: Candidate, planned: Plan | None) -> Candidate:
        if self.best is None or row.rank < self.best.rank:
            self.best, self.plan = row, planned
        return row

    @property
    def _best_s(self) -> float:
        return self.best.batch_s if self.best else INFINITE

    # -- refusal ---------------------------------------------------------------------------------------
    def _nothing(self, rows: Sequence[Candidate]) -> PlanError:
        evaluator, budget = self.evaluator, self.evaluator.budget_bytes
        over = [row for row in rows if row.status in (Status.OVER_AT_REST, Status.OVER_AT_PEAK)]
        if not over or budget is None:
            problem = f"no template can be planned: {rows[0].name}: {rows[0].why}" if rows else "no template is left"
            needed = "a template that the model allows"
            return PlanError(problem, needed, "give other styles=, another mesh or another tensor=")
        nearest = self._nearest(over)
        short = nearest.needs_bytes - budget
        remark = ", with all tensors rematerialized that help" if evaluator.recompute else ""
        return BudgetError(
            f"no plan fits: the nearest, {nearest.name} on {nearest.mesh}, needs {human(nearest.needs_bytes)} on a "
            f"rank{remark}, {human(short)} more than there are",
            f"at most {human(budget)}",
            f"give memory_bytes={human_at_least(nearest.needs_bytes)!r} or more, a smaller batch or more ranks",
        )

    def _nearest(self, over: Sequence[Candidate]) -> Candidate:
        """The candidate that needs the fewest bytes. One whose storage alone is over the budget is evaluated too, while
        its storage is less than that.
        """
        tried = [row for row in over if row.status is Status.OVER_AT_PEAK]
        stored = (row for row in over if row.status is Status.OVER_AT_REST)
        for row in sorted(stored, key=lambda row: row.needs_bytes):
            if tried and row.needs_bytes >= min(other.needs_bytes for other in tried):
                break
            tried += map(self.evaluator.least, [row, *(each[-1] for each in self.evaluator.leaner(row)[-1:])])
        while True:
            nearest = min(tried, key=lambda row: row.needs_bytes)
            if not nearest.blocks or nearest.status is not Status.OVER_AT_PEAK:
                return nearest
            tried = [replace(self.evaluator.least(row), blocks=None) if row is nearest else row for row in tried]


def _by_time(rows: Sequence[Candidate]) -> list[int]:
    """Numbers of candidates, the fastest first."""
    return sorted(range(len(rows)), key=lambda i: rows[i].batch_s)
