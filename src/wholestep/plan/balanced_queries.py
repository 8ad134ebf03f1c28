"""Causal attention for which ranks exchange queries: of contiguous pieces, the last attends to most keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from ..cost.compute import most_of_ranks, work
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import arithmetic
from ..graph.text import seconds
from ..hardware.hardware import Hardware
from ..layout import Extent, OfOwner, dealt
from ..mesh import Mesh
from ..rules.call import Call
from ..rules.find_rule import find_rule
from ..sizes import text_of
from .decision import Decision
from .ring_attention import ring_of


@dataclass(frozen=True)
class Queries:
    """The queries of a call, `size` in all, of which each of `parts` ranks along `axis` has a piece. `operands`,
    `outputs`: the dim of queries, by place.
    """

    axis: str
    parts: int
    size: int
    operands: Mapping[int, int]
    outputs: Mapping[int, int]

    @property
    def ranges(self) -> tuple[list[OfOwner], list[OfOwner]]:
        """Starts and lengths of the early and the late part that a rank gets."""
        parts = [dealt(self.size, self.parts, rank) for rank in range(self.parts)]
        starts, lengths = ([OfOwner(self.axis, tuple(p[i][of] for p in parts)) for i in (0, 1)] for of in (0, 1))
        return starts, lengths


def queries_of(node: Node, decision: Decision, mesh: Mesh) -> Queries | None:
    """The queries of a call that ranks can exchange: it is causal, and the kernel returns a sum for each query."""
    operation = arithmetic(node.target) if node.op == "call_function" else None
    rule = find_rule(node) if operation and operation.kind == "attention" else None
    group = next((group for group in rule.groups if "q" in group.factors and "q" in rule.local), None) if rule else None
    if operation is None or group is None or not Call.of(node).argument("is_causal"):
        return None
    takes, gives = ({i: t.index("q") for i, t in s.items() if "q" in t} for s in (group.operands, group.outputs))
    if (ring := ring_of(node, decision, mesh)) is not None:
        if ring.reach or text_of(ring.queries) != text_of(ring.keys):
            return None
        takes |= dict.fromkeys((ring.key, ring.key + 1), 2)
        gives |= dict.fromkeys((1, 2) if operation.backward else (), 2)
    cuts = {decision.operands[i].dims[d] for i, d in takes.items()} | {
        decision.outputs[i].dims[d] for i, d in gives.items()
    }
    cut = next(iter(cuts))
    of_keys = 0 if ring is None else 4 if operation.backward else 2
    if len(cuts) > 1 or len(cut) != 1 or len(takes) + len(gives) != (5 if operation.backward else 3) + of_keys:
        return None
    return Queries(cut[0], mesh.axis_size(cut[0]), Call.of(node).shape(0)[takes[0]], takes, gives)


def balanced(
    graph: TrainGraph, decisions: Mapping[str, Decision], mesh: Mesh, hardware: Hardware, axis: str, always: bool | None
) -> tuple[dict[str, Decision], tuple[str, ...]]:
    """`decisions` that say whether ranks of `axis` exchange queries, and the calls for which they do: where the slowest
    rank saves more, in forward and backward together, than the exchanges take; with `always`, all or none.
    """
    each = {node: queries_of(node, decisions[node.name], mesh) for node in graph.graph.nodes if node.name in decisions}
    calls = {node: queries for node, queries in each.items() if queries is not None and queries.axis == axis}
    prices = [_prices(node, decisions[node.name], queries, mesh, hardware) for node, queries in calls.items()]
    saved_us, sent_us = sum(saved for saved, _ in prices), sum(sent for _, sent in prices)
    does = saved_us > sent_us if always is None else always
    text = f"queries are {'' if does else 'not '}exchanged along {axis}, so that ranks attend to as many keys: the "
    text += f"slowest saves {seconds(saved_us / 1e6)} in {len(calls)} calls, exchanges take {seconds(sent_us / 1e6)}"
    said = {n.name: replace(d := decisions[n.name], because=(*d.because, text)) for n in calls}
    return {**decisions, **said}, tuple(said) if does else ()


def _prices(node: Node, decision: Decision, queries: Queries, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Microseconds that the slowest rank saves in a call, and those of two exchanges: of queries and results, or of
    their gradients, with a copy before and after each.
    """
    call, layout, tensor = work(node), decision.operands[0], meta.one_tensor(operands(node)[0])
    assert call is not None, "it computes"
    assert call.attention is not None, "pieces of the queries have four dims"
    shape = layout.local_shape(tuple(map(int, tensor.shape)), mesh, mesh.coordinate(0))  # prices compare no symbols
    local = replace(call, attention=(*shape[:2], 0, *call.attention[3:]), moved_bytes=0)
    pieces = ((queries.axis, queries.parts),)
    piece = [Extent(queries.size, pieces, start=True)], [Extent(queries.size, pieces)]
    piece_us, exchanged_us = (hardware.work_us(most_of_ranks(local, *ranges)) for ranges in (piece, queries.ranges))
    size = meta.contiguous(shape, tensor).size_bytes
    if 1 + call.backward in queries.operands and 2 + call.backward in queries.operands:  # keys and values, too
        key = meta.one_tensor(operands(node)[1 + call.backward])
        size += int(size * key.numel // tensor.numel)
    sent_us = hardware.collective_us("all_to_all", size, mesh, queries.axis) + 2 * hardware.bytes_us(2 * size)
    return piece_us - exchanged_us, 2 * sent_us
