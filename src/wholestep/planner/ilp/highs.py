"""Solves a layout problem with HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .formulation import Formulation, LinearProgram
from .problem import EXPOSED, Problem, StepLoad, evaluate


@dataclass(frozen=True)
class Solution:
    """The number of the option of each choice, the load of these options, the lower bound that HiGHS proved, and the
    size of the program.
    """

    picked: tuple[int, ...]
    load: StepLoad
    bound_us: float
    variables: int
    binaries: int
    rows: int
    exposed: float = EXPOSED

    @property
    def step_us(self) -> float:
        """The objective in microseconds."""
        return self.load.step_us(self.exposed)

    @property
    def gap(self) -> float:
        """The part of the objective that is above the bound."""
        return max(0.0, 1 - self.bound_us / self.step_us) if self.step_us else 0.0


def solve(
    problem: Problem, gap: float = 0.005, most_nodes: int = 2000, most_seconds: float = 60.0,
    without: Iterable[tuple[int, ...]] = (),
) -> Solution | None:  # fmt: skip
    """The shortest step within the budget, to `gap`; None where there is none.

    The search ends after `most_nodes`, the same on every machine, or after `most_seconds`. Assignments in `without`
    are left out.
    """
    made = Formulation(problem)
    program = made.program
    for picked in without:
        made.exclude(picked)
    found = _run(program, gap, most_nodes, most_seconds)
    if found is None:
        return None
    values, bound_ms = found
    picked = tuple(max(range(len(row)), key=lambda i: values[row[i]]) for row in made.x)
    load = evaluate(problem, picked)
    assert load is not None, "the program allows feasible assignments only"
    size = len(program.costs), sum(program.integral), len(program.rows)
    return Solution(picked, load, min(bound_ms * 1e3, load.step_us(problem.exposed)), *size, problem.exposed)


def _run(program: LinearProgram, gap: float, most_nodes: int, most_seconds: float) -> tuple[list[float], float] | None:
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
    lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in program.integral]
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
