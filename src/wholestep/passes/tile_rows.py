"""Computes long products of a rank tile by tile of their rows, with all that follows row by row: the logits of a long
sequence, their loss and their gradient, or the wide values of an MLP that its backward computes again.

A region begins at a product that is larger than what it multiplies. It goes on through what the rules cut by the same
rows, backward included, and ends at sums over rows and at products that are smaller than what they multiply. It is
planned and partitioned as a step of its own, of which the tiles are the micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import ClassVar, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.decompose import can_expand
from ..graph.graph import Input, LocalGraph, Output, Role, TrainGraph
from ..graph.loop import loop_of
from ..graph.nodes import copy_node, copy_nodes, drop_dead, node_at, operands, reached, redirect
from ..graph.op_kinds import PRODUCTS, VIEWS
from ..graph.text import human
from ..layout import AxisState, has_extent, replicated, sharded_along
from ..mesh import Mesh
from ..partition.lower import written
from ..partition.rank_ops import RANK_DEPENDENT, contiguous, draws_numbers, is_ranked, pad_to, take_chunk
from ..plan.for_pieces import NLL, count_targets
from ..plan.make_plan import make_plan
from ..plan.micro_batches import MicroBatches
from ..plan.strategies import compose
from ..plan.whole_units import mark_units
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from ..units import parse_bytes

aten = torch.ops.aten
States = tuple[AxisState | None, ...]
"""For each output of a node how tiles cut it; None: a sum over rows, or nothing of them."""


@dataclass(frozen=True)
class TileRows:
    """Computes products of at least `over_bytes` in `tiles` pieces of rows: no more than one piece of them exists at
    once. Sums over rows, as of a loss and of the gradient of a weight, are added up tile by tile.

    Args:
        tiles: their number; sizes are those of `torch.chunk`.
        over_bytes: smaller products stay as they are. None, for a search: those below 256 MiB or, if less, a 64th of
            the largest; and what cannot be tiled stays whole without a word.

    Example:
        >>> tiled = ws.TileRows(16)
        >>> step = ws.compile(train_step, passes=lambda passes: [tiled, *passes])

    Raises:
        PlanError: `tiles` is not positive; or, of a step: products are so large, and none can be tiled.
    """

    tiles: int
    over_bytes: int | str | None = "256MiB"

    must_precede: ClassVar[tuple[str, ...]] = ("OffloadSaved", "SizeBuckets", "Reinplace")

    def __post_init__(self) -> None:
        if self.tiles < 1:
            raise PlanError(f"TileRows({self.tiles})", "at least one tile", "correct the number")
        long_bytes(self.over_bytes, "256MiB", ())

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """`local` with a loop in place of each region; itself, with a warning, where no product is so large. Products
        that stay whole are named where they are the largest.
        """
        if local.stage_axis or local.across or any(map(loop_of, local.graph.nodes)):
            problem = f"TileRows({self.tiles}) in a step with stages, micro-batches, or an end in the next call"
            raise PlanError(problem, "one of them", "leave out TileRows: micro-batches are tiles of the whole step")
        tiled, reasons, tried, largest = _counted(local), list[str](), set[str](), 0
        uneven, seeds = _uneven(tiled), self._seeds(tiled)
        least = long_bytes(self.over_bytes, "256MiB", map(meta.size_bytes, seeds))
        while seed := next((n for n in self._seeds(tiled, least) if n.name not in tried), None):
            tried.add(seed.name)
            size_bytes = meta.size_bytes(seed)
            try:
                tried |= {node.name for node in self._tile(tiled, seed, uneven).states}
                largest = max(largest, size_bytes)
            except PlanError as error:
                if size_bytes >= largest:
                    shape, line = list(meta.one_tensor(seed).shape), meta.source_line(seed)
                    reasons.append(f"%{seed.name} {shape} ({line}): {error.found}")
        why = "; ".join(reasons[:3])
        drop_dead(tiled.graph)
        if any(map(loop_of, tiled.graph.nodes)) or self.tiles == 1 or self.over_bytes is None:
            if reasons and self.tiles > 1 and self.over_bytes is not None:
                warnings.warn(f"TileRows({self.tiles}) leaves {len(reasons)} long products whole: {why}", stacklevel=2)
            return tiled
        if reasons:
            needed = "a long product whose rows are independent of each other, up to sums over all of them"
            raise PlanError(f"TileRows({self.tiles}) tiles nothing: {why}", needed, "leave out TileRows")
        text = f"TileRows({self.tiles}) tiles nothing: no product has {human(least)}"
        warnings.warn(text, stacklevel=2)
        return local

    def _tile(self, local: LocalGraph, seed: Node, uneven: Set[Node]) -> _Region:
        """The region of a product, for which `local` has a loop now. Raises PlanError: there is none; says why."""
        errors = list[PlanError]()
        for blocks in _blocks(seed):
            try:
                region = _Region(local, seed, self.tiles, blocks, uneven)
                region.tile()
                return region
            except PlanError as error:
                errors.append(error)
        raise errors[-1]

    def _seeds(self, local: LocalGraph, least: int = 0) -> list[Node]:
        """Products that are larger than the rows that they multiply, the largest first."""
        products = [n for n in local.graph.nodes if n.target in PRODUCTS]
        seeds = [n for n in products if _grows(n, _cut(n, {n: sharded_along(0)}, self.tiles)[0])]
        return sorted((n for n in seeds if meta.size_bytes(n) >= least), key=meta.size_bytes, reverse=True)


def long_bytes(over_bytes: int | str | None, usual: str, sizes: Iterable[int]) -> int:
    """The option `over_bytes` in bytes; for None the `usual` ones, or a 64th of the largest of `sizes`."""
    if over_bytes is not None:
        return parse_bytes(over_bytes, "over_bytes")
    return min(parse_bytes(usual), max(sizes, default=0) // 64)


class _NoTilesError(PlanError):
    """A product that is not computed tile by tile."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "rows that are independent of each other", "leave it as it is")


