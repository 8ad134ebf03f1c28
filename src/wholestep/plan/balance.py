"""Cuts the forward of a step into stages: parts of equal time, where little has to be sent."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from torch.fx import Node

from ..cost.compute import node_us
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..hardware.hardware import Hardware
from .propagation_inputs import moving
from .stage_of_node import first_readers, forward_nodes

_NARROW = 1.05  # of the least that is sent nearby, a place to cut may send so much


def balanced(graph: TrainGraph, stages: int, hardware: Hardware) -> dict[str, int]:
    """The stage of each parameter. Stages follow the forward; the longest one is as short as it can be, by the cost
    model. A cut is in front of a node that reads a parameter for the first time. Raises PlanError where the forward has
    fewer such places.
    """
    calls, first = forward_nodes(graph), first_readers(graph)
    times = [node_us(node, hardware) for node in calls]
    until = [0.0, *accumulate(times)]
    sent = _sent(graph, calls)
    starts = sorted({position for position in first.values() if 0 < position < len(calls)})
    fits = _narrow(starts, until, sent, until[-1] / (2 * stages))
    if len(fits) < stages - 1:
        fits = starts
    if len(fits) < stages - 1:
        problem = f"a forward that can be cut in {len(fits)} places, between modules with parameters"
        raise PlanError(problem, f"{stages - 1} places for {stages} stages", "give fewer stages, or stages=")
    cuts = _cuts(fits, until, stages)
    return {i.name: bisect_right(cuts, first.get(i.name, 0)) for i in graph.inputs if i.role is Role.PARAM}


def _sent(graph: TrainGraph, calls: tuple[Node, ...]) -> list[int]:
    """For each position, the bytes of samples that nodes in front of it leave to those behind it."""
    moves, at = moving(graph), {node: i for i, node in enumerate(calls)}
    change = [0] * (len(calls) + 1)
    for node in calls:
        last = max((at[user] for user in node.users if user in at), default=at[node])
        tensor = meta.tensor(node)
        if node in moves and tensor is not None and tensor.dtype.is_floating_point:
            change[at[node] + 1] += tensor.size_bytes
            change[last + 1 if last < len(calls) else last] -= tensor.size_bytes
    return list(accumulate(change))


def _narrow(starts: list[int], until: list[float], sent: list[int], window_us: float) -> list[int]:
    """The places where about as little is sent as anywhere within the window."""
    places: list[int] = []
    for position in starts:
        low = bisect_left(until, until[position] - window_us)
        high = bisect_right(until, until[position] + window_us)
        near = [sent[p] for p in starts if low <= p < high]
        if sent[position] <= _NARROW * min(near):
            places.append(position)
    return places


def _cuts(places: list[int], until: list[float], stages: int) -> list[int]:
    """The places of `stages - 1` cuts that make the longest part the shortest: dynamic programming over places."""
    ends = [*places, len(until) - 1]
    best: list[tuple[float, tuple[int, ...]]] = [(until[end], ()) for end in ends]
    for _ in range(stages - 1):
        after: list[tuple[float, tuple[int, ...]]] = []
        for number, end in enumerate(ends):
            candidates = [
                (max(best[before][0], until[end] - until[ends[before]]), (*best[before][1], ends[before]))
                for before in range(number)
            ]
            after.append(min(candidates, default=(float("inf"), ())))
        best = after
    return list(best[-1][1])
