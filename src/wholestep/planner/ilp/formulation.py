"""A layout problem as a mixed-integer linear program, solved with HiGHS.

Sets

    c in C, i in O(c)      choices (an op, a parameter: a class of equal ones) and the options of each
    v in V                 values: output of a choice, with needs N(v); a need is a reader, its operand, its phase
    p in {forward, backward, update}, and three streams r: compute, the solved axis, the data-parallel axes
    m in M                 memories: classes of values that are views of one buffer

Data

    n_c, n_v               how many equal ops, or values, a choice or a value stands for
    g_i(v), t_i(q)         the state that option i gives v, or takes at need q
    L_i, L_v(a, b)         load of option i, and of resharding v from state a to b (infeasible pairs are left out)
    L(r, p), rest, saved, grad  components of a load: microseconds of stream r in phase p, and bytes
    k_v(b)                 bytes that v holds from the forward to the backward in state b
    B                      the budget in bytes;  w = BESIDE

Variables

    x_ci in {0, 1}         choice c has option i
    f_q(a, b) >= 0         need q of v reads it in state b, and v is given in state a
    y_v(a, b) >= 0         some need of v reads it in state b, given in state a
    h_m >= 0               bytes that memory m holds for the backward
    T_p >= 0               time of phase p

Objective: the sum over phases of the longest stream, and a little of all streams

    min  sum_p T_p  +  w * sum_p sum_r S_rp

    where  S_rp = L_fixed(r, p) + sum_ci n_c L_i(r, p) x_ci + sum_v sum_ab n_v L_v(a, b)(r, p) y_v(a, b),
    and rest, saved, grad are sums of the same form

Constraints, each with the method of `Formulation` that adds it

    one_option         sum_i x_ci = 1                                              for each c
    flow               sum_b f_q(a, b) = sum_{i: g_i(v) = a} x_ci                  for each v, q in N(v), state a
                       sum_a f_q(a, b) = sum_{i: t_i(q) = b} x_ci                  for each v, q in N(v), state b
    any_of             y_v(a, b) >= f_q(a, b)                                      for each v, (a, b), q in N(v)
    saved_memory       h_m >= sum_b n_v k_v(b) z_v(b)                              for each v in m, where z_v(b) >=
                       sum_{i: t_i(q) = b} x_ci for each need q in the backward (`any_of`)
    longest_stream     T_p >= S_rp                                                 for each r, p
    budget             rest + saved + sum_m h_m <= B  and  rest + grad <= B        where a budget is given

Only x is integral: with integral x, flow has one solution, and all other variables are at their lower bounds. Where a
value is given, or needed, in a single state, f is the x of the other side and no variable is made.
Times are in milliseconds, bytes in GiB, which keeps coefficients near 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...layout import AxisState
from .problem import BESIDE, PHASES, Problem, StepLoad, ValueEdge, evaluate

INFINITE = float("inf")
_GIB = float(1 << 30)
Terms = dict[int, float]


class Formulation:
    """The program of one problem, to be minimized; `x[c][i]` is the column of option i of choice c.

    A column has a cost, an upper bound (the lower one is 0) and is integral or not. A row is low <= sum of terms <=
    high. `constant` is part of the objective.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.constant = problem, 0.0
        self.costs, self.upper, self.integral = list[float](), list[float](), list[bool]()
        self.rows: list[tuple[float, float, Terms]] = []
        self.x = [[self.column(0.0, 1.0, True) for _ in choice.options] for choice in problem.choices]
        self.streams: list[tuple[Terms, Terms, Terms]] = [
            (defaultdict(float), defaultdict(float), defaultdict(float)) for _ in PHASES
        ]
        self.rest: Terms = defaultdict(float)
        self.saved: Terms = defaultdict(float)
        self.grad: Terms = defaultdict(float)
        self.memory: dict[int, int] = {}
        self.one_option()
        for value in problem.values:
            self._value(value)
        self.longest_stream()
        self.budget()

    def column(self, cost: float = 0.0, upper: float = INFINITE, integral: bool = False) -> int:
        """Add a column; returns its number."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def one_option(self) -> None:
        """Each choice has exactly one option."""
        for choice, columns in zip(self.problem.choices, self.x, strict=True):
            self.rows.append((1.0, 1.0, dict.fromkeys(columns, 1.0)))
            for option, column in zip(choice.options, columns, strict=True):
                self._add({column: 1.0}, option.load * choice.count)

    def _add(self, terms: Mapping[int, float], load: StepLoad) -> None:
        """Add `load`, times the sum of `terms`, to S, rest, saved and grad."""
        sums = [
            (total, us / 1e3)
            for phase, totals in enumerate(self.streams)
            for total, us in zip(totals, load.streams(phase), strict=True)
        ]
        sums += [(self.rest, load.rest / _GIB), (self.saved, load.saved / _GIB), (self.grad, load.grad / _GIB)]
        for total, amount in sums:
            for column, factor in terms.items() if amount else ():
                total[column] += amount * factor

    def _value(self, value: ValueEdge) -> None:
        gives = self._states(value.maker, value.output, gives=True)
        moved: dict[tuple[AxisState, AxisState], list[Terms]] = {}
        late: dict[AxisState, list[Terms]] = {}
        for need in value.needs:
            takes = self._states(need.taker, need.at, gives=False)
            for pair, terms in self.flow(gives, takes, value).items():
                moved.setdefault(pair, []).append(terms)
            for state, terms in takes.items() if need.later else ():
                late.setdefault(state, []).append(terms)
        for pair, several in moved.items():
            load = value.moves[pair]
            if not load.is_nothing:
                self._add(self.any_of(several), load * value.count)
        self.saved_memory(value, late)

    def _states(self, choice: int, at: int, gives: bool) -> dict[AxisState, Terms]:
        """For each state of one value the options that give it, or take it."""
        out: dict[AxisState, Terms] = {}
        for option, column in zip(self.problem.choices[choice].options, self.x[choice], strict=True):
            out.setdefault((option.gives if gives else option.takes)[at], {})[column] = 1.0
        return out

    def flow(
        self, gives: Mapping[AxisState, Terms], takes: Mapping[AxisState, Terms], value: ValueEdge
    ) -> dict[tuple[AxisState, AxisState], Terms]:
        """F of one need: for each pair of states the terms that are 1 where it is the pair."""
        pairs = [(g, w) for g in gives for w in takes if (g, w) in value.moves]
        if len(gives) == 1 and len(pairs) == len(takes):
            return {(g, w): takes[w] for g, w in pairs}
        if len(takes) == 1 and len(pairs) == len(gives):
            return {(g, w): gives[g] for g, w in pairs}
        flow = {pair: self.column() for pair in pairs}
        for g, terms in gives.items():
            into = {flow[pair]: 1.0 for pair in pairs if pair[0] == g}
            self.rows.append((0.0, 0.0, {**into, **dict.fromkeys(terms, -1.0)}))
        for w, terms in takes.items():
            out = {flow[pair]: 1.0 for pair in pairs if pair[1] == w}
            self.rows.append((0.0, 0.0, {**out, **dict.fromkeys(terms, -1.0)}))
        return {pair: {column: 1.0} for pair, column in flow.items()}

    def any_of(self, several: list[Terms]) -> Terms:
        """At least the largest of `several`: 1 where one of them is."""
        if len(several) == 1:
            return several[0]
        column = self.column()
        for terms in several:
            self.rows.append((-INFINITE, 0.0, {**terms, column: -1.0}))
        return {column: 1.0}

    def saved_memory(self, value: ValueEdge, late: Mapping[AxisState, list[Terms]]) -> None:
        """A memory holds the largest of the values that are views of it, in each state that the backward reads."""
        saved: Terms = defaultdict(float)
        for state, several in late.items():
            size = value.saved.get(state, 0.0) * value.count / _GIB
            for column, factor in self.any_of(several).items() if size else ():
                saved[column] += size * factor
        if saved and self.problem.budget_bytes is not None:
            if value.memory not in self.memory:
                self.memory[value.memory] = self.column()
                self.saved[self.memory[value.memory]] += 1.0
            self.rows.append((-INFINITE, 0.0, {**saved, self.memory[value.memory]: -1.0}))

    def longest_stream(self) -> None:
        """The objective, and T of each phase is at least each stream."""
        for phase, totals in enumerate(self.streams):
            longest = self.column(1.0)
            fixed = self.problem.fixed.streams(phase)
            for terms, us in zip(totals, fixed, strict=True):
                self.rows.append((-INFINITE, -us / 1e3, {**terms, longest: -1.0}))
                self.constant += BESIDE * us / 1e3
                for column, ms in terms.items():
                    self.costs[column] += BESIDE * ms

    def budget(self) -> None:
        """Peak bytes at the end of the forward, and before the update."""
        fixed = self.problem.fixed
        for terms, amount in ((self.saved, fixed.saved), (self.grad, fixed.grad)):
            if self.problem.budget_bytes is None:
                return
            both = defaultdict(float, self.rest)
            for column, size in terms.items():
                both[column] += size
            self.rows.append((-INFINITE, (self.problem.budget_bytes - fixed.rest - amount) / _GIB, both))


@dataclass(frozen=True)
class Solution:
    """The option of each choice by number, their load, the bound that HiGHS proved, and the number of variables."""

    picked: tuple[int, ...]
    load: StepLoad
    bound_us: float
    variables: int

    @property
    def step_us(self) -> float:
        """The objective in microseconds."""
        return self.load.step_us

    @property
    def gap(self) -> float:
        """The part of the objective that is above the bound."""
        return max(0.0, 1 - self.bound_us / self.step_us) if self.step_us else 0.0


def solve(problem: Problem, gap: float = 0.005) -> Solution | None:
    """The shortest step within the budget, to `gap`; None where there is none.

    The search ends after a number of nodes, the same on every machine, or else after a minute.
    """
    program = Formulation(problem)
    solved = _run(program, gap)
    if solved is None:
        return None
    values, bound_ms = solved
    picked = tuple(max(range(len(row)), key=lambda i: values[row[i]]) for row in program.x)
    load = evaluate(problem, picked)
    assert load is not None, "the program allows feasible assignments only"
    return Solution(picked, load, min(bound_ms * 1e3, load.step_us), len(program.costs))


def _run(program: Formulation, gap: float) -> tuple[list[float], float] | None:
    """The value of each column, and the bound; None where there is no solution."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.rows)
    lp.offset_ = program.constant
    lp.col_cost_ = np.array(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(len(program.costs)), np.array(program.upper)
    lp.row_lower_ = np.array([low for low, _, _ in program.rows])
    lp.row_upper_ = np.array([high for _, high, _ in program.rows])
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if integral else kinds.kContinuous for integral in program.integral]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for _, _, terms in program.rows)])
    lp.a_matrix_.index_ = np.array([column for _, _, terms in program.rows for column in terms])
    lp.a_matrix_.value_ = np.array([factor for _, _, terms in program.rows for factor in terms.values()])
    highs = highspy.Highs()
    options = {
        "output_flag": False, "threads": 1, "random_seed": 1, "mip_rel_gap": gap, "mip_max_nodes": 2000,
        "time_limit": 60.0,
    }  # fmt: skip
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != 2:
        return None
    return list(highs.getSolution().col_value), float(info.mip_dual_bound)
