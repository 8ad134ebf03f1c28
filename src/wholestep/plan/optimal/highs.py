"""Hands a problem to HiGHS as a mixed integer program, and reads back which option each choice has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...layout import AxisState
from .problem import BESIDE, EXPOSED, PHASES, Load, Problem, Value, evaluate

_INF = float("inf")
_GIB = float(1 << 30)
Terms = dict[int, float]


@dataclass(frozen=True)
class Solution:
    """The option of each choice, by number; microseconds and bytes of the problem's own model, the bound that HiGHS
    proved for it, and the size of the program: variables, those that are whole numbers, rows.
    """

    picked: tuple[int, ...]
    load: Load
    bound_us: float
    variables: int
    binaries: int
    rows: int
    exposed: float = EXPOSED

    @property
    def step_us(self) -> float:
        """The objective: microseconds of a step by the problem's own model."""
        return self.load.step_us(self.exposed)

    @property
    def gap(self) -> float:
        """The part of the objective that is above the bound."""
        return max(0.0, 1 - self.bound_us / self.step_us) if self.step_us else 0.0


@dataclass
class _Program:
    """Columns (cost, highest value, whole number or not) and rows of a program that is minimised; all are at least 0.
    `always` is added to the costs.
    """

    costs: list[float] = field(default_factory=list[float])
    highest: list[float] = field(default_factory=list[float])
    whole: list[bool] = field(default_factory=list[bool])
    rows: list[tuple[float, float, Terms]] = field(default_factory=list[tuple[float, float, Terms]])
    always: float = 0.0

    def add(self, cost: float = 0.0, highest: float = _INF, whole: bool = False) -> int:
        """A new column."""
        self.costs.append(cost)
        self.highest.append(highest)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, low: float, high: float, terms: Terms) -> None:
        """`low` <= sum of `terms` <= `high`."""
        self.rows.append((low, high, terms))


def solve(
    problem: Problem, gap: float = 0.005, most_nodes: int = 2000, most_seconds: float = 60.0,
    without: Iterable[tuple[int, ...]] = (),
) -> Solution | None:  # fmt: skip
    """The shortest step within the problem's bytes, to `gap`; None where nothing is within them.

    It ends after `most_nodes` of the search, which is the same on every machine, or after `most_seconds`. Assignments
    in `without` are left out.
    """
    program = _Program()
    build = _Build(problem, program)
    build.run()
    for picked in without:
        program.row(-_INF, len(picked) - 1, {build.taken[c][i]: 1.0 for c, i in enumerate(picked)})
    found = _run(program, gap, most_nodes, most_seconds)
    if found is None:
        return None
    values, bound_ms = found
    picked = tuple(max(range(len(row)), key=lambda i: values[row[i]]) for row in build.taken)
    load = evaluate(problem, picked)
    assert load is not None, "the program allows only what can be"
    size = len(program.costs), sum(program.whole), len(program.rows)
    return Solution(picked, load, min(bound_ms * 1e3, load.step_us(problem.exposed)), *size, problem.exposed)


