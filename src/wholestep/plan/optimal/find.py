"""Solves for the layouts of a step, with ops written out in smaller ones where that lets them be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...graph.decompose import can_expand, expand
from ...graph.graph import TrainGraph
from .build import Asked, Build, Found
from .chains import Joined, joined
from .highs import Solution, solve
from .problem import fits

aten = torch.ops.aten
_WRITTEN_OUT = {
    aten.addmm.default, aten.baddbmm.default, aten.mean.default, aten.mse_loss.default, aten.mse_loss_backward.default,
    aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
}  # fmt: skip


@dataclass(frozen=True)
class Solved:
    """What was found, the solution that it is of, and how many choices there were for how many ops and parameters."""

    found: Found
    solution: Solution
    choices: int
    nodes: int

    def __str__(self) -> str:
        made = self.solution
        return (
            f"{made.step_us / 1e3:.3g} ms by a model that adds up, at least {made.bound_us / 1e3:.3g} ms, "
            f"gap {made.gap:.2%}; {self.choices} choices for {self.nodes} ops and parameters, "
            f"{made.variables} variables"
        )


def find(
    graph: TrainGraph, asked: Asked, budgets: Sequence[float | None] = (None,), gap: float = 0.005
) -> list[Solved]:
    """For each budget of bytes the layouts with the shortest step by the problem's model, to `gap`; budgets that
    nothing fits are left out.

    It is solved with every op written out that may be cut that way. Those for which nothing came of it are put back,
    and it is solved again.
    """
    names = written_out(graph) if asked.prices.parts > 1 else []
    every = _Program.of(graph, asked, names)
    first = every.solve(budgets[0], gap) or every.solve(None, gap)
    if first is None:
        return []
    needed = _needed(first, names)
    program = every if len(needed) == len(names) else _Program.of(graph, asked, needed)
    found = [program.solve(budget, gap) for budget in budgets]
    return [made for made in found if made is not None]


def written_out(graph: TrainGraph) -> list[str]:
    """Ops that smaller ones may take the place of."""
    found = (n for n in graph.graph.nodes if n.op == "call_function" and n.target in _WRITTEN_OUT)
    return [n.name for n in found if can_expand(n)]


def _needed(solved: Solved, names: Sequence[str]) -> list[str]:
    """Those of `names` that leave partial values between the smaller ops."""
    partial = set(solved.found.pins.results)
    parts = {name: [n for n in solved.found.pins.ways if n.startswith(f"{name}__")] for name in names}
    return [name for name in names if any(part in partial for part in parts[name])]


@dataclass(frozen=True)
class _Program:
    """The problem of a graph with some ops written out; `known`: what was found for which budgets."""

    build: Build
    joined: Joined
    names: tuple[str, ...]
    known: list[tuple[float | None, Solved]] = field(default_factory=list[tuple[float | None, Solved]])

    @staticmethod
    def of(graph: TrainGraph, asked: Asked, names: Sequence[str]) -> _Program:
        build = Build(expand(graph, names) if names else graph, asked)
        return _Program(build, joined(build.problem()), tuple(names))

    def solve(self, budget: float | None, gap: float) -> Solved | None:
        """The best within `budget`: that of a larger one, where it is."""
        problem = replace(self.joined.problem, budget_bytes=budget)
        for larger, found in self.known:
            if (larger is None or (budget is not None and larger >= budget)) and fits(problem, found.solution.load):
                return found
        made = solve(problem, gap)
        if made is None:
            return None
        found = self.build.found(self.joined.opened(made.picked))
        found = replace(found, pins=replace(found.pins, expanded=self.names))
        nodes = len(self.build.calls) + len(self.build.params)
        self.known.append((budget, Solved(found, made, len(self.joined.problem.choices), nodes)))
        return self.known[-1][1]
