"""A program on a random mesh, its inputs laid out at random, by propagation alone or by the public strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

import wholestep as ws
from tests.random_graphs.program import Program, program
from wholestep import _torch
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.decompose import ROUNDS, can_expand, expand
from wholestep.graph.graph import Input, Role
from wholestep.layout import AxisState, Layout, replicated
from wholestep.mesh import Mesh
from wholestep.plan.decision import Options
from wholestep.plan.plan import Plan
from wholestep.plan.propagate import propagate, would_gather
from wholestep.plan.propagation_inputs import PropagationInputs
from wholestep.plan.strategy import Pins

VARIANTS = 4  # cases of one program
LARGEST_MESH = 8
UPDATED = (Role.PARAM, Role.STATE)


@dataclass(frozen=True)
class Case:
    """A program and where its inputs rest. With a `strategy`, its plan says so in place of the other fields.

    `written_out`: ops that would be gathered for are expanded, as `ws.plan` does. `parts` seeds partial values.
    """

    program: Program
    mesh: Mesh
    rest: Mapping[str, Layout]
    grad_targets: Mapping[str, Layout]
    storage: frozenset[str] = frozenset()
    scatter: bool = False
    pins: Pins = field(default_factory=Pins)
    written_out: bool = True
    options: Options = field(default_factory=Options)
    strategy: Any = None
    parts: int = 0

    def plan(self) -> Plan:
        """The plan of this case."""
        graph = self.program.graph
        if self.strategy is not None:
            return ws.plan(graph, self.mesh, self.strategy)
        start = PropagationInputs(graph, self.mesh, self.mesh.names, self.rest, self.grad_targets, "avg", self.scatter,
                          frozenset(), self.storage, self.pins)  # fmt: skip
        expanded: list[str] = []
        for _ in range(ROUNDS if self.written_out else 0):
            more = [n for n in would_gather(start, propagate(start)) if can_expand(n)]
            if not more:
                break
            expanded += [n.name for n in more]
            start = replace(start, graph=expand(start.graph, {n.name for n in more}))
        decisions = propagate(start)
        made = Plan(self.mesh, "random", graph.inputs, self.rest, decisions, self.options, decomposed=tuple(expanded))
        made.check(graph)
        return made


def case(seed: int) -> Case:
    """The case of a seed."""
    found = program(seed // VARIANTS)
    rng = Random(seed)
    mesh = _mesh(rng)
    if rng.random() < 0.3:
        strategy = _strategy(rng, found, mesh)
        if strategy is not None:
            return Case(found, mesh, {}, {}, strategy=strategy, parts=seed)
    axes = [a.name for a in mesh.axes if a.size > 1]
    grad_targets: dict[str, Layout] = {}
    rest: dict[str, Layout] = {}
    updated = {o.target for o in found.graph.outputs if o.kind == "update"}
    for given in found.graph.inputs:
        partial = given.role in (Role.BATCH, Role.CONST) and given.name not in updated
        rest[given.name] = _layout(rng, given, axes, partial)
        if given.role is Role.PARAM:
            grad_targets[given.name] = rest[given.name] if rng.random() < 0.6 else _layout(rng, given, axes, False)
    for given in found.graph.inputs:
        if given.role is Role.STATE and rng.random() < 0.8:
            rest[given.name] = grad_targets[given.owner]
    return Case(
        found, mesh, rest, grad_targets, frozenset(a for a in axes if rng.random() < 0.3), rng.random() < 0.3,
        _pins(rng, found, axes) if rng.random() < 0.2 else Pins(), rng.random() < 0.6,
        Options(keep_gathered_bytes=rng.choice([None, 0, 200])), parts=seed,
    )  # fmt: skip


def _mesh(rng: Random) -> Mesh:
    while True:
        sizes = [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 3))]
        if 1 < prod(sizes) <= LARGEST_MESH:
            return Mesh(",".join(f"{name}={size}" for name, size in zip("abc", sizes, strict=False)))


def _layout(rng: Random, given: Input, axes: Sequence[str], partial: bool) -> Layout:
    """Each axis cuts a dim, in random order, or leaves partial values, or does nothing."""
    ndim, made = len(given.meta.shape), replicated(len(given.meta.shape))
    op = rng.choice(["sum", "sum", "sum", "avg", "max", "min"])
    exact = not given.meta.dtype.is_floating_point
    op = "sum" if op == "avg" and exact else op
    partial = partial and given.meta.dtype != torch.bool and rng.random() < 0.3
    for axis in rng.sample(axes, len(axes)):
        kind = rng.random()
        if ndim and kind < (0.2 if exact else 0.5):
            made = made.put(axis, AxisState("S", rng.randrange(ndim)))
        elif partial and kind < 0.8:
            made = made.put(axis, AxisState("P", op=op))
    return made


def _pins(rng: Random, found: Program, axes: Sequence[str]) -> Pins:
    """Some results, and some operands of some readers, are wanted cut or whole along some axes."""
    results: dict[str, Mapping[str, AxisState]] = {}
    reads: dict[tuple[str, str], Mapping[str, AxisState]] = {}
    for node in found.graph.graph.nodes:
        made = meta.tensor(node)
        if node.op == "call_function" and made is not None and rng.random() < 0.15:
            results[node.name] = _states(rng, len(made.shape), axes)
        for given in node.all_input_nodes if node.op == "call_function" else ():
            have = meta.tensor(given)
            if have is not None and rng.random() < 0.05 and not _torch.is_getitem(node.target):
                reads[node.name, given.name] = _states(rng, len(have.shape), axes)
    return Pins(results, reads)


def _states(rng: Random, ndim: int, axes: Sequence[str]) -> dict[str, AxisState]:
    chosen = [a for a in axes if rng.random() < 0.5]
    cut = {a: AxisState("S", rng.randrange(ndim)) for a in chosen if ndim and rng.random() < 0.7}
    return {a: cut.get(a, AxisState("R")) for a in chosen}


# -- strategies ------------------------------------------------------------------------
def _strategy(rng: Random, found: Program, mesh: Mesh) -> Any:
    """Data parallelism in global semantics, tensor parallelism on one axis, or both; None where they do not fit."""
    names = list(mesh.names)
    tensor, parts = None, list[Any]()
    params = [i for i in found.graph.inputs if i.role is Role.PARAM]
    if params and rng.random() < 0.5:
        tensor = names.pop(rng.randrange(len(names)))
        styles = {i.name: rng.choice(["colwise", "rowwise"]) for i in rng.sample(params, min(2, len(params)))}
        parts.append(ws.TensorParallel(styles, axis=tensor, strict=False))
    if names:
        kinds = ["replicate", "zero1", "zero2", "fully_shard", *(["hybrid"] if len(names) > 1 else [])]
        batch = {i.name: rng.choice([0, 0, 0, 1, None]) for i in found.graph.inputs}
        batch = {n: d for n, d in batch.items() if d is None or d < _ndim(found, n)}
        parts.append(
            ws.DataParallel(
                rng.choice(kinds), axis=tuple(names), semantics="global",
                input_batch_dim=rng.choice([0, batch]), reshard_after_forward=rng.choice([None, True, False]),
            )
        )  # fmt: skip
    try:
        ws.plan(found.graph, mesh, parts)
    except PlanError as refused:
        if "heads" in str(refused):
            return None
    except Exception:  # the case will say so
        pass
    return parts


def _ndim(found: Program, name: str) -> int:
    return next(len(i.meta.shape) for i in found.graph.inputs if i.name == name)


def values_by_node(found: Program) -> dict[Node, Tensor]:
    """The value of each placeholder."""
    return {node: found.values[given.name] for given, node in found.graph.placeholders()}
