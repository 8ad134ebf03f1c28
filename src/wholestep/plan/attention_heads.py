"""Checks that the attention heads which an axis shards divide evenly; heads are found at views of a sharded dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch.fx import Node

from ..errors import PlanError
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import node_at
from ..mesh import Mesh
from .decision import Decision

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class _Split:
    """A hidden dim that a view splits into heads; `maker` is the module that computed it."""

    node: Node
    maker: str
    heads: int
    width: int


def check_heads(graph: TrainGraph, mesh: Mesh, axis: str, decisions: Mapping[str, Decision]) -> None:
    """Raise PlanError naming every module whose heads do not divide over `axis`."""
    parts = mesh.axis_size(axis)
    found = [s for node in graph.graph.nodes if (s := _split(node, axis, decisions)) is not None]
    bad = [s for s in found if s.heads % parts]
    if not bad:
        return
    first = bad[0]
    where = meta.module_path(first.node)
    same_module = [s for s in found if meta.module_path(s.node) == where]
    heads = ", ".join(f"{s.maker} makes {s.heads} heads of {s.width}" for s in same_module)
    fits = gcd(*(s.heads for s in found))
    sizes = [str(n) for n in range(1, fits + 1) if fits % n == 0]
    more = len({meta.module_path(s.node) for s in bad}) - 1
    others = f" (and {more} more modules)" if more else ""
    raise PlanError(
        f"{where or 'the step'}{others}: {heads}; they do not divide over {axis}={parts}",
        f"an axis whose size divides all head counts: {', '.join(sizes)}",
        "choose another size, or leave those projections out of the plan",
        meta.source_line(first.node),
    )


def _split(node: Node, axis: str, decisions: Mapping[str, Decision]) -> _Split | None:
    """The heads into which a forward view splits a dim that is sharded along `axis`."""
    if node.op != "call_function" or node.target not in _VIEWS or meta.is_backward(node):
        return None
    given = node_at(node, 0)
    maker = decisions.get(given.name)
    have, made = meta.tensor(given), meta.tensor(node)
    if maker is None or not maker.given or have is None or made is None:
        return None
    state = maker.given[0].state(axis)
    if state.kind != "S":
        return None
    before, after = have.shape, made.shape
    lead = state.dim
    same_front = before[:lead] == after[:lead]
    rest = len(before) - lead - 1
    inner = after[lead : len(after) - rest]
    same_back = not rest or before[-rest:] == after[len(after) - rest :]
    if not (same_front and same_back) or sum(size > 1 for size in inner) < 2 or inner[0] == 1:
        return None  # dims of size one are no heads
    return _Split(node, meta.module_path(given) or f"%{given.name}", inner[0], before[lead] // inner[0])
