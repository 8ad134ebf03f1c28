"""Expert parallelism: ranks of one axis have experts of their own, and compute the rows of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import CHEAP
from ..layout import REPLICATED, AxisState, Layout, sharded_along
from ..mesh import Mesh
from ..rules.find_rule import find_rule
from .decision import Decision
from .rows_in_any_order import SortedRows, sorted_rows
from .strategy import BatchCut, Pins, Resting


@dataclass(frozen=True)
class ExpertParallel:
    """Ranks of one axis, which another strategy may use too, have experts of their own: weights stay where they are.

    Args:
        axis: the mesh axis.
        method: what travels. `"gather_rows"`: each rank gathers the tokens of all, multiplies those of its own experts,
            and results are summed over ranks. `"weights"`: experts are stored and gathered as other parameters are.

    Example:
        >>> both = [ws.DataParallel("fully_shard", semantics="global"), ws.ExpertParallel()]
        >>> step = ws.compile(train_step, mesh="dp=4", parallel=both)
    """

    axis: str = "dp"
    method: Literal["gather_rows", "weights"] = "gather_rows"

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Its axis. Raises MeshError if the mesh has none of this name."""
        mesh.axis_size(self.axis)
        return (self.axis,)

    @property
    def shares_batches(self) -> bool:
        """Along an axis of its own all ranks have the same batch."""
        return False

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """None: another strategy along the axis says it."""
        return None

    def resting(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Resting]) -> dict[str, Resting]:
        """Experts are cut along the axis, outside of all other axes. Raises PlanError as `sorts` does."""
        out, names = dict(before), {node.name: spec.name for spec, node in graph.placeholders()}
        for rows in self._rows(graph, mesh):
            for path in _paths(rows, graph):
                have = before[names[path[-1].name]]
                out[names[path[-1].name]] = Resting(self._apart(have.param), self._apart(have.state))
        return out

    def _apart(self, layout: Layout) -> Layout:
        first, *rest = layout.put(self.axis, sharded_along(0)).dims
        return Layout(((self.axis, *(axis for axis in first if axis != self.axis)), *rest), owned=layout.owned)

    def sorts(self, graph: TrainGraph, mesh: Mesh, per_rank: frozenset[str]) -> dict[str, str]:
        """The axis, by sort of rows by expert. Raises PlanError for a layer whose experts cannot be apart."""
        rows = self._rows(graph, mesh)
        if rows and self.axis in per_rank:
            problem = f"ExpertParallel along {self.axis!r}, of which each rank has a batch of its own"
            needed = "ranks that share one batch: each computes the rows of all for its experts"
            raise PlanError(problem, needed, 'give DataParallel(..., semantics="global")')
        return {r.sort.name: self.axis for r in rows}

    def _rows(self, graph: TrainGraph, mesh: Mesh) -> list[SortedRows]:
        """The rows of each layer of experts."""
        ranks = mesh.axis_size(self.axis)
        layers = list(sorted_rows(graph.graph)) if ranks > 1 and self.method == "gather_rows" else []
        if ranks > 1 and self.method == "gather_rows" and not layers:
            needed = "rows that topk sorts by expert, grouped products of them, and ops that treat all rows alike"
            raise PlanError("ExpertParallel: the step has no such layer", needed, 'give method="weights"')
        for rows in layers:
            where, problem = meta.module_path(rows.sort) or f"%{rows.sort.name}", ""
            if not rows.have_groups_apart:
                problem = "a result depends on rows of all experts, or is not known to be of one"
            elif rows.number < ranks:
                problem = f"{rows.number} experts over {self.axis}={ranks}"
            elif any(path[-1].op != "placeholder" for path in _paths(rows, graph)):
                problem = "weights that the step computes"
            if problem:
                needed = "experts that are parameters, one at least for each rank, and sums over rows alone"
                next_step = 'give a smaller axis, or method="weights"'
                raise PlanError(f"ExpertParallel, {where}: {problem}", needed, next_step, meta.source_line(rows.sort))
        return layers

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Views of experts are of those that a rank has; what comes back is gathered before it is repeated."""
        strategies, reads = dict[str, dict[str, tuple[str, ...]]](), dict[tuple[str, str], dict[str, AxisState]]()
        sorts = {rows[0] for n in graph.graph.nodes if meta.along(n) and (rows := meta.rows(n))}
        for node in graph.graph.nodes:
            rows, apart = meta.rows(node), meta.along(node)
            for n in operands(node) if rows and rows[0] in sorts and not _torch.is_getitem(node.target) else ():
                if (read := _before_repeated(n)) is not None:
                    reads[read] = {self.axis: REPLICATED}
            for n, state in zip(operands(node), apart[1], strict=True) if apart else ():
                for view in _path(n, graph)[:-1] if state.kind == "S" else ():
                    strategies[view.name] = {self.axis: (f"cut {_factor(view)}",)}
        return Pins(reads=reads, op_strategies=strategies)

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Nothing more is promised."""

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"experts on {self.axis} by {self.method}"


def _before_repeated(node: Node) -> tuple[str, str] | None:
    """Where a view or copy that repeats numbers is made, for one reader: by reader and what it reads."""
    smallest, place = meta.one_tensor(node).numel, None
    while (node.target in CHEAP or node.target is torch.ops.aten.clone.default) and len(node.users) == 1:
        source = operands(node)[0]
        if meta.rows(source) is None and (numel := meta.one_tensor(source).numel) < smallest:
            smallest, place = numel, (node.name, source.name)
        node = source
    return place


def _paths(rows: SortedRows, graph: TrainGraph) -> Iterator[list[Node]]:
    """From what each product reads as experts to the parameter."""
    return (_path(node, graph) for node in rows.products.values() if node is not None)


def _path(node: Node, graph: TrainGraph) -> list[Node]:
    """`node` and what it is a view or cast of, expert by expert; at the end a parameter, if it is one."""
    params = {n for spec, n in graph.placeholders() if spec.role is Role.PARAM}
    path = [node]
    while path[-1] not in params and _factor(path[-1]):
        path.append(operands(path[-1])[0])
    return path


def _factor(node: Node) -> str:
    """The factor of experts of a call on one tensor."""
    rule = find_rule(node) if node.op == "call_function" and len(operands(node)) == 1 else None
    group = rule.groups[0] if rule and len(rule.groups) == 1 else None
    factor = group.operands[0][0] if group and group.operands[0] else None
    return factor if group and factor and group.outputs[0][:1] == (factor,) else ""
