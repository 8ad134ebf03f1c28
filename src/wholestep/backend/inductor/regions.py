"""Cuts a bound graph into regions that are compiled, each distinct one once.

Nodes that have to run by themselves end a stretch. A stretch is cut where its nodes repeat, layer by layer, so that one
compiled function serves all equal layers. Cutting decides speed alone: two regions share a function only if their
graphs, their inputs and the way these alias are equal.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from ... import _torch
from ...errors import BackendError, first_line
from ...graph import meta
from ...graph.meta import meta_of
from ...graph.nodes import operands
from ...graph.op_kinds import FREE, arithmetic
from ...graph.sizes_in_graph import sizes_among
from ...sizes import SizeFloat, SizeGuards, SizeInt, text_of
from ...tuning import TUNING
from .aliases import viewed
from .sized_regions import SizedRegion, with_symbols

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
Group = list[Node]
"""A call and the getitems of its results."""


@dataclass
class CompiledRegions:
    """Compiled regions by what they compute. `calls` counts the regions of the graph, `compiled` the distinct ones.
    `record` has the sizes that the graph follows from.
    """

    compile: Compile
    record: SizeGuards | None = None
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict[Hashable, Callable[..., Any]])
    calls: int = 0

    def function(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled form of `module` for fakes of its inputs."""
        self.calls += 1
        key = _key(module.graph, inputs)
        if key not in self.compiled:
            self.compiled[key] = self._compiled(module, inputs)
        return self.compiled[key]

    def sizes(self) -> list[SizeInt]:
        """The sizes of the symbols, in order."""
        assert self.record is not None, "a graph with sizes"
        pairs = zip(self.record.dims, self.record.now, strict=True)
        return [SizeInt(now, symbol, self.record) for symbol, now in pairs]

    def _compiled(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        metas = [meta_of(value) for value in inputs if isinstance(value, torch.Tensor)]
        sized = sizes_among([(tensor.shape, tensor.stride) for tensor in metas])
        if self.record is None or not (sized or any(sizes_among([n.args, n.kwargs]) for n in module.graph.nodes)):
            return self.compile(module, inputs)
        name = next(node.name for node in module.graph.nodes if node.op == "call_function")
        return SizedRegion(with_symbols(module, self.record), metas, self.record, self.compile, name)


def in_regions(graph: Graph, apart: Callable[[Node], bool], values: dict[Node, Any], regions: CompiledRegions) -> Graph:
    """A graph that calls each region of `graph` as one compiled function, in the order of `graph`.

    Nodes for which `apart` holds run by themselves, where they stand, and so do regions with little to fuse. `values`
    has a fake of what each node makes. Equal neighbours are regions of their own. Views are made where they
    are read, so that regions take and return no aliases.
    """
    parts = list(_parts(graph, apart, values))
    read_elsewhere = {node for part in parts for node in part.inputs}
    outer, seen = Graph(), dict[Node, Node]()

    def copied(node: Node) -> Node:
        if node not in seen:
            seen[node] = outer.node_copy(node, copied)
        return seen[node]

    for part in parts:
        if not part.compiled:
            for node in part.nodes:
                copied(node)
            continue
        results = [node for node in part.nodes if node in read_elsewhere and viewed(node) is None]
        try:
            run = regions.function(_module(part, results), [values[node] for node in part.inputs])
        except Exception as error:
            problem = f"Inductor cannot compile %{part.nodes[0].name} to %{part.nodes[-1].name}: {first_line(error)}"
            raise BackendError(problem, next_step='use backend="eager"') from error
        args = (*(copied(node) for node in part.inputs), *(regions.sizes() if isinstance(run, SizedRegion) else ()))
        call = outer.create_node("call_function", run, args, name="region")
        for i, node in enumerate(results):
            seen[node] = outer.call_function(operator.getitem, (call, i))
            meta.copy_origin(node, seen[node])
    return outer


@dataclass(frozen=True)
class _Part:
    """Neighbours, and what they read of others, which is no view; `views` are made anew from it."""

    compiled: bool
    nodes: list[Node]
    views: list[Node]
    inputs: list[Node]


def _parts(graph: Graph, apart: Callable[[Node], bool], values: dict[Node, Any]) -> Iterator[_Part]:
    for alone, stretch in _stretches(graph, apart):
        pieces = [stretch] if alone else _cut(stretch, values)
        for piece in pieces:
            nodes = [node for group in piece for node in group]
            compiled = not alone and len(_fused(nodes, values)) >= TUNING.fewest_fused
            yield _Part(compiled, nodes, *_read(nodes))


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a node makes."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors_of(item)]


def _fused(nodes: Sequence[Node], values: dict[Node, Any]) -> set[Node]:
    """Ops of `nodes` that touch a tensor which another one of them touches too: one kernel would move it once.

    Ops that share numbers alone (the norm of each gradient, the rounding of each counter) gain nothing from one kernel.
    """
    roots, touch = dict[Node, Node](), defaultdict[Node, set[Node]](set)
    for node in nodes:
        sources = [roots.get(operand, operand) for operand in operands(node)]
        if sources and (_torch.is_getitem(node.target) or node.target in FREE):
            roots[node] = sources[0]
        elif not arithmetic(node.target):
            for root in (node, *sources):
                touch[root].add(node)
    shared = (ops for root, ops in touch.items() if any(tensor.numel() > 1 for tensor in _tensors_of(values[root])))
    return {op for ops in shared if len(ops) > 1 for op in ops}


def _read(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Views and other values of other parts that `nodes` read, in the order of their first use."""
    seen, views, inputs = set(nodes), list[Node](), list[Node]()

    def read(operand: Node) -> None:
        if operand in seen:
            return
        seen.add(operand)
        if viewed(operand) is None:
            inputs.append(operand)
            return
        for source in operands(operand):
            read(source)
        views.append(operand)

    for node in nodes:
        for operand in operands(node):
            read(operand)
    return views, inputs


def _stretches(graph: Graph, apart: Callable[[Node], bool]) -> list[tuple[bool, list[Group]]]:
    """Neighbours that run alike; True for those that run by themselves."""
    stretches: list[tuple[bool, list[Group]]] = []
    for node in graph.nodes:
        if _torch.is_getitem(node.target):
            continue
        alone = node.op != "call_function" or apart(node)
        if not stretches or stretches[-1][0] is not alone:
            stretches.append((alone, []))
        stretches[-1][1].append(_with_items(node))
    return stretches


def _with_items(node: Node) -> Group:
    items = [user for user in node.users if _torch.is_getitem(user.target)]
    return [node, *(member for item in items for member in _with_items(item))]


def _cut(stretch: list[Group], values: dict[Node, Any]) -> list[list[Group]]:
    """A stretch in pieces, equal neighbours each in one of their own."""
    marks = [0]
    for repeat in find_repeats([_label(group, values) for group in stretch], TUNING.fewest_nodes_of_layer):
        first = min(
            range(repeat.start, repeat.start + repeat.period), key=lambda at: _loss(stretch, values, repeat, at)
        )
        marks += range(first, repeat.stop + 1, repeat.period)
    marks.append(len(stretch))
    return [stretch[a:b] for a, b in pairwise(marks) if a < b]


def _loss(stretch: list[Group], values: dict[Node, Any], repeat: Repeat, first: int) -> tuple[int, int]:
    """What is lost by cutting `repeat` in front of `first` and every period after it: elements that a fused kernel
    would not have written and read again; then, equal layers.
    """
    at = first + repeat.period if first + repeat.period < repeat.stop else first
    crossing, position = 0, at - 1
    behind = {group[0] for group in stretch[at : at + repeat.period]}
    while position >= max(repeat.start, at - repeat.period) and not arithmetic(stretch[position][0].target):
        for node in stretch[position]:
            if node.target not in FREE and any(user in behind for user in node.users):
                crossing += sum(tensor.numel() for tensor in _tensors_of(values[node]))
        position -= 1
    return crossing, -((repeat.stop - first) // repeat.period)


def _label(group: Group, values: dict[Node, Any]) -> Hashable:
    node = group[0]
    touched = [meta_of(tensor) for source in (*operands(node), node) for tensor in _tensors_of(values[source])]
    shapes = tuple((tuple(map(text_of, tensor.shape)), tensor.dtype) for tensor in touched)
    return node.target, _plain(node.args, {}), _plain(node.kwargs, {}), shapes


def _plain(value: Any, numbers: dict[Node, int]) -> Hashable:
    """Arguments as a key: 1, 1.0 and True are different, and nodes are what `numbers` calls them."""
    if isinstance(value, Node):
        return "node", numbers.get(value)
    if isinstance(value, (list, tuple)):
        items = cast(Sequence[Any], value)
        return type(items).__name__, *(_plain(item, numbers) for item in items)
    if isinstance(value, dict):
        return tuple((name, _plain(item, numbers)) for name, item in cast(dict[str, Any], value).items())
    if isinstance(value, slice):
        ends = cast("slice[Any, Any, Any]", value)
        return "slice", *(_plain(item, numbers) for item in (ends.start, ends.stop, ends.step))
    if isinstance(value, (SizeInt, SizeFloat)):
        return type(value).__name__, value.text
    simple = value is None or isinstance(value, (bool, int, float, complex, str))
    return (type(value).__name__, repr(value)) if simple else cast(Hashable, value)


def _key(graph: Graph, inputs: Sequence[Any]) -> Hashable:
    """Equal for graphs that one compiled function can run."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    calls = tuple(
        (n.target, _plain(n.args, numbers), _plain(n.kwargs, numbers)) for n in graph.nodes if n.op != "placeholder"
    )
    storages = dict[int, int]()
    described: list[Hashable] = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            storage, traced = storages.setdefault(_torch.storage_key(value), len(storages)), meta_of(value)
            shape, stride = tuple(map(text_of, traced.shape)), tuple(map(text_of, traced.stride))
            described.append((shape, stride, value.dtype, value.device, storage, value.storage_offset()))
        else:
            described.append(_plain(value, {}))
    return calls, tuple(described)


def _module(part: _Part, results: Sequence[Node]) -> GraphModule:
    graph, seen = Graph(), dict[Node, Node]()
    for i, node in enumerate(part.inputs):
        seen[node] = graph.placeholder(f"input_{i}")
    for node in (*part.views, *part.nodes):
        seen[node] = graph.node_copy(node, seen.__getitem__)
    graph.output(tuple(seen[node] for node in results))
    return GraphModule({}, graph)


_SEED = 6
"""Neighbours that have to be equal for a repeat to be considered."""
_CANDIDATES = 64
"""Periods that are tried at a place: a layer may have as many equal parameters."""


@dataclass(frozen=True)
class Repeat:
    """`labels[i] == labels[i + period]` for all i from `start` to `stop - period`."""

    start: int
    stop: int
    period: int


def find_repeats(labels: Sequence[Hashable], least: int) -> list[Repeat]:
    """The repeats of a sequence, from left to right, none overlapping. Periods are multiplied to be at least `least`.

    At each place the period that covers most wins, and among those the shortest.
    """
    numbers = dict[Hashable, int]()
    ids = [numbers.setdefault(label, len(numbers)) for label in labels]
    seeds = [tuple(ids[i : i + _SEED]) for i in range(len(ids) - _SEED + 1)]
    places = defaultdict[tuple[int, ...], list[int]](list)
    for i, seed in enumerate(seeds):
        places[seed].append(i)
    rank = {i: n for starts in places.values() for n, i in enumerate(starts)}
    repeats: list[Repeat] = []
    at = 0
    while at < len(seeds):
        later = places[seeds[at]][rank[at] + 1 :][:_CANDIDATES]
        best = max((_from(ids, at, other - at) for other in later), key=lambda r: r.stop, default=None)
        if best is not None:
            period = best.period * -(-least // best.period)
            if best.stop - at >= 2 * period:
                repeats.append(Repeat(at, best.stop, period))
                at = best.stop
                continue
        at += 1
    return repeats


def _from(ids: Sequence[int], start: int, period: int) -> Repeat:
    stop = start + period
    while stop < len(ids) and ids[stop] == ids[stop - period]:
        stop += 1
    return Repeat(start, stop, period)