class _Build:
    """Columns and rows of one problem. Times are in milliseconds, sizes in GiB."""

    def __init__(self, problem: Problem, program: _Program) -> None:
        self.problem, self.program = problem, program
        self.taken = [[program.add(0.0, 1.0, True) for _ in choice.options] for choice in problem.choices]
        self.streams: list[tuple[Terms, Terms, Terms]] = [
            (defaultdict(float), defaultdict(float), defaultdict(float)) for _ in PHASES
        ]
        self.rest: Terms = defaultdict(float)
        self.kept: Terms = defaultdict(float)
        self.made: Terms = defaultdict(float)
        self.memory: dict[int, int] = {}

    def run(self) -> None:
        for choice, columns in zip(self.problem.choices, self.taken, strict=True):
            self.program.row(1.0, 1.0, dict.fromkeys(columns, 1.0))
            for option, column in zip(choice.options, columns, strict=True):
                self._load({column: 1.0}, option.load * choice.count)
        for value in self.problem.values:
            self._value(value)
        self._totals()

    def _load(self, terms: Mapping[int, float], load: Load) -> None:
        """`load` for each unit of `terms`."""
        sums = [
            (total, us / 1e3)
            for phase, totals in enumerate(self.streams)
            for total, us in zip(totals, load.streams(phase, self.problem.exposed), strict=True)
        ]
        sums += [(self.rest, load.rest / _GIB), (self.kept, load.kept / _GIB), (self.made, load.made / _GIB)]
        for total, amount in sums:
            for column, factor in terms.items() if amount else ():
                total[column] += amount * factor

    def _value(self, value: Value) -> None:
        given = self._states(value.maker, value.output, gives=True)
        alike: dict[tuple[AxisState, AxisState], list[Terms]] = {}
        late: dict[AxisState, list[Terms]] = {}
        for need in value.needs:
            wanted = self._states(need.taker, need.at, gives=False)
            for (have, want), terms in self._flow(given, wanted, value).items():
                alike.setdefault((have, want), []).append(terms)
            for state, terms in wanted.items() if need.later else ():
                late.setdefault(state, []).append(terms)
        for pair, several in alike.items():
            load = value.moves[pair]
            if not load.is_nothing:
                self._load(self._any(several), load * value.count)
        held: Terms = defaultdict(float)
        for state, several in late.items():
            size = value.kept.get(state, 0.0) * value.count / _GIB
            for column, factor in self._any(several).items() if size else ():
                held[column] += size * factor
        if held and self.problem.budget_bytes is not None:
            if value.memory not in self.memory:
                self.memory[value.memory] = self.program.add()
                self.kept[self.memory[value.memory]] += 1.0
            self.program.row(-_INF, 0.0, {**held, self.memory[value.memory]: -1.0})

    def _states(self, choice: int, at: int, gives: bool) -> dict[AxisState, Terms]:
        """For each state of one value the options that give (or take) it."""
        out: dict[AxisState, Terms] = {}
        for option, column in zip(self.problem.choices[choice].options, self.taken[choice], strict=True):
            out.setdefault((option.gives if gives else option.takes)[at], {})[column] = 1.0
        return out

    def _flow(
        self, given: Mapping[AxisState, Terms], wanted: Mapping[AxisState, Terms], value: Value
    ) -> dict[tuple[AxisState, AxisState], Terms]:
        """For each pair of states 1 where the value is given in the one and needed in the other."""
        pairs = [(g, w) for g in given for w in wanted if (g, w) in value.moves]
        if len(given) == 1 and len(pairs) == len(wanted):
            return {(g, w): wanted[w] for g, w in pairs}
        if len(wanted) == 1 and len(pairs) == len(given):
            return {(g, w): given[g] for g, w in pairs}
        flow = {pair: self.program.add() for pair in pairs}
        for g, terms in given.items():
            into = {flow[pair]: 1.0 for pair in pairs if pair[0] == g}
            self.program.row(0.0, 0.0, {**into, **dict.fromkeys(terms, -1.0)})
        for w, terms in wanted.items():
            out = {flow[pair]: 1.0 for pair in pairs if pair[1] == w}
            self.program.row(0.0, 0.0, {**out, **dict.fromkeys(terms, -1.0)})
        return {pair: {column: 1.0} for pair, column in flow.items()}

    def _any(self, several: list[Terms]) -> Terms:
        """1 where any of `several` is."""
        if len(several) == 1:
            return several[0]
        column = self.program.add()
        for terms in several:
            self.program.row(-_INF, 0.0, {**terms, column: -1.0})
        return {column: 1.0}

    def _totals(self) -> None:
        fixed = self.problem.fixed
        for phase, totals in enumerate(self.streams):
            longest = self.program.add(1.0)
            for terms, us in zip(totals, fixed.streams(phase, self.problem.exposed), strict=True):
                self.program.row(-_INF, -us / 1e3, {**terms, longest: -1.0})
                self.program.always += BESIDE * us / 1e3
                for column, ms in terms.items():
                    self.program.costs[column] += BESIDE * ms
        if self.problem.budget_bytes is None:
            return
        for terms, amount in ((self.kept, fixed.kept), (self.made, fixed.made)):
            both = defaultdict(float, self.rest)
            for column, size in terms.items():
                both[column] += size
            self.program.row(-_INF, (self.problem.budget_bytes - fixed.rest - amount) / _GIB, both)


def _run(program: _Program, gap: float, most_nodes: int, most_seconds: float) -> tuple[list[float], float] | None:
    """The values of all columns and the bound, or None where there is no solution."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.rows)
    lp.offset_ = program.always
    lp.col_cost_ = np.array(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(len(program.costs)), np.array(program.highest)
    lp.row_lower_ = np.array([low for low, _, _ in program.rows])
    lp.row_upper_ = np.array([high for _, high, _ in program.rows])
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in program.whole]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for _, _, terms in program.rows)])
    lp.a_matrix_.index_ = np.array([column for _, _, terms in program.rows for column in terms])
    lp.a_matrix_.value_ = np.array([factor for _, _, terms in program.rows for factor in terms.values()])
    highs = highspy.Highs()
    options = {
        "output_flag": False, "threads": 1, "random_seed": 1, "mip_rel_gap": gap, "mip_max_nodes": most_nodes,
        "time_limit": most_seconds,
    }  # fmt: skip
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != 2:
        return None
    return list(highs.getSolution().col_value), float(info.mip_dual_bound)
