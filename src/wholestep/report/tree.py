"""The parameters and buffers of a plan as a tree of modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ..graph.graph import Input, Role
from ..graph.text import short_dtype
from ..plan.plan import Plan


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer. `layout`: global shape with its axes; `local` and bytes are those of the first rank."""

    name: str
    kind: str
    dtype: str
    layout: str
    local: str
    size_bytes: int
    state_bytes: int
    why: str


@dataclass
class Branch:
    """A module; sums over all of its parameters and buffers, with bytes of the first rank."""

    name: str
    elements: int = 0
    size_bytes: int = 0
    state_bytes: int = 0
    branches: dict[str, Branch] = field(default_factory=lambda: dict[str, Branch]())
    leaves: list[Leaf] = field(default_factory=list[Leaf])


def tree(plan: Plan) -> Branch:
    """Modules in the order of their first parameter; names are split at dots."""
    state: dict[str, int] = {}
    for given in plan.inputs:
        if given.role is Role.STATE:
            state[given.owner] = state.get(given.owner, 0) + plan.input_bytes(given)
    root = Branch("")
    for given in plan.inputs:
        if given.role in (Role.PARAM, Role.BUFFER):
            _add(root, given, _leaf(plan, given, state.get(given.name, 0)))
    return root


def _add(root: Branch, given: Input, leaf: Leaf) -> None:
    *path, _ = given.name.split(".")
    at = root
    for part in (None, *path):
        at = at if part is None else at.branches.setdefault(part, Branch(part))
        at.elements += prod(given.meta.shape)
        at.size_bytes += leaf.size_bytes
        at.state_bytes += leaf.state_bytes
    at.leaves.append(leaf)


def _leaf(plan: Plan, given: Input, state_bytes: int) -> Leaf:
    layout = plan.storage[given.name]
    local = layout.local_shape(given.meta.shape, plan.mesh, plan.mesh.coordinate(0))
    axes = [*layout.shard_axes(), *layout.varies]
    why = "; ".join(f"{axis}: {plan.axis_strategies.get(axis, plan.strategy)}" for axis in axes)
    return Leaf(
        given.name.split(".")[-1],
        "parameter" if given.role is Role.PARAM else "buffer",
        short_dtype(given.meta.dtype),
        layout.show(given.meta.shape),
        " ".join(map(str, local)) or "()",
        plan.input_bytes(given),
        state_bytes,
        why or "whole on every rank",
    )
