"""Merges collectives of one kind along one axis into buckets: small ones cost more to start than to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import with_bodies
from ..graph.meta import contiguous, one_tensor
from ..graph.nodes import add_call, is_collective, is_wait, node_at, operands, reached
from ..graph.op_kinds import BUCKET_COPIES, FREE, READS_A_PART, priced_like
from ..graph.storage import shares
from ..partition.accumulators import ACCUMULATORS
from ..partition.batch_dependent import batch_dependent
from ..tuning import TUNING
from .base import InPlace
from .coalesced import coalesce, part_of_coalesced_gather, part_of_coalesced_scatter, shapes_of, starts_in_row
from .context import CollectiveTraffic

funcol = torch.ops._c10d_functional
GATHER, SCATTER = funcol.all_gather_into_tensor.default, funcol.reduce_scatter_tensor.default
REDUCE = funcol.all_reduce.default
KINDS = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": REDUCE}
SUMS = (SCATTER, REDUCE)


@dataclass(frozen=True)
class Bucket(InPlace):
    """Merges all-gathers of stored tensors, reduce-scatters and all-reduces of one kind along one axis.

    Hierarchical collectives are bucketed stage by stage: the second stage reuses the first stage's bucket.

    A bucket closes once it holds `most_bytes`; the first of each kind once it holds `first_bytes`, so that the link
    starts early, as in DDP. Gathers for the forward and for the backward have separate buckets. Gathers of updated
    parameters share a bucket if their gradients did. A reduction starts once the last gradient of its bucket exists,
    before the first result is needed. Gathers and reduce-scatters are bitwise the same; an all-reduce may add the ranks
    in another order.

    Only collectives of `kinds` are merged. Gathers and reduce-scatters of `alone_bytes` or more are not: the copy into
    or out of the bucket would cost more. `SizeBuckets` decides the sizes where `most_bytes` is None.

    Where one collective can carry several tensors (`coalesces`), nothing is copied: gathers of stored tensors and
    reduce-scatters send each tensor from where it is, and receive all in one row (`passes.coalesced`).

    `stored`: only gathers of stored tensors, and sums that accumulators alone read, are merged. Other results are of
    activations: what waits for one would wait for all, and shapes differ between pieces.
    """

    most_bytes: int | None = TUNING.bucket_bytes
    first_bytes: int = TUNING.first_bucket_bytes
    kinds: tuple[str, ...] = tuple(KINDS)
    alone_bytes: int | None = None
    coalesces: bool = False
    stored: bool = False

    @staticmethod
    def sized(kind: str) -> Bucket:
        """Merges one kind, with the sizes of `SizeBuckets`."""
        return Bucket(None, kinds=(kind,))

    @property
    def must_follow(self) -> tuple[str, ...]:
        """`SizeBuckets`, unless sizes are given."""
        return ("SizeBuckets",) if self.most_bytes is None else ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Merge the collectives of `local`: hierarchical ones first, then all others."""
        if self.most_bytes is None:
            assert local.sizes is not None, "SizeBuckets came before"
            sizes, sums = local.sizes, self.kinds == ("all_reduce",)
            most, alone = (sizes.summed_bytes, None) if sums else (sizes.bucket_bytes, sizes.alone_bytes)
            decided = replace(self, most_bytes=most, first_bytes=sizes.first_bytes, alone_bytes=alone)
            return replace(decided, coalesces=sizes.coalesces).change(local)
        fixed = sum(axis.size > 1 for axis in local.mesh.axes) == 1
        settled = set[Node]()
        for several in (False,) if fixed else (True, False):
            groups = self._groups(local, several, settled)
            place = {node: i for i, node in enumerate(local.graph.nodes)}
            for group in groups:
                if len(group) > 1:
                    apart = self.coalesces and _coalesces(group[0])
                    settled.update(_merge(local.graph, group, fixed, place, apart))
        return local

    def _groups(self, local: LocalGraph, several: bool, settled: set[Node]) -> list[list[list[Node]]]:
        """Groups of collectives to merge, in program order, each a list of its stages: hierarchical ones if `several`.
        Adds the collectives that are too large to merge to `settled`.
        """
        open_groups, closed, kinds = dict[Any, _Group](), list[list[list[Node]]](), set[Any]()
        targets = {KINDS[kind] for kind in self.kinds}
        backward, after = False, dict[Node, frozenset[Node]]()
        varying = batch_dependent(local) if self.stored else set[Node]()
        for node in local.graph.nodes:
            backward = backward or meta.is_backward(node)
            if GATHER in targets:  # sums are merged whatever they wait for
                after[node] = frozenset({node}) if is_wait(node) else union([after[n] for n in node.all_input_nodes])
            if is_wait(node):
                for key in [k for k, g in open_groups.items() if node_at(node, 0) in g.lasts and not g.ahead]:
                    closed.append(open_groups.pop(key).chains)
            if not is_collective(node) or node.target not in targets or node in settled:
                continue
            if node_at(node, 0).target in (join_rows, coalesce):
                continue
            first_stage, stages = _first_stage(node), stages_from(node) if several else [node]
            if first_stage.target not in targets or (several and (len(stages) == 1 or first_stage is not node)):
                continue
            if self.stored and (node in varying if node.target is GATHER else not adds_up(stages[-1])):
                continue
            key = _key(stages, backward, after.get(node, frozenset()))
            if self.coalesces and _ahead(node):
                key = *key, _is_kept(node)
            full_bytes = max(one_tensor(member).size_bytes for member in (*stages, node_at(node, 0)))
            copied = node.target is not REDUCE and not (self.coalesces and _coalesces(stages))
            if copied and self.alone_bytes is not None and full_bytes >= self.alone_bytes:
                kinds.add(key)
                settled.update(stages)
                continue
            group = open_groups.setdefault(key, _Group(ahead=_ahead(node)))
            group.chains.append(stages)
            group.lasts.add(stages[-1])
            group.bytes += full_bytes
            assert self.most_bytes is not None, "as given, or as decided"
            most = self.most_bytes if key in kinds else min(self.first_bytes, self.most_bytes)
            if group.bytes >= most and (group.ahead or node.target is not GATHER):
                closed.append(open_groups.pop(key).chains)
                kinds.add(key)
        return closed + [g.chains for g in open_groups.values()]