@dataclass
class _Region:
    """`uneven`: nodes with other sizes on other ranks. `states`: how nodes of the region are cut, in no order. `needs`:
    how tiles cut what they are given, for what they read a piece of. `ends`: nodes whose readers are not of the region.
    `twice`: views that others read too.
    """

    local: LocalGraph
    seed: Node
    tiles: int
    blocks: int
    uneven: Set[Node]
    states: dict[Node, States] = field(default_factory=dict[Node, States])
    needs: dict[Node, AxisState] = field(default_factory=dict[Node, AxisState])

    def __post_init__(self) -> None:
        self.ends, self.twice, self.nodes = set[Node](), set[Node](), list(self.local.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        rows = sharded_along(0, self.blocks)
        self._join(self.seed, _cut(self.seed, {self.seed: rows}, self.tiles)[0], (rows,))
        known = 0
        while len(self.states) > known:  # what leads to the region has readers, and they other operands
            known = len(self.states)
            self._follow()
            self._lead()

    def _join(self, node: Node, taken: Mapping[Node, AxisState], states: States) -> None:
        self.states[node] = states
        for operand, state in taken.items():
            if operand not in self.states and self.needs.setdefault(operand, state) != state:
                raise _NoTilesError(f"%{operand.name} is cut in two ways")

    def _follow(self) -> None:
        """Add what reads rows of the region row by row, in the order of the program. `late`: other nodes that need more
        than sums of the region; what reads one is late too.
        """
        late, todo = set[Node](), {user for node in self.states for user in self._readers(node)}
        for node in self.nodes[min(map(self.place.__getitem__, self.states)) :]:
            if not todo:
                break
            todo.discard(node)
            sources = [n for n in node.all_input_nodes if node in self._readers(n) or n in late]
            if not sources or node.op != "call_function":
                continue
            if late.isdisjoint(sources) and self.ends.isdisjoint(sources) and self._follows(node):
                todo |= self._readers(node)
            else:
                late.add(node)

    def _readers(self, node: Node) -> set[Node]:
        """What reads rows of `node` of the region, and is not of it."""
        rows = any(self.states.get(node, ())) and node not in self.twice
        return {user for user in node.users if user not in self.states} if rows else set()

    def _follows(self, node: Node) -> bool:
        if _torch.is_getitem(node.target):
            source, at = node_at(node, 0), meta.picked(node)
            self._join(node, {}, self.states[source][at.start : at.stop])
            return True
        inner = {n: self.states[n] for n in node.all_input_nodes if any(self.states.get(n, ()))}
        if any(len(states) > 1 for states in inner.values()):
            return False
        known = {n: state for n, (state,) in inner.items() if state is not None}
        taken, states = _cut(node, known, self.tiles)
        if not taken:
            return False
        self._join(node, taken, states)
        if node.target in PRODUCTS and not _grows(node, taken):
            self.ends.add(node)
        return True

    def _lead(self) -> None:
        """Add what only the region reads, where it is no smaller than the rows that it is computed from; and what is
        as large as the seed, whoever reads it.
        """
        long_bytes, todo = meta.size_bytes(self.seed), set(self.needs)
        while todo:
            node = max(todo, key=self.place.__getitem__)
            todo.remove(node)
            state, is_view, tensor = self.needs[node], node.target in VIEWS, meta.tensor(node)
            outside = [user for user in node.users if user not in self.states or user in self.twice]
            is_long = tensor is not None and tensor.size_bytes >= long_bytes
            if node.op != "call_function" or tensor is None or (outside and not (is_view or is_long)):
                continue
            taken, _ = _cut(node, {node: state}, self.tiles)
            if taken and outside and not is_long and not self.states.keys().isdisjoint(taken):
                raise _NoTilesError(f"%{node.name} is read by others too")
            if taken and (is_view or is_long or _grows(node, taken)):
                del self.needs[node]
                self._join(node, taken, (state,))
                self.twice |= {node} if outside and not is_long else set()
                todo |= taken.keys() & self.needs.keys()

    @cached_property
    def inner(self) -> list[Node]:
        """The nodes of the region in order, with those between them: what depends on sums of it, and it on them."""
        below, above = self.states.keys() - self.twice, set(self.states)
        places = [self.place[node] for node in self.states]
        window = self.nodes[min(places) : max(places) + 1]
        for node in window:
            if not below.isdisjoint(node.all_input_nodes):
                below.add(node)
        for node in reversed(window):
            if not above.isdisjoint(node.users) and node not in self.twice:
                above.add(node)
        inner = self.twice | (below & above)
        inner |= {user for node in inner for user in node.users if _torch.is_getitem(user.target)}
        return sorted(inner, key=self.place.__getitem__)

    def check(self) -> None:
        """Raise unless the region depends on its own sums by sums alone, and on nothing long."""
        nodes, long_bytes = self.inner, meta.size_bytes(self.seed)
        inside = set(nodes)
        for node in nodes:
            if other := next((n for n in (node, *operands(node)) if n in self.uneven), None):
                raise _NoTilesError(f"%{other.name} has other sizes on other ranks")
            if node not in self.states and not _torch.is_getitem(node.target) and not _may_join(node):
                raise _NoTilesError(f"it depends on itself by %{node.name}")
            reader = next((user for user in node.users if user not in inside), None)
            has_rows = any(self.states.get(node, ())) and node not in self.twice
            if reader and has_rows and meta.tensor(node) and meta.size_bytes(node) >= long_bytes:
                raise _NoTilesError(f"%{reader.name} ({meta.source_line(reader)}) reads all of it")
        if source := next((n for n in self.needs if meta.size_bytes(n) >= long_bytes), None):
            raise _NoTilesError(f"all of %{source.name} is there in any case")

    def step(self) -> tuple[TrainGraph, list[Node], list[Node]]:
        """The region as a step; the nodes that are its inputs, and those that are its results."""
        nodes, graph, at = self.inner, Graph(), dict[Node, Node]()
        inside, inputs = set(nodes), list[Input]()
        sources = list(dict.fromkeys(n for node in nodes for n in operands(node) if n not in inside))
        ends = [node for node in nodes if node not in self.twice and not inside.issuperset(node.users)]
        with _torch.fake_mode():
            for source in sources:
                at[source] = graph.placeholder(source.name)
                meta.copy(source, at[source])
                _with_local_value(at[source])
                inputs.append(Input(at[source].name, Role.BATCH, meta.one_tensor(source)))
            for node in nodes:
                at[node] = copy_node(node, graph, at.__getitem__)
                if node.target is contiguous:
                    at[node].target, at[node].kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}
                meta.recompute_value(at[node])
        graph.output(tuple(at[end] for end in ends))
        outputs = tuple(Output("result", end.name) for end in ends)
        return TrainGraph(graph, tuple(inputs), outputs), sources, ends

    def tile(self) -> None:
        """Put a loop in place of the region."""
        self.check()
        step, sources, ends = self.step()
        cuts = {n: state.dim for n, state in self.needs.items() if state.blocks == 1}  # others are cut as these are
        if cuts.keys().isdisjoint(sources):
            raise _NoTilesError("rows of several samples follow each other in what it is given")
        dims = {i.name: cuts.get(source) for i, source in zip(step.inputs, sources, strict=True)}
        planned = make_plan(step, Mesh("rank=1"), compose([MicroBatches(self.tiles, dims)]))
        loops = written(planned.graph, planned.plan)
        sums = {meta.one_tensor(end).shape for end in ends if not any(self.states.get(end, ()))}
        for node in loops.graph.nodes:
            after = node.op == "call_function" and node.target not in VIEWS and loop_of(node) is None
            tensor = meta.tensor(node) if after else None
            if tensor and tensor.size_bytes >= meta.size_bytes(self.seed) and tensor.shape not in sums:
                raise _NoTilesError(f"all of %{node.name} is needed at once ({meta.source_line(node)})")
        self._splice(loops, sources, ends)

    def _splice(self, loops: LocalGraph, sources: Sequence[Node], ends: Sequence[Node]) -> None:
        """Put `loops` in place of the region, behind what it reads."""
        for (_, result), end in zip(loops.results(), ends, strict=True):
            if not meta.same_strides(meta.one_tensor(result), meta.one_tensor(end)):
                raise _NoTilesError(f"%{end.name} has other strides than its op gives")
        old = [node for node in self.inner if node not in self.twice]
        first, inner = old[0], {node: source for (_, node), source in zip(loops.placeholders(), sources, strict=True)}
        for node in self._between(first, sources):
            first.prepend(node)
        with self.local.graph.inserting_before(first):
            copy_nodes((n for n in loops.graph.nodes if n.op == "call_function"), self.local.graph, inner)
        redirect({end: inner[result] for (_, result), end in zip(loops.results(), ends, strict=True)})
        for node in reversed(old):
            self.local.graph.erase_node(node)

    def _between(self, first: Node, sources: Sequence[Node]) -> list[Node]:
        """The nodes behind `first` that `sources` depend on, in order."""
        needed = reached(sources, where=lambda node: self.place[node] > self.place[first])
        between = sorted(needed, key=self.place.__getitem__)
        if node := next(filter(draws_numbers, between), None):
            raise _NoTilesError(f"%{node.name} draws random numbers that it needs")
        return between


