"""The planning stage: resolves `Auto` and `TensorParallel("auto")`, then plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import PlanError, shown
from ..graph.gc_control import collector_paused
from ..graph.graph import LocalGraph, TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..partition.lower import written
from ..passes.order_stages import ordered
from ..plan.make_plan import PlannedStep, make_plan
from ..plan.plan import Plan
from ..plan.strategies import Strategies, compose
from ..plan.strategy import Chooser, Strategy
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from .ilp.build_problem import problem_spec
from .ilp.solve import solve_layouts


@collector_paused()
def plan(
    graph: TrainGraph, mesh: Mesh | str, parallel: Strategy | Sequence[Strategy] | Strategies | Chooser | None = None,
    placed: Mapping[str, Layout] | None = None, hardware: Hardware | None = None,
) -> Plan:  # fmt: skip
    """Choose the layout of every tensor of `graph` on `mesh`. Needs no process group, no device and no weights.

    Args:
        graph: a captured step.
        mesh: a mesh, or its text such as `"dp=8"`; `"auto=N"` lets `Auto` choose the axes.
        parallel: a strategy, a list of strategies for different axes, or `Auto`; `DataParallel("fully_shard")` by
            default.
        placed: storage layouts of inputs that another step has placed already: these do not change.
        hardware: prices resharding; by default one host with all ranks. `Auto` has its own hardware.

    Example:
        >>> plan = wholestep.plan(graph, "node=4,rank=8", hardware=wholestep.Hardware.preset("dgx-h100"))

    Example:
        >>> strategies = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel({"0": "colwise"}, axis="tp")]
        >>> print(ws.plan(graph, "dp=4,tp=2", strategies))

    Raises:
        PlanError, MeshError: the strategy does not fit the mesh or the graph.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    _check_placed(graph, mesh, placed or {})
    if isinstance(parallel, type):
        raise PlanError(f"parallel={shown(parallel)} is a class", "a strategy", f"give {parallel.__name__}(...)")
    if isinstance(parallel, Chooser):
        return parallel.choose(graph, mesh, placed)
    return plan_strategies(graph, mesh, compose(parallel), placed, hardware).plan


def _check_placed(graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]) -> None:
    shapes = {graph_input.name: graph_input.meta.shape for graph_input in graph.inputs}
    for name, layout in placed.items():
        if name not in shapes:
            raise PlanError(f"placed={{{shown(name)}: ...}}", "names of inputs of the graph", "correct the name")
        layout.check(shapes[name], mesh, name)
        if layout.partial or layout.varies:
            raise PlanError(f"placed: {name} is {layout}", "a stored layout: sharded or replicated", "correct it")


@collector_paused()
def plan_strategies(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None = None,
    hardware: Hardware | None = None,
) -> PlannedStep:  # fmt: skip
    """The plan of `strategies`, `TensorParallel("auto")` among them. Raises as `plan` does."""
    strategies.axes(mesh)
    solved = strategies.with_open(lambda part: _solved(part, strategies, graph, mesh, placed or {}))
    return make_plan(graph, mesh, solved, placed, hardware)


@collector_paused()
def planned_program(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None = None,
    hardware: Hardware | None = None,
) -> tuple[Plan, LocalGraph]:  # fmt: skip
    """The plan of `strategies`, and the program of a rank. Raises as `plan` does."""
    step = plan_strategies(graph, mesh, strategies, placed, hardware)
    return step.plan, ordered(written(step.graph, step.plan), step.plan)


def _solved(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> SolvedLayouts:
    if mesh.axis_size(tensor.axis) == 1:
        return SolvedLayouts(tensor.axis, {}, input_dim=tensor.input_dim, async_tp=tensor.async_tp)
    solutions = solve_layouts(graph, problem_spec(tensor, beside, graph, mesh, placed))
    if not solutions:
        problem = "the solver found no layouts for this step"
        raise PlanError(problem, "some within its limit of nodes", "give a plan by module")
    return solutions[0].layouts(tensor)
