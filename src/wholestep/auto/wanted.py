"""What a user wants of every plan that `Auto` considers: layouts by name and axis, axes that may not cut a module."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

from torch.distributed.tensor import Replicate, Shard
from torch.fx import Node

from ..errors import ConstraintError, PlanError, WholestepError
from ..graph.graph import Input, Role, TrainGraph
from ..layout import AxisState, Layout, replicated
from ..mesh import Mesh
from ..plan.data_parallel import DataParallel, stored
from ..plan.optimal.mixed import Mixed
from ..plan.optimal.storage import STORAGES, Storage, of_style
from ..plan.optimal.wishes import Wishes, shown, wishes
from ..plan.plan import Decision, Plan
from ..plan.tensor_parallel import TensorParallel
from .templates import Template

Pinned = Mapping[str, Mapping[str, Shard | Replicate]]
Whole = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Wanted:
    """Wishes of a user by axis, as they are of one step; `pinned` and `whole` as they were given.

    A name that is pinned has that layout, whatever becomes of the optimizer state of a parameter. A module that is
    `whole` is not cut: its parameters and their state rest whole along the axis, and where ranks along it compute
    together its operations run whole.
    """

    axes: Mapping[str, Wishes] = field(default_factory=dict[str, Wishes])
    pinned: Pinned = field(default_factory=dict[str, Mapping[str, Shard | Replicate]])
    whole: Whole = field(default_factory=dict[str, str])

    def marks(self, graph: TrainGraph) -> dict[Node, Hashable]:
        """What tells nodes and parameters apart: layers with different wishes are not equal."""
        if not self.axes:
            return {}
        named = {given.name: node for given, node in graph.placeholders() if given.role is Role.PARAM}
        named = {node.name: node for node in graph.graph.nodes if node.op == "call_function"} | named
        names = {name for asked in self.axes.values() for name in (*asked.states, *asked.whole)}
        found = {name: tuple((axis, asked.of(name)) for axis, asked in self.axes.items()) for name in names}
        return {named[name]: mark for name, mark in found.items() if name in named}

    def tensor(self, tensor: TensorParallel) -> TensorParallel:
        """`"auto"` with the wishes along its axis; a plan by module as it is."""
        if not tensor.is_open or tensor.axis not in self.axes:
            return tensor
        pins = {pattern: by[tensor.axis] for pattern, by in self.pinned.items() if tensor.axis in by}
        whole = [pattern for pattern, axes in self.whole.items() if tensor.axis in _names(axes)]
        return replace(tensor, pinned={**tensor.pinned, **pins}, whole=(*tensor.whole, *whole))

    def storages(self, graph: TrainGraph, mesh: Mesh, axes: Sequence[str]) -> dict[str, tuple[Storage, ...]]:
        """For each parameter with a wish along data-parallel `axes` the ways to store it that are left.

        Raises:
            PlanError: there is none.
        """
        asked = {axis: self.axes[axis] for axis in axes if axis in self.axes and mesh.axis_size(axis) > 1}
        found: dict[str, tuple[Storage, ...]] = {}
        for given in graph.inputs if asked else ():
            mine = {a: w for a, w in asked.items() if given.name in w.states or given.name in w.whole}
            if given.role is Role.PARAM and mine:
                ways = [s for s in STORAGES if not s.grouped or len(axes) > 1]
                found[given.name] = tuple(s for s in ways if _keeps(given, s, mesh, tuple(axes), mine))
                if not found[given.name]:
                    raise _no_storage(given, mine)
        return found

    def template(self, graph: TrainGraph, mesh: Mesh, template: Template) -> Template:
        """`template`, with parameters that its style would cut otherwise than is wanted stored another way."""
        parts = template.strategies
        data = next((p for p in parts if isinstance(p, DataParallel)), None) if isinstance(parts, tuple) else None
        if data is None or isinstance(data, Mixed) or isinstance(parts, WholestepError):
            return template
        try:
            allowed = self.storages(graph, mesh, data.axes(mesh))
        except WholestepError as error:
            return replace(template, strategies=error)
        own = of_style(data.kind, data.reshard_after_forward)
        storage = {name: _nearest(own, ways).name for name, ways in allowed.items() if own not in ways}
        if not storage:
            return template
        mixed = Mixed(**{f.name: getattr(data, f.name) for f in fields(data)}, storage=storage)
        return replace(template, strategies=tuple(mixed if part is data else part for part in parts))

    def check(self, planned: Plan, complete: bool = False) -> None:
        """Every wish against the finished plan. A step with few of its layers (not `complete`) may lack some names.

        Raises:
            ConstraintError: one is not kept; says which, and what is there instead.
        """
        if not self.axes:
            return
        data = planned.strategies.data if planned.strategies else None
        stored, found = data.axes(planned.mesh) if data is not None else (), _Finished(planned)
        for axis, asked in self.axes.items():
            if axis not in planned.mesh.names or planned.mesh.axis_size(axis) == 1:
                continue
            for name, (state, pattern) in asked.states.items():
                layout = found.made(name)
                if layout is None and complete:
                    raise _lost(pattern, name)
                if layout is not None and layout.state(axis) != state:
                    raise _broken(pattern, name, axis, shown(state), layout.state(axis))
            for name, pattern in asked.whole.items():
                for layout in found.held(name, calls=axis not in stored):
                    if layout.state(axis).kind == "S":
                        raise _broken(pattern, name, axis, "whole", layout.state(axis))


def wanted(graph: TrainGraph, meshes: Sequence[Mesh], pinned: Pinned, whole: Whole) -> Wanted | None:
    """The wishes as they are of `graph`; None without any.

    Raises:
        PlanError: a pattern names nothing, no mesh has an axis, a dim does not exist, or two wishes contradict.
    """
    known = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.names))
    asked = [(pattern, axis) for pattern, by in pinned.items() for axis in by]
    asked += [(pattern, axis) for pattern, axes in whole.items() for axis in _names(axes)]
    for pattern, axis in asked:
        if axis not in known:
            on = f"mesh {meshes[0]}" if len(meshes) == 1 else f"the {len(meshes)} meshes that are searched"
            raise PlanError(
                f"axis {axis!r} of the wish for {pattern!r} is on no mesh: {on}",
                f"one of {', '.join(known)}",
                "correct the axis; for one of tensor parallelism on a mesh auto=N give tensor= too",
            )
    found = {
        axis: wishes(
            graph,
            {pattern: by[axis] for pattern, by in pinned.items() if axis in by},
            [pattern for pattern, axes in whole.items() if axis in _names(axes)],
            axis,
        )
        for axis in dict.fromkeys(axis for _, axis in asked)
    }
    return Wanted(found, pinned, whole) if found else None


def check_form(pinned: object, whole: object) -> None:
    """Raise PlanError for wishes that are not of the form that `Auto` takes."""
    for pattern, by in _items(pinned, "pinned"):
        places = cast(Mapping[Any, Any], by) if isinstance(by, Mapping) else dict[Any, Any]()
        good = all(isinstance(axis, str) and isinstance(at, (Shard, Replicate)) for axis, at in places.items())
        if not (places and good):
            raise PlanError(
                f"pinned={{{pattern!r}: {by!r}}}", "a layout for each axis, Shard(dim) or Replicate()",
                f'give pinned={{{pattern!r}: {{"tp": Replicate()}}}}',
            )  # fmt: skip
    for pattern, axes in _items(whole, "whole"):
        several = isinstance(axes, (tuple, list)) and all(isinstance(a, str) for a in cast(Sequence[Any], axes))
        if not axes or not (isinstance(axes, str) or several):
            raise PlanError(
                f"whole={{{pattern!r}: {axes!r}}}", "names of axes", f'give whole={{{pattern!r}: ("dp", "tp")}}'
            )


def _items(given: object, name: str) -> list[tuple[str, object]]:
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in cast(Mapping[Any, Any], given)):
        return list(cast(Mapping[str, object], given).items())
    raise PlanError(f"{name}={given!r}", "wishes by the names of parameters and modules", f"give {name}={{...}}")


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _keeps(given: Input, storage: Storage, mesh: Mesh, axes: tuple[str, ...], asked: Mapping[str, Wishes]) -> bool:
    """True where a parameter that is stored so rests as is wanted along `axes`."""
    rest = stored(storage.style, given, replicated(len(given.meta.shape)), mesh, axes)
    for axis, one in asked.items():
        if given.name in one.states and rest.param.state(axis) != one.states[given.name][0]:
            return False
        if given.name in one.whole and "S" in (rest.param.state(axis).kind, rest.state.state(axis).kind):
            return False
    return True


def _nearest(own: Storage, ways: Sequence[Storage]) -> Storage:
    """Of the ways that are allowed, the one that is most like a style's own."""

    def difference(way: Storage) -> tuple[bool, bool, bool, bool, bool]:
        return way != own, way.whole_state, way.whole, way.again != own.again, not way.grouped

    return min(ways, key=difference)