def _counted(local: LocalGraph) -> LocalGraph:
    """A copy in which the weight of all targets of a loss is known before the loss, for ranks to sum it. Without marks
    of how ranks cut the batch.
    """
    local = local.copy()
    mark_units(TrainGraph(local.graph, local.inputs, local.outputs), {i.name: replicated(0) for i in local.inputs})
    with _torch.fake_mode():
        for node in [n for n in local.graph.nodes if n.target in NLL]:
            for operand in operands(node)[1:]:
                _with_local_value(operand)
            count_targets(node)
    for node in [n for n in local.graph.nodes if n.target is aten.ones_like.default and meta.one_tensor(n).shape == ()]:
        tensor, node.target, node.args = meta.one_tensor(node), aten.ones.default, ([],)  # a gradient begins with it
        node.kwargs = {"dtype": tensor.dtype, "device": torch.device(tensor.device)}
    drop_dead(local.graph)
    return local


def _with_local_value(node: Node) -> None:
    """Record the fake value that a node has on a rank."""
    tensor = meta.one_tensor(node)
    fake = torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device=tensor.device)
    meta.replace_value(node, fake)


def _uneven(local: LocalGraph) -> set[Node]:
    """Nodes whose sizes may differ between ranks, which have one program."""
    uneven = set[Node]()
    for (spec, node), layout in zip(local.placeholders(), local.layouts, strict=True):
        for size, axes in zip(spec.meta.shape, layout.dims, strict=True):
            if size % prod(map(local.mesh.axis_size, axes)):
                uneven.add(node)
    for node in local.graph.nodes:
        tensor, ranked = meta.tensor(node), has_extent((node.args, tuple(node.kwargs.values())), starts=False)
        if node.target is take_chunk:
            dim, parts = cast("tuple[int, int]", node.args[1:3])
            ranked = meta.one_tensor(node_at(node, 0)).shape[dim] % parts != 0
        elif node.target in RANK_DEPENDENT:
            ranked = True
        inherits = node.target is not pad_to and not uneven.isdisjoint(node.all_input_nodes)
        if (ranked or inherits) and not (tensor and not tensor.shape):
            uneven.add(node)
    return uneven


