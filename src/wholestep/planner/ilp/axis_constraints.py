"""The user's constraints along one axis: layouts of parameters and results by name, modules left replicated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch.distributed.tensor import Replicate, Shard
from torch.fx import Node

from ... import _torch
from ...errors import PlanError
from ...graph import meta
from ...graph.graph import TrainGraph
from ...graph.nodes import node_at
from ...layout import REPLICATED, AxisState
from ...plan.module_map import Modules
from .problem import Option


@dataclass(frozen=True)
class AxisConstraints:
    """`states` that parameters and results must have, and names that must not be sharded (`replicated`); each with the
    pattern of the user that names it.
    """

    states: Mapping[str, tuple[AxisState, str]] = field(default_factory=dict[str, tuple[AxisState, str]])
    replicated: Mapping[str, str] = field(default_factory=dict[str, str])

    def mark(self, name: str) -> object:
        """Equal for nodes and parameters with the same constraint."""
        return self.states.get(name), name in self.replicated

    def allows(self, node: Node, name: str, option: Option) -> bool:
        """True for an option that the constraints leave to a node of the captured op, or the parameter, `name`."""
        required = self.states.get(name)
        if required is not None and not any(meta.part_of(user) == name for user in node.users):
            return option.gives.get(0) == required[0]
        states = (*option.gives.values(), *option.takes.values())
        return name not in self.replicated or all(s.kind != "S" for s in states)

    def infeasible(self, name: str) -> PlanError:
        """The error for a choice without an option that is allowed."""
        state, pattern = self.states.get(name, (REPLICATED, name))
        problem = f"{pattern!r} is to be {state_text(state)}: %{name} has no such layout"
        needed = "a dim that the op's rule, or the parameter, can cut over the axis"
        return PlanError(problem, needed, "drop this pin, or give another dim or another axis size")


def axis_constraints(
    graph: TrainGraph, pins: Mapping[str, Shard | Replicate], replicated: Iterable[str]
) -> AxisConstraints:
    """The constraints of patterns along one axis: globs of parameters and modules, as `TensorParallel` takes them.
    Raises PlanError if a pattern names nothing (says which names are near), a dim does not exist, or two patterns ask
    for different things of one tensor.
    """
    modules, states, unsharded = Modules(graph), dict[str, tuple[AxisState, str]](), dict[str, str]()
    for pattern, placement in pins.items():
        for path in _matching(modules, pattern):
            param = modules.params.get(path)
            for node in modules.outputs(path) if param is None else (param,):
                name = path if param is not None else made_by(node)[0].name
                state = _state_of(node, name, placement, pattern)
                before = states.setdefault(name, (state, pattern))
                if before[0] != state:
                    raise _contradiction(before[1], before[0], pattern, state, name)
    for pattern in replicated:
        for path in _matching(modules, pattern):
            owned = [name for name in modules.params if name == path or name.startswith(f"{path}.")]
            unsharded |= dict.fromkeys(owned or modules.held(path), pattern)
            unsharded |= {n.name: pattern for n in modules.inside(path)}
    for name in unsharded.keys() & states.keys():
        if states[name][0].kind == "S":
            raise _contradiction(states[name][1], states[name][0], unsharded[name], REPLICATED, name)
    return AxisConstraints(states, unsharded)


def _state_of(node: Node, name: str, placement: Shard | Replicate, pattern: str) -> AxisState:
    """The state of a placement, its dim counted from the left."""
    tensor = meta.tensor(node)
    if not isinstance(placement, Shard) or tensor is None:
        return REPLICATED
    dim, ndim = cast(int, placement.dim), len(tensor.shape)
    if not -ndim <= dim < ndim:
        problem = f"{pattern!r} is to be cut along dim {dim}: %{name} has no such layout, it is {list(tensor.shape)}"
        needed = f"a dim from 0 to {ndim - 1}" if ndim else "a tensor that has dims"
        raise PlanError(problem, needed, "give another dim, or drop this pin")
    return AxisState("S", dim % ndim)


def _contradiction(pattern: str, has: AxisState, other: str, wants: AxisState, name: str) -> PlanError:
    problem = f"{pattern!r} asks for {name} to be {state_text(has)}, {other!r} for it to be {state_text(wants)}"
    return PlanError(problem, "one constraint for each tensor", "drop one of the two, or make its pattern narrower")


def _matching(modules: Modules, pattern: str) -> list[str]:
    paths = modules.matching(pattern)
    if paths:
        return paths
    problem = f"the pattern {pattern!r} names no module and no parameter"
    needed = f"those of the step, as {modules.near(pattern)}"
    raise PlanError(problem, needed, "correct the pattern: one glob for each name between dots")


def made_by(node: Node) -> tuple[Node, int]:
    """The call that makes a value, and the number of the output."""
    start = 0
    while _torch.is_getitem(node.target):
        start += meta.picked(node).start
        node = node_at(node, 0)
    return node, start


def state_text(state: AxisState) -> str:
    """A state in the words of messages."""
    return f"cut along dim {state.dim}" if state.kind == "S" else "replicated"
