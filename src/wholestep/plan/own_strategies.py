"""What strategies of somebody's own say is checked, once for each plan, before anything follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NoReturn

from ..errors import PlanError, shown
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..layout import replicated
from ..mesh import Mesh
from ..typed_values import is_a
from .strategy import BatchCut, Pins, Stored, Strategy


def axes_of(part: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a strategy. Raises PlanError, MeshError: they are no axes of the mesh."""
    axes = part.axes(mesh)
    if not is_a(axes, tuple[str, ...]):
        _refuse(part, "axes", axes, "a tuple of names of axes")
    for name in axes if _is_own(part) else ():
        mesh.axis_size(name)
    return axes


def check_own(parts: Iterable[Strategy], graph: TrainGraph, mesh: Mesh) -> None:
    """Raise PlanError naming the method of a strategy that says what cannot be."""
    shapes = {i.name: i.meta.shape for i in graph.inputs if i.role is Role.PARAM}
    before = {name: Stored(replicated(len(shape)), replicated(len(shape))) for name, shape in shapes.items()}
    for part in filter(_is_own, parts):
        layouts, gathered = part.storage_layouts(graph, mesh, before), part.storage_axes(mesh)
        pins = part.pins(graph, mesh)
        for method, value, kind in (
            ("describe", part.describe(mesh), str), ("storage_axes", gathered, tuple[str, ...]), ("pins", pins, Pins),
            ("storage_layouts", layouts, Mapping[str, Stored]),
        ):  # fmt: skip
            if not is_a(value, kind):
                _refuse(part, method, value, f"a value of type {getattr(kind, '__name__', kind)}")
        if missing := shapes.keys() ^ layouts.keys():
            _refuse(part, "storage_layouts", sorted(missing)[0], "one entry for each parameter, as in `before`")
        used = [("storage_axes", axis) for axis in gathered]
        for name, stored in layouts.items():
            stored.param.check(shapes[name], mesh, name)
            used += [("storage_layouts", axis) for axis in stored.param.axes | stored.state.axes]
        for spec in (i for i in graph.inputs if i.role is Role.BATCH):
            cut, ndim = part.batch_cut(mesh, spec.name, len(spec.meta.shape)), len(spec.meta.shape)
            if cut is not None and not (is_a(cut, BatchCut) and 0 <= cut.dim < ndim):
                _refuse(part, "batch_cut", cut, f"a BatchCut with one of the {ndim} dims of {spec.name}, or None")
            used += [("batch_cut", axis) for axis in (cut.axes if cut is not None else ())]
        for method, axis in used:
            if axis not in part.axes(mesh):
                _refuse(part, method, axis, f"its own axes, {', '.join(part.axes(mesh))}")
        _check_pins(part, pins, graph, mesh)


def _check_pins(part: Strategy, pins: Pins, graph: TrainGraph, mesh: Mesh) -> None:
    """Axes may be those of another strategy."""
    nodes = {node.name: node for node in graph.graph.nodes}
    for name in (*pins.results, *chain.from_iterable(pins.reads), *pins.op_strategies, *pins.decomposed, *pins.owners):
        if name not in nodes:
            _refuse(part, "pins", name, "names of nodes, as print(graph) shows them without %")
    for name, states in (*pins.results.items(), *((read, states) for (_, read), states in pins.reads.items())):
        tensor = meta.tensor(nodes[name])
        ndim = len(tensor.shape) if tensor is not None else 0
        for axis, state in states.items():
            mesh.axis_size(axis)
            if state.kind not in ("R", "S") or (state.kind == "S" and not 0 <= state.dim < ndim):
                _refuse(part, "pins", f"{state} of %{name}", f"R, or S of one of its {ndim} dims")


def _refuse(part: Strategy, method: str, value: object, needed: str) -> NoReturn:
    raise PlanError(f"{type(part).__name__}.{method} says {shown(value)}", needed, "correct it")


def _is_own(part: Strategy) -> bool:
    return not type(part).__module__.startswith(f"{__package__}.")
