"""`TensorParallel("auto")`: layouts along its axis by an integer program, given the strategies on other axes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ...errors import PlanError
from ...graph.graph import Role, TrainGraph
from ...hardware.hardware import Hardware
from ...layout import AxisState, Layout
from ...mesh import Mesh
from ...plan.per_parameter_storage import storage_of
from ...plan.solved_layouts import SolvedLayouts
from ...plan.strategies import Strategies
from ...plan.tensor_parallel import TensorParallel
from .axis_constraints import axis_constraints
from .build_problem import ProblemSpec
from .prices import Prices
from .solve import solve_layouts


def with_auto_solved(
    strategies: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout] | None = None
) -> Strategies:
    """`strategies` with `SolvedLayouts` in place of `TensorParallel("auto")`; what is placed already stays.

    Raises:
        PlanError, MeshError: the axis does not exist, or a constraint or the placed layouts leave no solution.
    """
    parts = (
        _solved(part, strategies, graph, mesh, placed or {}) if isinstance(part, TensorParallel) and part.is_open
        else part for part in strategies.parts
    )  # fmt: skip
    return Strategies(tuple(parts))


def _solved(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> SolvedLayouts:
    if mesh.axis_size(tensor.axis) == 1:
        return SolvedLayouts(tensor.axis, {}, input_dim=tensor.input_dim)
    made = solve_layouts(graph, problem_spec(tensor, beside, graph, mesh, placed))
    if not made:
        raise PlanError(
            "the solver found no layouts for this step", "some within its limit of nodes", "give a plan by module"
        )
    found = made[0].found
    return SolvedLayouts(tensor.axis, found.params, found.pins, str(made[0]), tensor.input_dim)


def problem_spec(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> ProblemSpec:
    """The problem of the axis of `tensor`; the strategies on other axes are given."""
    data = beside.data
    axes = tuple(a for a in data.axes(mesh) if mesh.axis_size(a) > 1) if data is not None else ()
    shares = data is not None and data.semantics == "global"
    share = 1 / prod(mesh.axis_size(a) for a in axes) if shares else 1.0
    rest: dict[str, AxisState] = {}
    for given in graph.inputs:
        if given.role is Role.PARAM and given.name in placed:
            rest[given.name] = placed[given.name].state(tensor.axis)
        elif given.role is Role.BATCH:
            cut = tensor.batch_cut(mesh, given.name, len(given.meta.shape))
            rest |= {given.name: AxisState("S", cut.dim)} if cut is not None else {}
    storages = (storage_of(data),) if data is not None and axes else ()
    prices = Prices(tensor.hardware or Hardware.default(), mesh, tensor.axis, share)
    return ProblemSpec(prices, axes, storages, rest, axis_constraints(graph, tensor.pinned, tensor.whole))