def _may_join(node: Node) -> bool:
    """True for an op that is the same on all ranks, and draws nothing."""
    if node.target is contiguous:
        return True
    return _torch.is_op(node.target) and not is_ranked(node) and not draws(node) and find_rule(node) is not None


def _grows(node: Node, taken: Mapping[Node, AxisState]) -> bool:
    """True if a value is larger than the largest of which it has the rows."""
    return bool(taken) and meta.size_bytes(node) > max(map(meta.size_bytes, taken))


def _blocks(seed: Node) -> list[int]:
    """Numbers of samples whose rows may follow each other in a product: 1, and what views next to it say."""
    rows = meta.one_tensor(seed).shape[0]
    near = [meta.tensor(n) for n in (*seed.users, *(m for n in seed.all_input_nodes for m in n.all_input_nodes))]
    leads = [tensor.shape[0] for tensor in near if tensor and len(tensor.shape) > 2]
    return list(dict.fromkeys([1, *(lead for lead in leads if lead and rows % lead == 0)]))


def _cut(node: Node, known: Mapping[Node, AxisState], tiles: int) -> tuple[dict[Node, AxisState], States]:
    """How all operands and outputs of `node` are cut where some operands are, or `node`, its first output; nothing if
    rows are not independent.
    """
    if node.target is contiguous:
        return dict.fromkeys(node.all_input_nodes, *known.values()), tuple(known.values())
    rule = find_rule(node) if _may_join(node) else None
    if rule is None or not known:
        return {}, ()
    reads = operands(node)
    places = [(side, i, known[n]) for side, of in enumerate((reads, [node])) for i, n in enumerate(of) if n in known]
    for group in rule.groups:
        terms = group.operands, group.outputs
        factors = {group.factor_at(side, i, state) if i in terms[side] else None for side, i, state in places}
        factor = factors.pop()
        if factors or not factor or not group.splits(factor, (tiles,)):
            continue
        taken = {
            n: state for i, n in enumerate(reads) if i in group.operands and (state := group.state_by(factor, 0, i))
        }
        states = [group.state_by(factor, 1, i) if i in group.outputs else None for i in range(len(meta.tensors(node)))]
        return taken, tuple(states)
    if node in known or not can_expand(node):  # planning does so
        return {}, ()
    shapes = {meta.one_tensor(n).shape: state for n, state in known.items()}
    return dict(known), tuple(shapes.get(tensor.shape) if tensor else None for tensor in meta.tensors(node))
