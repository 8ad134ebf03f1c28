"""Applies passes to the bodies that a program runs for pieces of the batch, each as a program of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch.fx import Graph, Node

from ..cost.software import Fills
from ..cost.stage_costs import BlockPrices
from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.loop import bodies_of, loop_of
from ..graph.nodes import copy_graph, ends_of, is_collective, node_at, operands
from ..graph.op_kinds import FREE
from ..graph.region import inputs_of
from ..graph.stage_part import StageBlock
from ..graph.written_out import blocks_in, calls_in
from ..hardware.hardware import Hardware
from ..partition.accumulators import accumulate_early, add_up
from ..partition.batch_dependent import batch_dependent
from ..partition.stage_blocks import put_blocks
from .base import InPlace
from .bucket import CUTS, Bucket
from .limit_inflight import LimitInflight
from .overlap import Overlap
from .sink_waits import SinkWaits


@dataclass(frozen=True)
class InBodies(InPlace):
    """Merges and overlaps the collectives of each piece of the batch, in loops and in blocks of stages, by the passes
    that do so for a whole step. What a run of a body starts it waits for itself: to others it is as it was.

    Merged are gathers of parameters, and reductions of gradients. Bitwise the same, but for merged all-reduces.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    fills: Fills = "all"

    must_follow: ClassVar[tuple[str, ...]] = ("SizeBuckets",)

    @property
    def inner(self) -> tuple[InPlace, ...]:
        """The passes for a body."""
        buckets = (replace(Bucket.sized(kind), stored=True) for kind in ("reduce_scatter", "all_reduce", "all_gather"))
        return SinkWaits(), *buckets, Overlap(self.hardware, self.fills), LimitInflight()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Schedule the bodies of `local`."""
        bodied = [node for node in local.graph.nodes if any(map(_communicates, bodies_of(node)[1]))]
        varying = batch_dependent(local) if bodied else set[Node]()
        for node in bodied:
            if loop := loop_of(node):
                body = copy_graph(loop.body)
                node.target = loop.with_body(self._scheduled(of_piece(local, node, varying, body)))
        for calls in calls_in(local.graph).values() if bodied else ():
            blocks = [block.as_run for block in self.scheduled(local, calls, varying)]
            put_blocks(calls, blocks, local.stage_axis, BlockPrices(self.hardware, local.mesh))
        return local

    def scheduled(
        self, local: LocalGraph, calls: Sequence[Node], varying: Collection[Node] | None = None
    ) -> list[StageBlock]:
        """The blocks that `calls` of a stage run, which know what they will be scheduled as; `varying`: the nodes that
        depend on the batch. What blocks know already for the same sizes they keep.
        """
        varying, blocks = batch_dependent(local) if varying is None else varying, list[StageBlock]()
        for block in blocks_in(calls):
            inputs = inputs_of(next(call for call in calls if meta.block(call) is block))  # nothing is accumulated yet
            roles = [Role.GRAD if n is None else Role.BATCH if n in varying else Role.PARAM for n in inputs]
            known_by = self, local.sizes, roles
            if _communicates(block.body) and (block.scheduled is None or block.scheduled[0] != known_by):
                body = self._scheduled(_program(local, copy_graph(block.body), roles))
                block = replace(block, scheduled=(known_by, body))
            blocks.append(block)
        return blocks

    def _scheduled(self, body: LocalGraph) -> Graph:
        for pass_ in self.inner:
            body = pass_.change(body)
        _let_go(body.graph)
        return body.graph


def _communicates(body: Graph) -> bool:
    return any(map(is_collective, body.nodes))


def _let_go(graph: Graph) -> None:
    """Let a body add up what has arrived as soon as a wait has moved up for it. A result that shares a bucket with
    others is copied where a sum begins with it: the bucket would stay as long as that sum.
    """
    accumulate_early(graph, lambda node: node.target in FREE)
    for node in graph.nodes:
        if node.target is add_up and _is_cut(node_at(node, 1)):
            node.update_arg(3, False)


def _is_cut(value: Node) -> bool:
    """True for a part of a bucket, and a view of one."""
    while value.target in FREE and value.target not in CUTS.values():
        value = node_at(value, 0)
    return value.target in CUTS.values()


def of_piece(local: LocalGraph, at: Node, varying: Collection[Node], body: Graph) -> LocalGraph:
    """What the loop `at`, whose body is `body`, does with a piece, as a program: its inputs that depend on the batch,
    as nodes `varying` do, are its batch; what it accumulates is gradients of earlier calls.
    """
    sources = operands(at)
    roles = [Role.BATCH if source in varying else Role.PARAM for source in sources]
    count = sum(node.op == "placeholder" for node in body.nodes)
    return _program(local, body, [*roles, *[Role.GRAD] * (count - len(sources))])


def _program(local: LocalGraph, body: Graph, roles: Sequence[Role]) -> LocalGraph:
    placeholders = (node for node in body.nodes if node.op == "placeholder")
    inputs = tuple(Input(n.name, role, meta.one_tensor(n)) for n, role in zip(placeholders, roles, strict=True))
    outputs = tuple(Output("result", end.name) for end in ends_of(body))
    return replace(local, graph=body, inputs=inputs, outputs=outputs, layouts=(), stage_axis="", stage=None)
