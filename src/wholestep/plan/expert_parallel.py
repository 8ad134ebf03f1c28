"""Expert parallelism: ranks of one axis have experts of their own, and compute the rows of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.fx import Node

from .. import _torch
from ..capture.skip_nonfinite import After
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import EXPERT_ROWS, Output, Role, TrainGraph
from ..graph.nodes import copy_graph, operands
from ..graph.op_kinds import CHEAP
from ..graph.text import human
from ..layout import REPLICATED, VARIES, AxisState, Layout, sharded_along
from ..mesh import Mesh
from ..rules.aten.rows_in_groups import received_groups
from ..rules.find_rule import find_rule
from .rows_in_any_order import Apart, SortedRows, sorted_rows, sorts_in_one_order, sorts_of_groups
from .strategy import Pins, Stored
from .tensor_parallel import OneAxis


@dataclass(frozen=True)
class ExpertParallel(OneAxis):
    """Ranks of one axis, which another strategy may use too, have experts of their own: weights stay where they are.

    Args:
        axis: the mesh axis.
        method: what travels. `"rows"`: rows are sent to the ranks of their experts, and results back, as many as ranks
            count in each call, which the host reads once a layer; or, without `host_reads`, as many as one rank may
            have for another at most, zeros behind those that it has. `"gather_rows"`: each rank gathers the tokens of
            all, multiplies those of its experts, and results are summed over ranks. `"weights"`: experts are stored and
            gathered as other parameters are. `"auto"`: of these that are possible, for each layer, the one that sends
            fewest bytes if experts have as many rows each.
        host_reads: whether the host may read how many rows there are: without it, a step with `"rows"` has one size for
            all loads, which Inductor and CUDA graphs need, and `"auto"` does not choose it.

    Example:
        >>> both = [ws.DataParallel("fully_shard", semantics="global"), ws.ExpertParallel()]
        >>> step = ws.compile(train_step, mesh="dp=4", parallel=both)
    """

    axis: str = "dp"
    method: Literal["auto", "rows", "gather_rows", "weights"] = "auto"
    host_reads: bool = True
    input_dim = None

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Experts are cut along the axis, outside of all other axes. Raises PlanError as `sorts` does."""
        out, names = dict(before), {node.name: spec.name for spec, node in graph.placeholders()}
        for name in {names[param.name] for rows, _ in self._rows(graph, mesh) for param in _params(rows)}:
            out[name] = Stored(self._apart(before[name].param), self._apart(before[name].state))
        return out

    def _apart(self, layout: Layout) -> Layout:
        first, *rest = layout.put(self.axis, sharded_along(0)).dims
        return Layout(((self.axis, *(axis for axis in first if axis != self.axis)), *rest), owned=layout.owned)

    def sorts(self, graph: TrainGraph, mesh: Mesh, own: Literal["", "sum", "mean"]) -> dict[str, Apart]:
        """The axis, and how rows come to their experts, by sort of rows by expert. Raises PlanError for a layer whose
        experts cannot be apart. `own`: ranks have batches of their own, and gradients that are sums or means of these.
        """
        sent = "counted" if self.host_reads else "bounded"
        layers = self._rows(graph, mesh)
        return {rows.sort.name: (self.axis, sent if method == "rows" else "gathered", own) for rows, method in layers}

    def _rows(self, graph: TrainGraph, mesh: Mesh) -> list[tuple[SortedRows, str]]:
        """The rows of each layer whose experts are apart, and the method."""
        ranks = mesh.axis_size(self.axis)
        layers = list(sorted_rows(graph.graph)) if ranks > 1 and self.method != "weights" else []
        problems = {rows.sort: self._problem(rows, graph, ranks) for rows in layers}
        if self.method == "auto":
            choices = [(rows, self._cheapest(rows, graph, ranks)) for rows in layers if not problems[rows.sort]]
            return [(rows, method) for rows, method in choices if method != "weights"]
        for sort in sorts_in_one_order(graph.graph, layers) if ranks > 1 and self.method != "weights" else ():
            rows = meta.one_tensor(operands(sort)[0]).shape[0]
            why = "a result may depend on the order of rows" if rows > 1 else f"{rows} rows, which have no pieces"
            needed, next_step = "ops that treat all rows alike", 'give method="auto", which gathers these experts'
            if rows < 2:
                needed, next_step = "two rows or more", "give a rank without tokens some whose loss is zero"
            text = f"ExpertParallel, {meta.module_path(sort) or sort.name}: {why}"
            raise PlanError(text, needed, next_step, meta.source_line(sort))
        if ranks > 1 and self.method != "weights" and not layers:
            needed = "rows that topk sorts by expert, grouped products of them, and ops that treat all rows alike"
            sorts = 'a model of transformers sorts by set_experts_implementation("grouped_mm")'
            raise PlanError("ExpertParallel: the step has no such layer", needed, f'give method="weights"; {sorts}')
        for sort, problem in ((sort, problem) for sort, problem in problems.items() if problem):
            needed = "experts that are parameters, one at least for each rank, and sums over rows alone"
            text, next_step = f"ExpertParallel, {meta.module_path(sort) or sort.name}: {problem}", "give a smaller axis"
            raise PlanError(text, needed, f'{next_step}, or method="weights"', meta.source_line(sort))
        return [(rows, self.method) for rows in layers]

    def _cheapest(self, rows: SortedRows, graph: TrainGraph, ranks: int) -> str:
        """The method that sends fewest bytes."""
        sent = _sent_bytes(rows, graph, ranks, self.host_reads)
        return min((n for n in sent if n != "rows" or self.host_reads), key=sent.__getitem__)

    def _problem(self, rows: SortedRows, graph: TrainGraph, ranks: int) -> str:
        """Why experts cannot be apart, or ""."""
        if not rows.have_groups_apart:
            return "a result depends on rows of all experts, or is not known to be of one"
        if rows.number < ranks:
            return f"{rows.number} experts over {self.axis}={ranks}"
        if self.method == "rows" and not rows.may_be_sent:
            return "a call takes the number of rows, or some do not come back"
        params = {node for spec, node in graph.placeholders() if spec.role is Role.PARAM}
        return "" if params.issuperset(_params(rows)) else "weights that the step computes"

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Views of experts are of those that a rank has; what comes back is gathered before it is repeated."""
        strategies, reads = dict[str, dict[str, tuple[str, ...]]](), dict[tuple[str, str], dict[str, AxisState]]()
        gathered = [n for n in graph.graph.nodes if (apart := meta.along(n)) and VARIES in apart[2]]
        sorts = {n.name for n in gathered if (rows := meta.rows(n)) and rows[0] == n.name}  # they differ: all are there
        for node in graph.graph.nodes:
            rows, apart = meta.rows(node), meta.along(node)
            for n in operands(node) if rows and rows[0] in sorts and not _torch.is_getitem(node.target) else ():
                if (read := _before_repeated(n)) is not None:
                    reads[read] = {self.axis: REPLICATED}
            for n, state in zip(operands(node), apart[1], strict=True) if apart else ():
                for view in _path(n)[:-1] if state == sharded_along(0) else ():
                    strategies[view.name] = {self.axis: (f"cut {_factor(view)}",)}
        return Pins(reads=reads, op_strategies=strategies)

    def notes(self, graph: TrainGraph, planned: TrainGraph, mesh: Mesh, own: bool) -> tuple[str, ...]:
        """How many layers of experts of `graph` are apart in the planned step, and what each method sends for them;
        that can, where ranks have batches of their `own`.
        """
        ranks, in_any_order = mesh.axis_size(self.axis), list(sorted_rows(graph.graph))
        many = in_any_order if ranks > 1 else ()
        prices = [_sent_bytes(rows, graph, ranks, self.host_reads, own) for rows in many]
        each = Counter(", ".join(f"{human(n)} by {name}" for name, n in sent.items()) for sent in prices)
        layers = len(in_any_order) + len(sorts_in_one_order(graph.graph, in_any_order))
        sorts = {rows[0] for n in planned.graph.nodes if meta.along(n) and (rows := meta.rows(n))}
        sent = [n for n in planned.graph.nodes if n.target is received_groups]
        sizes = "sizes as if each had as many" if self.host_reads else "room for all that may come"
        text = f", in {len(sent)} of them rows are sent to experts, with {sizes}" if sent else ""
        sends = [f"a rank sends for each of {count} layers of experts {texts}" for texts, count in each.items()]
        return (f"experts of {len(sorts)} of {layers} layers stay on their ranks of {self.axis}{text}", *sends)

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        uncounted = "" if self.host_reads or self.method != "rows" else " that the host does not count"
        return f"experts on {self.axis} by {self.method}{uncounted}"


def _before_repeated(node: Node) -> tuple[str, str] | None:
    """Where a view or copy that repeats numbers is made, for one reader: by reader and what it reads."""
    smallest, place = int(meta.one_tensor(node).numel), None
    while (node.target in CHEAP or node.target is torch.ops.aten.clone.default) and len(node.users) == 1:
        source = operands(node)[0]
        if meta.rows(source) is None and (numel := int(meta.one_tensor(source).numel)) < smallest:
            smallest, place = numel, (node.name, source.name)
        node = source
    return place


def _sent_bytes(rows: SortedRows, graph: TrainGraph, ranks: int, counted: bool, own: bool = False) -> dict[str, int]:
    """What a rank sends by each method, forward and backward: tokens that are gathered and summed, if ranks have no
    batches of their `own`, or weights, gathered as what is cast of them, and their gradients; or of rows those that it
    has, if it may, or room for as many as may come.
    """
    tokens = 4 * sum(int(meta.size_bytes(n)) for n in {operands(n)[0] for n in rows.arrive if len(n.args) == 2})
    sent = {} if own else {"gather_rows": tokens}
    paths = {path[-1]: path for path in map(_path, filter(None, rows.products.values()))}
    sent["weights"] = sum(min(int(meta.size_bytes(n)) for n in path) for path in paths.values())
    reduce = graph.mixed_precision.reduce if graph.mixed_precision else None
    summed = [(meta.one_tensor(param), int(meta.size_bytes(param))) for param in paths]
    sent["weights"] += sum(int(of.numel) * reduce.itemsize if reduce else n for of, n in summed)
    if rows.may_be_sent:
        share = rows.share("counted" if counted else "bounded", ranks)
        sent["rows"] = rows.sent_bytes * share // (1 if own else ranks)
    return {name: n * (ranks - 1) // ranks for name, n in sent.items()}


def _params(rows: SortedRows) -> list[Node]:
    """What the experts that products read are views or casts of: parameters, or what the step computes."""
    return [_path(node)[-1] for node in rows.products.values() if node is not None]


def _path(node: Node) -> list[Node]:
    """`node` and what it is a view or cast of, expert by expert."""
    path = [node]
    while _factor(path[-1]):
        path.append(operands(path[-1])[0])
    return path


def _factor(node: Node) -> str:
    """The factor of experts of a call on one tensor."""
    rule = find_rule(node) if node.op == "call_function" and len(operands(node)) == 1 else None
    group = rule.groups[0] if rule and len(rule.groups) == 1 else None
    factor = group.operands[0][0] if group and group.operands[0] else None
    return factor if group and factor and group.outputs[0][:1] == (factor,) else ""


def with_expert_rows(graph: TrainGraph) -> TrainGraph:
    """`graph` with a result for each layer whose grouped products take rows in the order of their experts: how many
    rows each expert has.
    """
    if any(out.target.startswith(EXPERT_ROWS) for out in graph.outputs):
        return graph
    graph, aten = replace(graph, graph=copy_graph(graph.graph)), torch.ops.aten
    counts: dict[str, Node] = {}
    for sort, experts in sorts_of_groups(graph.graph):
        keys = operands(sort)[0]
        path = meta.module_path(sort) or sort.name
        if experts and not meta.is_backward(sort):  # which may compute its forward again
            place, device = After(sort), meta.one_tensor(keys).device
            ones = place.call(aten.full_like.default, keys, 1)
            before = counts.get(path) or place.call(aten.full.default, [experts], 0, dtype=torch.int64, device=device)
            counts[path] = place.call(aten.index_add.default, before, 0, keys, ones)
    pairs = graph.results()
    end = sum(out.kind == "result" for out, _ in pairs)
    pairs[end:end] = [(Output("result", EXPERT_ROWS + path), node) for path, node in counts.items()]
    next(iter(reversed(graph.graph.nodes))).args = (tuple(node for _, node in pairs),)
    return replace(graph, outputs=tuple(out for out, _ in pairs))
