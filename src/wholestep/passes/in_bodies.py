"""Applies passes to the bodies that a program runs for pieces of the batch, each as a program of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.loop import loop_of
from ..graph.nodes import copy_graph, is_collective, node_at, operands
from ..graph.op_kinds import FREE
from ..hardware.hardware import Hardware
from ..partition.accumulators import accumulate_early, add_up
from .base import InPlace, batch_dependent
from .bucket import CUTS, Bucket
from .limit_inflight import LimitInflight
from .overlap import Overlap
from .sink_waits import SinkWaits


@dataclass(frozen=True)
class InBodies(InPlace):
    """Merges and overlaps the collectives of each piece of the batch, by the passes that do so for a whole step. What a
    piece starts it waits for itself, so that pieces stay as they are to each other.

    Merged are gathers of parameters, and reduce-scatters of gradients.
    """

    hardware: Hardware = field(default_factory=Hardware.default)

    must_follow: ClassVar[tuple[str, ...]] = ("SizeBuckets",)

    @property
    def inner(self) -> tuple[InPlace, ...]:
        """The passes for a body."""
        buckets = (replace(Bucket.sized(kind), stored=True) for kind in ("reduce_scatter", "all_reduce", "all_gather"))
        return SinkWaits(), *buckets, Overlap(self.hardware), LimitInflight()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Schedule the bodies of `local`."""
        varying: set[Node] | None = None
        for node in local.graph.nodes:
            if (loop := loop_of(node)) is not None and any(map(is_collective, loop.body.nodes)):
                varying = batch_dependent(local) if varying is None else varying
                body = of_piece(local, node, varying, copy_graph(loop.body))
                for one in self.inner:
                    body = one.change(body)
                _let_go(body.graph)
                node.target = loop.with_body(body.graph)
        return local


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
    given, inputs = operands(at), list[Input]()
    for number, node in enumerate(node for node in body.nodes if node.op == "placeholder"):
        depends = number < len(given) and given[number] in varying
        role = Role.GRAD if number >= len(given) else Role.BATCH if depends else Role.PARAM
        inputs.append(Input(node.name, role, meta.one_tensor(node)))
    outputs = tuple(Output("result", end.name) for end in operands(next(iter(reversed(body.nodes)))))
    return replace(local, graph=body, inputs=tuple(inputs), outputs=outputs, layouts=(), stage_axis="", stage=None)