@dataclass
class _Group:
    """`ahead`: gathers of stored tensors, which may start at any time. `lasts`: the last stage of each collective."""

    ahead: bool
    chains: list[list[Node]] = field(default_factory=list[list[Node]])
    lasts: set[Node] = field(default_factory=set[Node])
    bytes: int = 0


def union(sets: Sequence[frozenset[Node]]) -> frozenset[Node]:
    """The union; the largest set itself where that contains all others, so that many nodes share one object."""
    if len(sets) == 1:
        return sets[0]
    distinct = list({id(nodes): nodes for nodes in sets}.values())
    largest = max(distinct, key=len, default=frozenset[Node]())
    return largest if len(distinct) < 2 or all(nodes <= largest for nodes in distinct) else largest.union(*distinct)


def _ahead(node: Node) -> bool:
    chain = chain_of(node) if node.target is GATHER else None
    return chain is not None and not any(is_wait(n) for n in chain)  # not a later stage, which has to wait


def adds_up(node: Node) -> bool:
    """True if only accumulators read a result."""
    return node.target in ACCUMULATORS or (
        (is_collective(node) or is_wait(node) or node.target in FREE) and all(map(adds_up, node.users))
    )


def stages_from(node: Node) -> list[Node]:
    """`node` and the later stages of its hierarchical collective, each the only reader of the stage before. Behind sums
    there may be gathers, if they undo all reduce-scatters, the last one first.
    """
    first = stages = [node]
    while (after := _next_stage(stages[-1])) is not None:
        stages = [*stages, after]
        first = first if after.target is GATHER and node.target is not GATHER else stages
    scattered = [stage.args[2:] for stage in first if stage.target is SCATTER]
    gathered = [stage.args[1:] for stage in stages[len(first) :]]
    return stages if scattered[::-1] == gathered else first


def _next_stage(node: Node) -> Node | None:
    wait = _only_user(node)
    after = _only_user(wait) if wait is not None and is_wait(wait) else None
    kinds = (GATHER,) if node.target is GATHER else (*SUMS, GATHER) if node.target in SUMS else ()
    return after if after is not None and after.target in kinds else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _first_stage(node: Node) -> Node:
    before = [node]
    while is_wait(wait := node_at(before[-1], 0)) and _next_stage(node_at(wait, 0)) is before[-1]:
        before.append(node_at(wait, 0))
    return next(stage for stage in reversed(before) if node in stages_from(stage))


def chain_of(node: Node) -> list[Node] | None:
    """The chain of unary calls from one input of the graph to `node`; None if there is none, or others read it."""
    chain: list[Node] = []
    at = node
    while at.op == "call_function":
        chain.insert(0, at)
        sources = operands(at)
        if len(sources) != 1 or (at is not node and len(at.users) != 1):
            return None
        at = sources[0]
    return chain if at.op == "placeholder" else None


