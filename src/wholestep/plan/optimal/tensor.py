"""`TensorParallel("auto")`: layouts along its axis, solved for, beside what other strategies do on theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ...errors import PlanError
from ...graph.graph import Role, TrainGraph
from ...hardware.hardware import Hardware
from ...layout import AxisState, Layout
from ...mesh import Mesh
from ..strategy import Strategies
from ..tensor_parallel import TensorParallel
from .build import Asked
from .cuts import Cuts
from .find import Solved, find
from .prices import Prices
from .storage import of_style
from .wishes import wishes


def solved(
    strategies: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout] | None = None
) -> Strategies:
    """`strategies` with what `"auto"` stands for on this graph.

    Raises:
        PlanError, MeshError: it does not fit the mesh, or nothing that is asked for can be.
    """
    if not any(isinstance(part, TensorParallel) and part.is_open for part in strategies.parts):
        return strategies
    made = [
        cuts(part, strategies, graph, mesh, placed or {}) if isinstance(part, TensorParallel) and part.is_open else part
        for part in strategies.parts
    ]
    return Strategies(tuple(made))


def cuts(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> Cuts:
    """The layouts that take the shortest step by the model of the problem; what is placed stays.

    Raises:
        PlanError: nothing can be made of what is placed.
    """
    empty = Cuts(tensor.axis, {}, input_dim=tensor.input_dim)
    if mesh.axis_size(tensor.axis) == 1:
        return empty
    made = find(graph, asked(tensor, beside, graph, mesh, placed))
    if not made:
        raise PlanError(
            "the solver found no layouts for this step", "some within its limit of nodes", "give a plan by module"
        )
    return of(made[0], empty)


def of(made: Solved, empty: Cuts) -> Cuts:
    """A solution as a strategy like `empty`."""
    return replace(empty, params=made.found.params, found=made.found.pins, said=str(made))


def asked(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> Asked:
    """The problem of one axis; what `beside` does on others is given."""
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
    storages = (of_style(data.kind, data.reshard_after_forward),) if data is not None and axes else ()
    prices = Prices(tensor.hardware or Hardware.default(), mesh, tensor.axis, share)
    return Asked(prices, axes, storages, rest, wishes(graph, tensor.pinned, tensor.whole))
