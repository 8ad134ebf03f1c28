"""The user's constraints on every plan that `Auto` considers: layouts by name and axis, modules left replicated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.tensor import Replicate, Shard
from torch.fx import Node

from ..errors import ConstraintError, PlanError, WholestepError, shown
from ..graph.graph import Input, Role, TrainGraph
from ..layout import AxisState, Layout, replicated
from ..mesh import Mesh
from ..plan.data_parallel import STORAGE_OPTIONS, PerParameterStorage, StorageOption, storage_of, stored
from ..plan.decision import Decision
from ..plan.plan import Plan
from ..plan.storage_styles import STYLES
from ..plan.strategies import Strategies
from ..plan.strategy import Resting
from ..plan.tensor_parallel import TensorParallel
from .candidates import Template
from .ilp.axis_constraints import AxisConstraints, axis_constraints, state_text

Pinned = Mapping[str, Mapping[str, Shard | Replicate]]
ReplicatedAxes = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Constraints:
    """The constraints on one step by axis; `pinned` and `replicated` as the user gave them.

    A pinned name has that layout; the optimizer state of a pinned parameter is free. The parameters and the state of a
    `replicated` module are replicated along the axis, and where ranks along it compute together, so are its operations.
    """

    axes: Mapping[str, AxisConstraints] = field(default_factory=dict[str, AxisConstraints])
    pinned: Pinned = field(default_factory=dict[str, Mapping[str, Shard | Replicate]])
    replicated: ReplicatedAxes = field(default_factory=dict[str, str])

    def marks(self, graph: TrainGraph) -> dict[Node, Hashable]:
        """The constraints of nodes and parameters: layers with different ones are not equal."""
        if not self.axes:
            return {}
        named = {param.name: node for param, node in graph.placeholders() if param.role is Role.PARAM}
        named = {node.name: node for node in graph.graph.nodes if node.op == "call_function"} | named
        names = {name for constraints in self.axes.values() for name in (*constraints.states, *constraints.replicated)}
        marks = {n: tuple((axis, constraints.mark(n)) for axis, constraints in self.axes.items()) for n in names}
        return {named[name]: mark for name, mark in marks.items() if name in named}

    def tensor(self, tensor: TensorParallel) -> TensorParallel:
        """`TensorParallel("auto")` with the constraints along its axis; a plan by module as it is."""
        if not tensor.is_open or tensor.axis not in self.axes:
            return tensor
        pins = {pattern: by[tensor.axis] for pattern, by in self.pinned.items() if tensor.axis in by}
        replicated = [pattern for pattern, axes in self.replicated.items() if tensor.axis in _names(axes)]
        return replace(tensor, pinned={**tensor.pinned, **pins}, replicated=(*tensor.replicated, *replicated))

    def storages(self, graph: TrainGraph, mesh: Mesh, axes: Sequence[str]) -> dict[str, tuple[StorageOption, ...]]:
        """The storage options left to each parameter with a constraint along `axes`; raises PlanError if none is."""
        by_axis = {axis: self.axes[axis] for axis in axes if axis in self.axes and mesh.axis_size(axis) > 1}
        allowed: dict[str, tuple[StorageOption, ...]] = {}
        for param in graph.inputs if by_axis else ():
            mine = {a: w for a, w in by_axis.items() if param.name in w.states or param.name in w.replicated}
            if param.role is Role.PARAM and mine:
                options = [s for s in STORAGE_OPTIONS if not s.kind.grouped or len(axes) > 1]
                allowed[param.name] = tuple(s for s in options if _keeps(param, s, mesh, tuple(axes), mine))
                if not allowed[param.name]:
                    raise _no_storage(param, mine)
        return allowed

    def template(self, graph: TrainGraph, mesh: Mesh, template: Template) -> Template:
        """`template` with another storage option for each parameter whose style breaks a constraint."""
        parts = template.strategies
        data = Strategies(parts).data if isinstance(parts, tuple) else None
        if data is None or isinstance(data, PerParameterStorage) or isinstance(parts, WholestepError):
            return template
        try:
            allowed = self.storages(graph, mesh, data.axes(mesh))
        except WholestepError as error:
            return replace(template, strategies=error)
        default = storage_of(data)
        storage = {name: _nearest(default, options) for name, options in allowed.items() if default not in options}
        if not storage:
            return template
        mixed = PerParameterStorage(**vars(data), storage=storage)
        return replace(template, strategies=tuple(mixed if part is data else part for part in parts))

    def check(self, planned: Plan, complete: bool = False) -> None:
        """Raise ConstraintError if a finished plan breaks a constraint; names it, and the layout that was found. A
        folded step (not `complete`) may lack some names.
        """
        if not self.axes:
            return
        parts, owned = defaultdict[str, list[Decision]](list), _owned(planned)
        for name, decision in planned.decisions.items():
            parts[name.partition("__")[0]].append(decision)

        def calls(name: str) -> list[Decision]:
            return [planned.decisions[name]] if name in planned.decisions else parts.get(name, [])

        def layout_of(name: str) -> Layout | None:
            """The storage layout of a parameter, or the result of an operation (of its last op if decomposed)."""
            return planned.storage.get(name) or next((call.given[0] for call in calls(name)[::-1]), None)

        def layouts_of(name: str, computes: bool) -> list[Layout]:
            """Storage layouts of a parameter, its state and its gradient; with `computes`, those of a call too."""
            computed = [layout for call in calls(name) for layout in (*call.operands, *call.given)] if computes else []
            return [planned.storage[name], *owned[name], *computed] if name in planned.storage else computed

        data = planned.strategies.data if planned.strategies else None
        data_axes = data.axes(planned.mesh) if data is not None else ()
        for axis, constraints in self.axes.items():
            if axis not in planned.mesh.names or planned.mesh.axis_size(axis) == 1:
                continue
            for name, (state, pattern) in constraints.states.items():
                layout = layout_of(name)
                if layout is None and complete:
                    finding = f"{pattern!r} asks for a layout of {name}, which the plan does not have"
                    raise PlanError(finding, "a plan of this step")
                if layout is not None and layout.state(axis) != state:
                    raise _broken(pattern, name, axis, state_text(state), layout.state(axis))
            for name, pattern in constraints.replicated.items():
                for layout in layouts_of(name, computes=axis not in data_axes):
                    if layout.state(axis).kind == "S":
                        raise _broken(pattern, name, axis, "replicated", layout.state(axis))


def constraints_of(
    graph: TrainGraph, meshes: Sequence[Mesh], pinned: Pinned, replicated: ReplicatedAxes
) -> Constraints:
    """The constraints on `graph`. PlanError for a pattern, axis or dim that does not exist, or a contradiction."""
    names = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.names))
    constrained = [(pattern, axis) for pattern, by in pinned.items() for axis in by]
    constrained += [(pattern, axis) for pattern, axes in replicated.items() for axis in _names(axes)]
    for pattern, axis in constrained:
        if axis not in names:
            on = f"mesh {meshes[0]}" if len(meshes) == 1 else f"the {len(meshes)} meshes that are searched"
            raise PlanError(
                f"axis {axis!r} of the constraint on {pattern!r} is on no mesh: {on}",
                f"one of {', '.join(names)}",
                "correct the axis; for one of tensor parallelism on a mesh auto=N give tensor= too",
            )
    by_axis = {
        axis: axis_constraints(
            graph,
            {pattern: by[axis] for pattern, by in pinned.items() if axis in by},
            [pattern for pattern, axes in replicated.items() if axis in _names(axes)],
            axis,
        )
        for axis in dict.fromkeys(axis for _, axis in constrained)
    }
    return Constraints(by_axis, pinned, replicated)


def check_form(pinned: Pinned, replicated: ReplicatedAxes) -> None:
    """Raise PlanError for constraints that say nothing."""
    for pattern, by in pinned.items():
        if not by:
            next_step = f'give pinned={{{pattern!r}: {{"tp": Replicate()}}}}'
            needed = "a layout for each axis, Shard(dim) or Replicate()"
            raise PlanError(f"pinned={{{shown(pattern)}: {{}}}}", needed, next_step)
    for pattern, axes in replicated.items():
        if not axes:
            next_step = f'give replicated={{{pattern!r}: ("dp", "tp")}}'
            raise PlanError(f"replicated={{{shown(pattern)}: ()}}", "names of axes", next_step)


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _keeps(
    param: Input, storage: StorageOption, mesh: Mesh, axes: tuple[str, ...], by_axis: Mapping[str, AxisConstraints]
) -> bool:
    """True where a storage option keeps the constraints on a parameter along `axes`."""
    whole = replicated(len(param.meta.shape))
    rest = stored(STYLES[storage.style], param, Resting(whole, whole), mesh, axes)
    for axis, constraints in by_axis.items():
        if param.name in constraints.states and rest.param.state(axis) != constraints.states[param.name][0]:
            return False
        if param.name in constraints.replicated and "S" in (rest.param.state(axis).kind, rest.state.state(axis).kind):
            return False
    return True


def _nearest(default: StorageOption, options: Sequence[StorageOption]) -> StorageOption:
    """The allowed option closest to the option of the style."""

    def difference(option: StorageOption) -> tuple[bool, bool, bool, bool, bool]:
        return (
            option != default, not option.kind.shards_state, not option.kind.gathers_parameters,
            option.regathers != default.regathers, not option.kind.grouped,
        )  # fmt: skip

    return min(options, key=difference)


def _owned(plan: Plan) -> dict[str, list[Layout]]:
    """Layouts of the state and the gradient of each parameter, where they have its shape."""
    shapes, layouts = {i.name: i.meta.shape for i in plan.inputs}, defaultdict[str, list[Layout]](list)
    for graph_input in plan.inputs:
        if graph_input.role in (Role.STATE, Role.GRAD) and graph_input.meta.shape == shapes[graph_input.owner]:
            layouts[graph_input.owner].append(plan.storage[graph_input.name])
    for key, layout in plan.created_storage.items():
        layouts[key.rpartition("/")[0]].append(layout)
    return layouts


def _no_storage(param: Input, by_axis: Mapping[str, AxisConstraints]) -> PlanError:
    demands = [
        f"{pattern!r} asks for {param.name} to be {state_text(state)} over {axis}"
        for axis, constraints in by_axis.items() if param.name in constraints.states
        for state, pattern in [constraints.states[param.name]]
    ]  # fmt: skip
    demands += [f"{constraints.replicated[param.name]!r} for nothing of it to be cut over {axis}"
                for axis, constraints in by_axis.items() if param.name in constraints.replicated]  # fmt: skip
    return PlanError(
        f"{', '.join(demands)}: no way to store a parameter does that",
        "data parallelism cuts dim 0, over all of its axes or over the last",
        "drop one of these constraints",
    )


def _broken(pattern: str, name: str, axis: str, required: str, state: AxisState) -> ConstraintError:
    there = {"V": "another value on each rank", "P": "a part of a sum"}.get(state.kind) or state_text(state)
    return ConstraintError(
        f"{pattern!r} is to be {required} over {axis}: {name} is {there}", "a plan that keeps every constraint",
        "drop the constraint, or give a strategy that can keep it",
    )  # fmt: skip