def collective_traffic(local: LocalGraph) -> CollectiveTraffic:
    """Count them in the graph, and for one piece in the bodies that it runs.

    `regathered_bytes` is 0 where it is less than half of all gathered bytes: these few are gathered twice because they
    are needed in two layouts, not to save memory.
    """
    gathered, regathered, reduced = dict[Node, int](), dict[Node, int](), 0
    for node, _ in with_bodies(local.graph):
        if node.target in SUMS and _first_stage(node) is node:
            reduced += one_tensor(node_at(node, 0)).size_bytes
        if _ahead(node):
            stored = node_at((chain_of(node) or [node])[0], 0)
            (regathered if stored in gathered else gathered)[stored] = one_tensor(stages_from(node)[-1]).size_bytes
    most = sum(regathered.values())
    return CollectiveTraffic(reduced, most if 2 * most >= sum(gathered.values()) else 0)


def _key(stages: Sequence[Node], backward: bool, after: frozenset[Node]) -> tuple[Any, ...]:
    """Equal for collectives that can be merged."""
    calls = tuple((stage.target, *stage.args[1:]) for stage in stages)
    gathers = stages[0].target is GATHER
    return (*calls, one_tensor(stages[0]).dtype, *((backward if _ahead(stages[0]) else after,) if gathers else ()))


def _coalesces(stages: Sequence[Node]) -> bool:
    """True for what can be sent from where it is: a gather that nothing has to wait for, and a reduce-scatter, also one
    whose result is summed along other axes, and then all-gathered: as one row.
    """
    first, *later = stages
    as_row = (REDUCE, GATHER) if first.target is SCATTER else (REDUCE,)
    kind = first.target is SCATTER or _ahead(first)
    return kind and all(stage.target in as_row for stage in later) and not one_tensor(first).dtype.is_complex


def _is_kept(node: Node) -> bool:
    """True if the backward reads a gathered tensor itself. It must share no row with tensors that are freed before."""
    views = reached([node], attrgetter("users"), lambda n: n is node or is_wait(n) or n.target in FREE)
    return any(map(meta.is_backward, (reader for view in views for reader in view.users)))


def _merge(
    graph: Graph, group: Sequence[Sequence[Node]], fixed: bool, place: Mapping[Node, int], apart: bool
) -> list[Node]:
    """Replace `group` by one collective for each stage, whose last result is cut at the former waits; returns these.
    `fixed`: shapes are the same on all ranks. `place`: positions of the waits. `apart`: pieces are not copied.
    """
    firsts, stages = [chain[0] for chain in group], group[0]
    first, gathers, ahead = firsts[0], firsts[0].target is GATHER, _ahead(firsts[0])
    at = first if ahead else firsts[-1]
    for node in firsts if ahead else ():
        for part in (chain_of(node) or ())[:-1]:
            at.prepend(part)
    parts = prod(_parts(stage) for stage in stages if stage.target is first.target)
    pieces = [node_at(node, 0) for node in firsts]
    length, template = sum(one_tensor(n).numel for n in pieces), one_tensor(pieces[0])
    join = (coalesce, (pieces,)) if apart else (join_rows, (pieces, 1 if gathers else parts))
    with graph.inserting_before(at):
        bucket = add_call(graph, *join, contiguous([length], template), first)
        shapes: list[Any] = [
            one_tensor(n).shape if fixed else add_call(graph, outline, (n,), one_tensor(n), first) for n in pieces
        ]
    waits = [next(u for u in chain[-1].users if is_wait(u)) for chain in group]
    collectives: list[Node] = []
    for stage in stages:
        length = length * _parts(stage) if stage.target is GATHER else length // _parts(stage)
        if apart and stage is first:
            received = [one_tensor(node).numel for node in firsts]
            length = starts_in_row(received, template.dtype.itemsize)[-1]
        with graph.inserting_before(at):
            bucket = add_call(graph, stage.target, (bucket, *stage.args[1:]), contiguous([length], template), stage)
        collectives.append(bucket)
        at = min(waits, key=place.__getitem__)
        with graph.inserting_before(at):
            bucket = add_call(graph, funcol.wait_tensor.default, (bucket,), one_tensor(bucket), stage)
    cut = CUTS[apart, "gathered" if gathers else "shared" if stages[-1].target is GATHER else "scattered"]
    for number, (chain, wait) in enumerate(zip(group, waits, strict=True)):
        with graph.inserting_before(wait):
            new = add_call(graph, cut, (bucket, shapes, number, parts), one_tensor(wait), wait)
        wait.replace_all_uses_with(new)
        for stage in reversed(chain):
            graph.erase_node(next(iter(stage.users)))
            graph.erase_node(stage)
    return collectives


def _parts(stage: Node) -> int:
    """Number of ranks that a gather receives from or a scatter sends to; 1 for an all-reduce."""
    return 1 if stage.target is REDUCE else cast(int, stage.args[1] if stage.target is GATHER else stage.args[2])


