"""Looks for the plan with the shortest simulated step under a budget of memory, and keeps why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import Literal

from ..cost.compute import peak_us
from ..cost.memory import peak_memory
from ..errors import BudgetError, ConstraintError, PlanError, WholestepError
from ..graph.graph import LocalGraph, TrainGraph
from ..graph.text import human
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..partition.lower import partition
from ..plan.make_plan import bytes_at_rest, plan
from ..plan.optimal.find import Solved
from ..plan.plan import Plan
from ..plan.strategy import Strategies, compose
from ..tuning import TUNING
from .costs import Costs, costs_of, fingerprint, least
from .fit import Finish
from .guess import guess_us
from .short import FEWEST, Short
from .short_fit import Fit, ShortFit
from .templates import Template, batches
from .wanted import Wanted

Fate = Literal["chosen", "slower", "bounded", "same", "rest", "peak", "no plan"]
PRUNED: tuple[Fate, ...] = ("bounded", "same", "rest")
Watch = Callable[[str], None]
_INFINITE = float("inf")
SURE, SURE_BYTES = TUNING.sure_share, TUNING.sure_bytes_share
"""By how much extrapolated seconds and bytes may be off: what is nearer to the best is simulated with all layers."""


@dataclass(frozen=True)
class Considered:
    """One candidate and its fate: `chosen`; `slower` when simulated; `bounded`: slower by its lower bound; the `same`
    program as another; `rest`: what it keeps between steps is over the budget; `peak`: what it holds is; `no plan`.

    `batch_s` and `bound_s` are seconds for each captured batch, infinite and 0 where not known; `needs_bytes` is the
    least of which it is known that it takes it. `blocks`: these follow from steps with so many equal layers, not all,
    planned with `alike` where `strategies` do not treat those alike.
    """

    name: str
    mesh: Mesh
    strategies: Strategies | None
    batches: int = 1
    fate: Fate = "slower"
    batch_s: float = float("inf")
    bound_s: float = 0.0
    needs_bytes: int = 0
    costs: Costs | None = None
    again: tuple[str, ...] = ()
    why: str = ""
    blocks: tuple[int, int] | None = None
    alike: Strategies | None = None

    @property
    def gathers(self) -> bool:
        """True where parameters that are kept gathered may be gathered again to save memory."""
        data = self.strategies.data if self.strategies else None
        return data is not None and data.reshard_after_forward is False


More = Callable[[Sequence[Considered]], Sequence[tuple[Mesh, Template]]]


@dataclass(frozen=True)
class Found:
    """What a search found: the winner's plan, and every candidate, the best first. `short` says how those that were not
    simulated with all layers were extrapolated, `solved` is the first program that was solved.
    """

    plan: Plan
    best: Considered
    rows: tuple[Considered, ...]
    budget_bytes: int | None
    short: Short | None = None
    solved: Solved | None = None

    @property
    def bound_s(self) -> float:
        """Seconds for a batch that no schedule of any candidate that was in the race is faster than."""
        return min(row.bound_s for row in self.rows if row.fate in ("chosen", "slower", "bounded"))

    @property
    def simulated(self) -> int:
        """How many candidates were scheduled and simulated."""
        return sum(row.costs is not None for row in self.rows)

    @property
    def extrapolated(self) -> int:
        """How many of these with few of the equal layers only."""
        return sum(row.costs is not None and row.blocks is not None for row in self.rows)

    @property
    def pruned(self) -> int:
        """How many lost without that."""
        return sum(row.fate in PRUNED for row in self.rows)


@dataclass
class Search:
    """Candidates are planned one after the other, the most promising first, and simulated unless a bound says that
    they lose. Those that do not fit the budget have values made again, unless they are slower than one that does. What
    is not as `wanted` is no plan.

    With `short`, that is done to the step with few of its equal layers, and extrapolated; then those that may be the
    best are simulated with all layers, until the best of these is ahead of the others by more than extrapolation errs.
    """

    graph: TrainGraph
    hardware: Hardware
    budget_bytes: int | None
    finish: Finish
    recompute: bool = True
    placed: Mapping[str, Layout] | None = None
    watch: Watch | None = None
    short: Short | None = None
    wanted: Wanted = field(default_factory=Wanted)
    best: Considered | None = None
    plan: Plan | None = None
    programs: dict[int, str] = field(default_factory=dict[int, str])
    bounds: dict[tuple[Mesh, str], float] = field(default_factory=dict[tuple[Mesh, str], float])

    def run(self, candidates: Sequence[tuple[Mesh, Template]], more: More | None = None) -> Found:
        """The best of `candidates`, and of those that `more` makes of what is known of them.

        Raises:
            PlanError: none can be planned, or none fits; says how many bytes are missing, and where the fewest.
        """
        rows = self._race(candidates)
        rows += self._race(more(rows)) if more is not None else []
        rows = self._confirmed(rows) if self.short is not None else rows
        before = tuple(rows)
        if self.recompute and self.budget_bytes is not None:
            if self.short is not None:
                rows = self._fitted_short(rows, self.short, self.budget_bytes)
            for i in sorted(range(len(rows)), key=lambda i: rows[i].batch_s):
                faster = self.best is None or rows[i].batch_s < self.best.batch_s
                if faster and rows[i].fate == "peak" and rows[i].blocks is None:
                    rows[i] = self._fitted(rows[i], self.budget_bytes)
        rows = self._nearly(before, rows)
        if self.best is None or self.plan is None:
            raise self._nothing(rows)
        best = replace(self.best, fate="chosen")
        rows = [best if row is self.best else row for row in rows]
        done = tuple(sorted(rows, key=_rank))
        return Found(self.plan, best, done, self.budget_bytes, self.short)

    def _race(self, candidates: Sequence[tuple[Mesh, Template]]) -> list[Considered]:
        """One after the other, the most promising first."""
        rows = [self._resting(mesh, template) for mesh, template in candidates]
        computing_us = peak_us(self.graph.graph, self.hardware)
        for i in sorted(range(len(rows)), key=lambda i: self._promise(rows[i], computing_us)):
            if rows[i].fate == "slower":
                rows[i] = self._tried(rows[i])
        return rows

    def _confirmed(self, rows: list[Considered]) -> list[Considered]:
        """With all layers: the candidates of which extrapolation does not say that they lose."""
        self.best = self.plan = None
        self.programs.clear()
        for i in sorted(range(len(rows)), key=lambda i: rows[i].batch_s):
            row, best_s = rows[i], self.best.batch_s if self.best else _INFINITE
            if row.fate == "slower" and row.batch_s < best_s * (1 + SURE):
                rows[i] = self._simulated(replace(row, fate="slower", blocks=None), "all layers: ")
            elif row.fate == "bounded" and row.bound_s < best_s < _INFINITE:
                rows[i] = self._tried(replace(row, fate="slower", blocks=None))
        return rows

    def _nearly(self, before: Sequence[Considered], rows: list[Considered]) -> list[Considered]:
        """With all layers: those `before` of which extrapolation does not say that they hold too much, where they would
        be the best.
        """
        for i in sorted(range(len(rows)), key=lambda i: before[i].batch_s):
            row, best_s = before[i], self.best.batch_s if self.best else _INFINITE
            near = row.fate == "peak" and row.blocks and not self._over(row.needs_bytes, 1 + SURE_BYTES)
            if near and row.batch_s < best_s:
                found = self._simulated(replace(row, fate="slower", blocks=None), "all layers: ")
                if found.fate == "peak" and self.recompute and self.budget_bytes is not None:
                    found = self._fitted(found, self.budget_bytes)
                if found.fate == "slower" and rows[i] is not self.best:
                    rows[i] = found
        return rows

    def _resting(self, mesh: Mesh, template: Template) -> Considered:
        """What is known before anything is planned."""
        if isinstance(template.strategies, WholestepError):
            return Considered(template.name, mesh, None, fate="no plan", why=first_line(template.strategies))
        strategies = compose(template.strategies)
        alike = compose(template.alike) if template.alike else strategies
        row = Considered(template.name, mesh, strategies, batches(strategies, mesh), alike=alike)
        try:
            blocks = self.short.blocks(mesh, alike, self.placed) if self.short else None
            if self.short and blocks:
                rest = self.short.bytes_at_rest(mesh, alike, self.placed)
            else:
                rest = bytes_at_rest(self.graph, mesh, strategies, self.placed)
            row = replace(row, needs_bytes=rest, blocks=blocks)
        except WholestepError as error:
            return Considered(template.name, mesh, None, fate="no plan", why=first_line(error))
        over = self.budget_bytes is not None and rest > self.budget_bytes
        return replace(row, fate="rest") if over else row

    def _promise(self, row: Considered, computing_us: float) -> float:
        if row.strategies is None:
            return float("inf")
        return guess_us(self.graph, row.mesh, row.strategies, self.hardware, computing_us) / row.batches

    def _tried(self, row: Considered) -> Considered:
        """Planned, bounded and, unless it loses by that, simulated."""
        less = self.bounds.get((row.mesh, sends_less(row.name)), 0.0)
        if self.best is not None and less >= self.best.batch_s:
            return replace(row, fate="bounded", bound_s=less)
        return self._simulated(row)

    def _simulated(self, row: Considered, doing: str = "") -> Considered:
        """Simulated with few layers and extrapolated, or with all."""
        short = self.short if row.blocks else None
        if self.watch is not None:
            self.watch(f"{doing}{row.name}")
        try:
            made = self._made(row, FEWEST if short else None)
        except WholestepError as error:
            if short and not isinstance(error, ConstraintError):  # a pattern that names a layer, perhaps
                return self._simulated(replace(row, blocks=None), "all layers: ")
            return replace(row, fate="no plan", why=first_line(error))
        parts = [least(local, self.hardware) for _, local in made]
        bound = short.least(FEWEST, parts) if short else parts[0]
        row = replace(row, bound_s=bound.us(self.hardware, row.mesh) / 1e6 / row.batches)
        self.bounds[row.mesh, row.name] = row.bound_s
        if self.best is not None and row.bound_s >= self.best.batch_s:
            return replace(row, fate="bounded")
        itself = short is None or row.alike == row.strategies
        mark = hash((*(fingerprint(local) for _, local in made), "" if itself else row.name))
        if mark in self.programs:
            return replace(row, fate="same", why=self.programs[mark])
        self.programs[mark] = row.name
        if row.blocks not in (None, FEWEST):
            made = self._made(row, row.blocks, known=dict(zip(FEWEST, made, strict=True)))
        if short and row.blocks:
            row = self._priced(row, short.priced(row.blocks, made, self.finish))
        else:
            row = self._priced(row, costs_of(self.finish(made[0][1]), made[0][0], self.hardware))
        return replace(row, fate="peak") if self._over(row.needs_bytes) else self._compared(row, made[-1][0])

    def _fitted_short(self, rows: list[Considered], short: Short, budget_bytes: int) -> list[Considered]:
        """With values made again in all equal layers alike: on short steps, then with all layers those that may win. By
        how much extrapolation was off for one, up to what it may be, it is taken to be for the next.
        """
        fitting: dict[int, ShortFit] = {}
        most_s = self.best.batch_s if self.best else _INFINITE
        for i in sorted(range(len(rows)), key=lambda i: rows[i].batch_s):
            row = rows[i]
            if row.fate == "peak" and row.blocks and max(row.batch_s, row.bound_s) < most_s * (1 + SURE):
                one = self._fitting(row, short, "made to fit: ")
                longest_us = one.longest_us(budget_bytes)
                if longest_us is None:
                    rows[i] = replace(row, needs_bytes=round(one.least().peak_bytes))
                else:
                    fitting[i], most_s = one, min(most_s, longest_us / 1e6 / row.batches)
        near = {i: one.best(budget_bytes) for i, one in fitting.items() if rows[i].batch_s < most_s * (1 + SURE)}
        found, off = [(fit.step_us / 1e6 / rows[i].batches, i, fit) for i, fit in near.items()], 1.0
        for batch_s, i, fit in sorted(found, key=lambda one: one[0]):
            peak = round(fit.peak_bytes)
            rows[i] = replace(rows[i], fate="slower", batch_s=batch_s * off, needs_bytes=peak, costs=None)
            if self.best is None or rows[i].batch_s < self.best.batch_s:
                rows[i] = self._fitted_whole(rows[i], fitting[i], fit, budget_bytes)
                off = min(max(rows[i].batch_s / batch_s, 1 - SURE), 1 + SURE)
        return rows

    def _fitting(self, row: Considered, short: Short, doing: str) -> ShortFit:
        assert row.blocks is not None, "it is simulated with few layers"
        (_, few), (_, more) = self._made(row, row.blocks, doing)
        return ShortFit(short, row.blocks, (few, more), self.finish, row.gathers)

    def _fitted_whole(self, row: Considered, fitting: ShortFit, fit: Fit, budget_bytes: int) -> Considered:
        """All layers with what was chosen on short steps made again; by the whole step's own choice if that fails."""
        planned, local = self._planned(row, self.graph, "all layers: ")
        row = replace(row, blocks=None)
        for tried in (fit, replace(fit, kinds=(*fit.kinds, *fit.partly), partly=(), blocks=0)):
            made = fitting.whole(local, tried)
            found = costs_of(made[0], planned, self.hardware) if made else None
            if made and found and found.peak_bytes <= budget_bytes:
                return self._compared(replace(self._priced(row, found), again=made[1]), planned)
        return self._fitted(replace(row, fate="peak"), budget_bytes)

    def _made(
        self, row: Considered, blocks: tuple[int, int] | None, doing: str = "",
        known: Mapping[int, tuple[Plan, LocalGraph]] = MappingProxyType({}),
    ) -> list[tuple[Plan, LocalGraph]]:  # fmt: skip
        """Plans and programs of the steps with so many equal layers, or of that with all; some may be `known`."""
        if self.watch is not None and doing:
            self.watch(f"{doing}{row.name}")
        if not self.short or not blocks:
            return [self._planned(row, self.graph)]
        return [known.get(n) or self._planned(row, self.short.with_blocks(n)) for n in blocks]

    def _over(self, size_bytes: int, sure: float = 1.0) -> bool:
        return self.budget_bytes is not None and size_bytes > self.budget_bytes * sure

    def _fitted(self, row: Considered, budget_bytes: int) -> Considered:
        """With values made again; `peak` as before where that is not enough."""
        if self.best is not None and row.bound_s >= self.best.batch_s:
            return replace(row, fate="bounded")
        planned, local = self._planned(row, self.graph, "made to fit: ")
        made = self.finish.fit(local, budget_bytes, self.hardware, row.gathers)
        if made.program is None:
            return replace(row, needs_bytes=made.peak_bytes)
        row = self._priced(row, costs_of(made.program, planned, self.hardware))
        return self._compared(replace(row, fate="slower", again=made.again), planned)

    def _planned(self, row: Considered, graph: TrainGraph, doing: str = "") -> tuple[Plan, LocalGraph]:
        strategies = row.strategies if graph is self.graph else row.alike
        assert strategies is not None, "it has a plan"
        if self.watch is not None and doing:
            self.watch(f"{doing}{row.name}")
        planned = plan(graph, row.mesh, strategies, self.placed, self.hardware)
        self.wanted.check(planned)
        return planned, partition(graph, planned)

    def _priced(self, row: Considered, found: Costs) -> Considered:
        return replace(row, costs=found, batch_s=found.step_s / row.batches, needs_bytes=found.peak_bytes)

    def _compared(self, row: Considered, planned: Plan) -> Considered:
        if self.best is None or _rank(row) < _rank(self.best):
            self.best, self.plan = row, planned
        return row

    def _nothing(self, rows: Sequence[Considered]) -> PlanError:
        known = [row for row in rows if row.fate in ("rest", "peak")]
        if not known or self.budget_bytes is None:
            return PlanError(
                f"no template can be planned: {rows[0].name}: {rows[0].why}" if rows else "no template is left",
                "a template that the model allows",
                f"give other styles=, another mesh or another tensor={', or drop a wish' if self.wanted.axes else ''}",
            )
        nearest = self._nearest(known)
        short = nearest.needs_bytes - self.budget_bytes
        made = ", with all made again that helps" if self.recompute else ""
        return BudgetError(
            f"no plan fits: the nearest, {nearest.name} on {nearest.mesh}, needs {nearest.needs_bytes} bytes on a "
            f"rank{made}, {short} more than there are ({human(short)})",
            f"at most {self.budget_bytes} bytes",
            f"give memory_bytes={nearest.needs_bytes} or more, a smaller batch or more ranks",
        )

    def _nearest(self, known: Sequence[Considered]) -> Considered:
        """The candidate that takes the fewest bytes. Those that were left out for what they keep are looked at too,
        as long as that alone is not more.
        """
        done = [row for row in known if row.fate == "peak"]
        for row in sorted((row for row in known if row.fate == "rest"), key=lambda row: row.needs_bytes):
            if done and row.needs_bytes >= min(other.needs_bytes for other in done):
                break
            done.append(self._least(row))
        while (nearest := min(done, key=lambda row: row.needs_bytes)).blocks and nearest.fate == "peak":
            done = [replace(self._least(nearest), blocks=None) if row is nearest else row for row in done]
        return nearest

    def _least(self, row: Considered) -> Considered:
        """The same with the bytes that it takes at least."""
        try:
            _, local = self._planned(row, self.graph, "the least memory of ")
        except WholestepError:
            return replace(row, needs_bytes=1 << 62)
        if not self.recompute:
            return replace(row, needs_bytes=self.finish.least_bytes(local))
        if self.short is not None and row.blocks:
            fitting = self._fitting(row, self.short, "")
            least = fitting.least()
            made = fitting.whole(local, least)
            if made is not None:
                return replace(row, needs_bytes=max(peak_memory(made[0]).size_bytes, ceil(least.peak_bytes)))
        return replace(row, needs_bytes=self.finish.fit(local, 0, self.hardware, row.gathers).peak_bytes)


def sends_less(name: str) -> str:
    """The template that computes and sends the same, but for gathers for the backward and a scatter in each batch."""
    return name.replace("gathered again", "kept").replace("zero2", "zero1")


def _rank(row: Considered) -> tuple[bool, float, float, int]:
    """By time for a batch; where that is the same, by bytes."""
    known = row.fate in ("chosen", "slower")
    return not known, row.batch_s if known else float("inf"), row.bound_s if not known else 0.0, row.needs_bytes


def first_line(error: WholestepError) -> str:
    """What an error found, and what it needed."""
    found = error.found.splitlines()[0]
    return f"{found}; needed: {error.needed}" if error.needed else found