@dataclass(frozen=True)
class _Finished:
    """Layouts of a finished plan by the names that wishes have."""

    plan: Plan
    parts: dict[str, list[Decision]] = field(default_factory=dict[str, list[Decision]])

    def __post_init__(self) -> None:
        for name, one in self.plan.decisions.items():
            self.parts.setdefault(name.partition("__")[0], []).append(one)

    def made(self, name: str) -> Layout | None:
        """Where a parameter rests, or what an operation gives; the last of those that it is written out in."""
        if name in self.plan.rest:
            return self.plan.rest[name]
        calls = self._calls(name)
        return calls[-1].given[0] if calls else None

    def held(self, name: str, calls: bool) -> Iterator[Layout]:
        """Where a parameter, its state and its gradient rest; with `calls`, what an operation takes and gives."""
        if name in self.plan.rest:
            yield self.plan.rest[name]
            yield from self._owned.get(name, ())
        for one in self._calls(name) if calls else ():
            yield from (*one.operands, *one.given)

    def _calls(self, name: str) -> list[Decision]:
        return [self.plan.decisions[name]] if name in self.plan.decisions else self.parts.get(name, [])

    @cached_property
    def _owned(self) -> dict[str, list[Layout]]:
        """Layouts of the state and the gradient of each parameter, of those that have its shape."""
        shapes = {i.name: i.meta.shape for i in self.plan.inputs}
        found: dict[str, list[Layout]] = {}
        for given in self.plan.inputs:
            if given.role in (Role.STATE, Role.GRAD) and given.meta.shape == shapes[given.owner]:
                found.setdefault(given.owner, []).append(self.plan.rest[given.name])
        for key, layout in self.plan.created.items():
            found.setdefault(key.rpartition("/")[0], []).append(layout)
        return found


def _no_storage(given: Input, asked: Mapping[str, Wishes]) -> PlanError:
    said = [
        f"{pattern!r} asks for {given.name} to be {shown(state)} over {axis}"
        for axis, one in asked.items() if given.name in one.states for state, pattern in [one.states[given.name]]
    ]  # fmt: skip
    said += [f"{one.whole[given.name]!r} for nothing of it to be cut over {a}" for a, one in asked.items()
             if given.name in one.whole]  # fmt: skip
    return PlanError(
        f"{', '.join(said)}: no way to store a parameter does that",
        "data parallelism cuts dim 0, over all of its axes or over the last",
        "drop one of these wishes",
    )


def _broken(pattern: str, name: str, axis: str, wish: str, found: AxisState) -> ConstraintError:
    there = (
        "another value on each rank" if found.kind == "V" else "a part of a sum" if found.kind == "P" else shown(found)
    )
    return ConstraintError(
        f"{pattern!r} is to be {wish} over {axis}: {name} is {there}", "a plan that keeps every wish",
        "drop the wish, or give a strategy that can keep it",
    )  # fmt: skip


def _lost(pattern: str, name: str) -> PlanError:
    return PlanError(f"{pattern!r} asks for a layout of {name}, which the plan does not have", "a plan of this step")