# Functions that graphs call. Shapes of pieces that differ between ranks along other axes are known at run time only.
@priced_like(BUCKET_COPIES)
def join_rows(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """All pieces in one row, ordered by destination: first the parts for the first of `parts` ranks."""
    if parts == 1:
        return torch.cat([p.reshape(-1) for p in pieces])
    return torch.cat([p.reshape(parts, -1) for p in pieces], 1).reshape(-1)


@priced_like(FREE)
@shares("nothing")
def outline(x: Tensor) -> Tensor:
    """A meta tensor with the shape of `x`."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


@priced_like(BUCKET_COPIES)
@priced_like(READS_A_PART)
def part_of_gather(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """Tensor `number` of a gathered bucket."""
    shape = shapes_of(outlines)[number]
    return rows_of_gather(joined, outlines, number, parts).reshape(parts * shape[0], *shape[1:]).contiguous()


@priced_like(FREE)
@shares("view")
def rows_of_gather(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """Tensor `number` of a gathered bucket, as a view with a row for each rank."""
    shapes = shapes_of(outlines)
    return joined.view(parts, -1).narrow(1, sum(prod(o) for o in shapes[:number]), prod(shapes[number]))


@priced_like(FREE)
@shares("view")
def pieces_of_gather(
    joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], numbers: Sequence[int], parts: int,
    skip: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """What each rank but `skip` sent of the tensors with these `numbers`, as views of a gathered bucket."""
    sizes = [prod(shape) for shape in shapes_of(outlines)]
    sent: list[tuple[Tensor, ...]] = [torch.split(row, sizes) for row in _without(skip, joined.view(parts, sum(sizes)))]
    return [pieces[number] for number in numbers for pieces in sent]


@priced_like(FREE)
@shares("all")
def in_pieces(tensors: Sequence[Tensor], parts: int, skip: int | None = None) -> list[Tensor]:
    """Contiguous tensors, each as `parts` views of equal size; that of rank `skip` is left out."""
    return [row for tensor in tensors for row in _without(skip, in_rows(tensor, parts))]


OWN_APART = (pieces_of_gather, in_pieces)
"""Their last argument is the axis along which a rank's own part is left out, until a rank is put into the graph."""


def _without(skip: int | None, rows: Tensor) -> list[Tensor]:
    return [row for rank, row in enumerate(rows.unbind()) if rank != skip]


@priced_like(FREE)
@shares("view")
def in_rows(x: Tensor, parts: int) -> Tensor:
    """A contiguous tensor viewed as `parts` rows."""
    return x.view(parts, x.numel() // parts)


@priced_like(FREE)
@shares("view")
def part_of_scatter(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """This rank's piece of tensor `number` of a reduced bucket."""
    shapes = shapes_of(outlines)
    start, shape = sum(prod(o) // parts for o in shapes[:number]), shapes[number]
    piece = joined.narrow(0, start, prod(shape) // parts)
    return piece.view(shape[0] // parts, *shape[1:]) if shape else piece.view(())


@priced_like(BUCKET_COPIES)
@priced_like(READS_A_PART)
def part_of_shared_sum(joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int) -> Tensor:
    """Tensor `number` of a bucket that was reduced in `parts` and then all-gathered."""
    shapes = shapes_of(outlines)
    starts = list(accumulate((prod(shape) // parts for shape in shapes), initial=0))
    return _from_rows(joined, parts, starts[number], shapes[number])


@priced_like(BUCKET_COPIES)
@priced_like(READS_A_PART)
def part_of_coalesced_shared_sum(
    row: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int
) -> Tensor:
    """`part_of_shared_sum` of tensors that were reduced into one row."""
    shapes = shapes_of(outlines)
    starts = starts_in_row([prod(shape) // parts for shape in shapes], row.itemsize)
    return _from_rows(row, parts, starts[number], shapes[number])


READS_A_PLACE = (part_of_gather, part_of_scatter, part_of_shared_sum)
"""They read tensor `number`, which begins where those before it end."""


def of_one(outlines: Sequence[Any], number: int) -> tuple[Sequence[Any], int]:
    """Outlines and a number for the same place: one outline for all tensors before it, if their shapes are known."""
    fixed = all(isinstance(shape, tuple) for shape in outlines)
    return ([(sum(map(prod, outlines[:number])),), outlines[number]], 1) if fixed else (outlines, number)


def _from_rows(rows: Tensor, parts: int, start: int, shape: tuple[int, ...]) -> Tensor:
    return rows.view(parts, -1).narrow(1, start, prod(shape) // parts).reshape(shape).contiguous()


CUTS = {
    (False, "gathered"): part_of_gather, (True, "gathered"): part_of_coalesced_gather,
    (False, "scattered"): part_of_scatter, (True, "scattered"): part_of_coalesced_scatter,
    (False, "shared"): part_of_shared_sum, (True, "shared"): part_of_coalesced_shared_sum,
}  # fmt: skip
"""What cuts a result: by whether the pieces were sent apart, and what was done with them."""
