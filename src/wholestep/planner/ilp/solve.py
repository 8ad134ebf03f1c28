"""Solves for the layouts of a step; ops are decomposed where that lets them be sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...graph.decompose import can_expand, expand
from ...graph.graph import TrainGraph
from ...graph.text import seconds
from ...layout import AxisState
from ...plan.data_parallel import StorageOption
from ...plan.strategy import Pins
from ...plan.tensor_parallel import SolvedLayouts, TensorParallel
from .build_problem import ProblemBuilder, ProblemSpec
from .formulation import Solution, solve
from .problem import Problem, fits

aten = torch.ops.aten
_DECOMPOSED = {
    aten.addmm.default, aten.baddbmm.default, aten.mean.default, aten.mse_loss.default, aten.mse_loss_backward.default,
    aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
}  # fmt: skip


@dataclass(frozen=True)
class IlpResult:
    """Pins of ops, the state and storage option of each parameter, and how many choices stand for how many nodes."""

    pins: Pins
    params: Mapping[str, AxisState]
    storage: Mapping[str, StorageOption]
    solution: Solution
    choices: int
    nodes: int

    def layouts(self, tensor: TensorParallel) -> SolvedLayouts:
        """The layouts as a strategy in place of `tensor`."""
        return SolvedLayouts(
            tensor.axis, self.params, self.pins, str(self), tensor.input_dim, tensor.async_tp,
            tensor.reshard_after_forward,
        )  # fmt: skip

    def __str__(self) -> str:
        solution = self.solution
        return (
            f"{seconds(solution.step_us / 1e6)} by a model that adds up, at least {seconds(solution.bound_us / 1e6)}, "
            f"gap {solution.gap:.2%}; {self.choices} choices for {self.nodes} ops and parameters, "
            f"{solution.variables} variables"
        )


def solve_layouts(
    graph: TrainGraph, spec: ProblemSpec, budgets: Sequence[float | None] = (None,), gap: float = 0.005
) -> list[IlpResult]:
    """The layouts of the shortest step for each budget of bytes, to `gap`; budgets that nothing fits are left out.

    The first program decomposes every op that may be sharded that way. Ops for which the solution does not use it stay
    whole in the second program.
    """
    names = decomposable(graph) if spec.prices.parts > 1 else []
    every = _LayoutProgram.of(graph, spec, names)
    first = every.solve(budgets[0], gap) or every.solve(None, gap)
    if first is None:
        return []
    partial = every.builder.partial_parts(first.solution.picked)
    needed = [name for name in names if name in partial]
    program = every if len(needed) == len(names) else _LayoutProgram.of(graph, spec, needed)
    solved = [program.solve(budget, gap) for budget in budgets]
    return [layouts for layouts in solved if layouts is not None]


def decomposable(graph: TrainGraph) -> list[str]:
    """Names of the ops that can be decomposed so that they can be sharded."""
    nodes = (n for n in graph.graph.nodes if n.op == "call_function" and n.target in _DECOMPOSED)
    return [n.name for n in nodes if can_expand(n)]


@dataclass(frozen=True)
class _LayoutProgram:
    """The problem of a graph with the ops `names` decomposed; `solved` are the results so far, with their budgets."""

    builder: ProblemBuilder
    problem: Problem
    names: tuple[str, ...]
    solved: list[tuple[float | None, IlpResult]] = field(default_factory=list[tuple[float | None, IlpResult]])

    @staticmethod
    def of(graph: TrainGraph, spec: ProblemSpec, names: Sequence[str]) -> _LayoutProgram:
        builder = ProblemBuilder(expand(graph, names) if names else graph, spec)
        return _LayoutProgram(builder, builder.problem(), tuple(names))

    def solve(self, budget: float | None, gap: float) -> IlpResult | None:
        """The result within `budget`: that of a larger budget where it fits."""
        problem = replace(self.problem, budget_bytes=budget)
        for larger, layouts in self.solved:
            if (larger is None or (budget is not None and larger >= budget)) and fits(problem, layouts.solution.load):
                return layouts
        solution = solve(problem, gap)
        if solution is None:
            return None
        pins, params, storage = self.builder.layouts(solution.picked)
        pins, nodes = replace(pins, decomposed=self.names), len(self.builder.calls) + len(self.builder.params)
        layouts = IlpResult(pins, params, storage, solution, len(self.problem.choices), nodes)
        self.solved.append((budget, layouts))
        return layouts
