"""Interprets the program of a plan for all ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import GraphError
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import Loop, loop_of
from ..graph.nodes import function_of, is_collective, is_mutating, is_wait, operands
from ..graph.op_kinds import Collective, collective_kind
from ..mesh import TIME, Mesh
from ..passes.coalesced import starts_in_row

Value = Any
Bind = Callable[[Node, Mapping[str, int]], tuple[Any, Any]]
Watch = Callable[[Node, Sequence[dict[Node, Value]]], None]


def _unwatched(node: Node, envs: Sequence[dict[Node, Value]]) -> None:
    pass


def run_all(
    local: LocalGraph, inputs: Sequence[Sequence[Tensor]], bind: Bind, watch: Watch = _unwatched
) -> list[list[Value]]:
    """Run all ranks in lockstep with `inputs[rank]`; return the outputs by rank.

    `bind` returns a rank's args and kwargs of a node. `watch` is called after each node outside of loops, with the
    values of each rank, which it may replace. Each rank has its own random stream; all streams start at the current
    state of torch's generator.
    """
    ranks = range(local.mesh.size)
    streams = [torch.get_rng_state()] * local.mesh.size
    nodes = [n for n in local.graph.nodes if n.op == "placeholder"]
    envs: list[dict[Node, Value]] = [dict(zip(nodes, inputs[r], strict=True)) for r in ranks]
    _run_nodes(local.graph, local.mesh, envs, streams, bind, {}, watch)
    return [[envs[r][n] if isinstance(n, Node) else n for _, n in local.results()] for r in ranks]


def _run_nodes(
    graph: Graph, mesh: Mesh, envs: list[dict[Node, Value]], streams: list[Tensor], bind: Bind, piece: dict[str, int],
    watch: Watch = _unwatched,
) -> None:  # fmt: skip
    """Run the calls of a graph on all ranks; `piece` is the number of the piece in the body of a loop."""
    places = [{**mesh.coordinate(rank), **piece} for rank in range(len(envs))]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node):
            _run_collective(node, mesh, envs, lambda at, node=node: bind(node, {**at, **piece})[0])
        elif loop := loop_of(node):
            _run_loop(loop, node, mesh, envs, streams, bind)
        else:
            _run_call(node, places, envs, streams, bind)
        watch(node, envs)


def _run_call(
    node: Node, places: Sequence[dict[str, int]], envs: list[dict[Node, Value]], streams: list[Tensor], bind: Bind
) -> None:
    function, draws = function_of(node), is_random(node)
    for rank, env in enumerate(envs):
        args, kwargs = map_arg(bind(node, places[rank]), env.__getitem__)
        if draws:
            torch.set_rng_state(streams[rank])
        env[node] = args[0] if is_wait(node) else as_traced(node, function(*args, **kwargs))
        if draws:
            streams[rank] = torch.get_rng_state()


def _run_loop(
    loop: Loop, node: Node, mesh: Mesh, envs: list[dict[Node, Value]], streams: list[Tensor], bind: Bind
) -> None:
    """Run the body for each piece, on all ranks in lockstep."""
    placeholders = [n for n in loop.body.nodes if n.op == "placeholder"]
    ends = operands(next(iter(reversed(loop.body.nodes))))
    totals: list[list[Value]] = [[None] * len(ends) for _ in envs]
    for piece in range(loop.pieces):
        operand_values = [[*(env[n] for n in operands(node)), *total] for env, total in zip(envs, totals, strict=True)]
        inner = [dict(zip(placeholders, values, strict=True)) for values in operand_values]
        _run_nodes(loop.body, mesh, inner, streams, bind, {TIME: piece})
        totals = [[env[n] for n in ends] for env in inner]
    for env, total in zip(envs, totals, strict=True):
        env[node] = total


def is_random(node: Node) -> bool:
    """Return whether a node calls a random op, or a function with a random op as an argument."""
    return any(_torch.is_op(target) and _draws(target) for target in (node.target, *node.args))


@cache
def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def as_traced(node: Node, result: Value) -> Value:
    """Return a node's result with the strides of the trace, which later nodes assume."""
    stride = None if is_mutating(node) else meta.traced_stride(node)
    return result if stride is None else meta.with_stride(result, stride)


def _run_collective(
    node: Node, mesh: Mesh, envs: list[dict[Node, Value]], arguments: Callable[[Mapping[str, int]], Any]
) -> None:
    kind, axis = collective_kind(node.target), str(node.args[-1])
    assert kind is not None, f"%{node.name} is a collective"
    source, into = operands(node)[0], node.kwargs.get("out")
    for group in mesh.groups(axis):
        parts = [envs[rank][source] for rank in group]
        args: Any = node.args
        if kind == "all_to_all":
            each = (map_arg(arguments(mesh.coordinate(rank))[:3], envs[rank].__getitem__) for rank in group)
            args = list(zip(*each, strict=True))
        computed = _apart(parts, kind, args) if isinstance(parts[0], list) else COMPUTE[kind](parts, args)
        for rank, result in zip(group, computed, strict=True):
            envs[rank][node] = envs[rank][into].copy_(result) if isinstance(into, Node) else result


def _apart(lists: list[list[Tensor]], kind: Collective, args: Any) -> list[Tensor]:
    """Each tensor by itself; a rank's results in one row, with values that nobody may read between them."""
    each = [COMPUTE[kind](list(pieces), args) for pieces in zip(*lists, strict=True)]
    rows: list[Tensor] = []
    for results in zip(*each, strict=True):
        starts = starts_in_row([tensor.numel() for tensor in results], results[0].itemsize)
        rows.append(results[0].new_full((starts[-1],), float("nan")))
        for start, tensor in zip(starts, results, strict=False):
            rows[-1][start : start + tensor.numel()] = tensor.reshape(-1)
    return rows


def _reduce(parts: list[Tensor], op: str) -> Tensor:
    if parts[0].is_complex():  # torch communicates real views
        return torch.view_as_complex(_reduce([torch.view_as_real(x) for x in parts], op))
    stacked = torch.stack(parts)
    if op in ("sum", "avg"):
        total = stacked.sum(0, dtype=stacked.dtype)
        return total / len(parts) if op == "avg" else total
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    raise GraphError(f"reduction {op!r} is unknown", "sum, avg, max or min")


def _all_to_all(parts: list[Tensor], args: Any) -> list[Tensor]:
    """`args` with the splits of each rank of the group."""
    pieces: list[tuple[Tensor, ...]] = [
        torch.split(piece, list(map(int, counts))) for piece, counts in zip(parts, args[2], strict=True)
    ]
    joined = [torch.cat(received) for received in zip(*pieces, strict=True)]
    assert [len(value) for value in joined] == [sum(map(int, counts)) for counts in args[1]], "as many as are expected"
    return joined


COMPUTE: dict[Collective, Callable[[list[Tensor], Any], list[Tensor]]] = {
    "all_reduce": lambda parts, args: [_reduce(parts, args[1]) for _ in parts],
    "all_gather": lambda parts, args: [torch.cat(parts) for _ in parts],
    "reduce_scatter": lambda parts, args: [x.clone() for x in _reduce(parts, args[1]).chunk(len(parts))],
    "all_to_all": _all_to_all,
    "broadcast": lambda parts, args: [parts[args[1]].clone() for _ in parts],
}
