"""Puts a rank into a local graph: coordinates and process groups in place of axis names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.loop import bodies_of, put_bodies
from ..graph.messages import POINT_TO_POINT, SENDS
from ..graph.nodes import copy_graph, is_collective, node_at
from ..graph.owned import of_owner
from ..graph.region import ByPiece
from ..graph.written_out import written_out
from ..layout import resolve
from ..mesh import TIME, channel
from ..partition.rank_ops import RANK_DEPENDENT
from ..passes.bucket import OWN_APART, READS_A_PLACE, join_rows, of_one
from ..passes.coalesced import COALESCED, coalesce
from ..passes.fused_products import FUSED
from ..passes.write_into_buckets import multiply_into, part_of_average, put_pieces
from ..sizes import SizeFloat, SizeInt
from .gloo.exchange import add_up, gather, in_buckets, to_exchange

funcol = torch.ops._c10d_functional


def bound_arguments(node: Node, coordinate: Mapping[str, int]) -> tuple[Any, Any]:
    """Arguments of `node` on the rank at `coordinate`."""
    args = node.args
    if (piece := meta.piece(node)) is not None:
        coordinate = {**coordinate, TIME: piece}
    if node.target in READS_A_PLACE:
        args = (args[0], *of_one(cast(Any, args[1]), cast(int, args[2])), args[3])
    if node.target in RANK_DEPENDENT or (node.target in OWN_APART and args[-1] is not None):
        args = (*args[:-1], coordinate[str(args[-1])])
    return resolve(args, coordinate), {k: resolve(v, coordinate) for k, v in node.kwargs.items()}


def bound_calls(graph: Graph, coordinate: Mapping[str, int], pieces: int = 1) -> Graph:
    """A copy of the graph with the arguments of one rank; in a loop, or a block of a stage, those of its pieces."""
    graph = copy_graph(graph)
    _change_bodies(graph, lambda body, pieces: bound_calls(body, coordinate, pieces))
    for node in graph.nodes:
        _torch.set_operands(node, *_arguments(node, coordinate, pieces))
    return graph


def bind(
    local: LocalGraph, coordinate: Mapping[str, int], groups: Mapping[str, str], exchange: bool = False,
    runs: bool = True,
) -> Graph:  # fmt: skip
    """A copy of the graph for one rank; `groups` maps names of axes, and of channels (`mesh.channel`) that have a group
    of their own, to registered process group names. With `runs`, what it does for pieces of the batch is written out,
    as calls of regions; else it is there to be priced.

    With `exchange`, a reduce-scatter is an all-to-all and a local sum. That moves (W-1)/W of the tensor, where gloo's
    own moves what an all-reduce does, and adds ranks in their order, whatever else is in the tensor.
    """
    graph = of_owner(local.graph, coordinate[local.owner_axis]) if local.owner_axis else copy_graph(local.graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for spec, layout, node in zip(local.inputs, local.layouts, placeholders, strict=True):
        if any(isinstance(size, SizeInt) for size in spec.meta.shape):
            shape = layout.local_shape(spec.meta.shape, local.mesh, coordinate)
            meta.set_tensors(node, (meta.contiguous(shape, meta.one_tensor(node)),))
        if local.owner_axis and not layout.is_held_at(coordinate):
            meta.set_tensors(node, (meta.contiguous((0,), meta.one_tensor(node)),))
            meta.set_owner(node, None)
        if spec.role is Role.CARRY and spec.key and exchange:
            add_up(graph, node, spec.key, local.mesh.axis_size(spec.owner))
    _change_bodies(graph, lambda body, pieces: _bind(copy_graph(body), coordinate, groups, exchange, pieces))
    if runs:
        written_out(graph)
    return _bind(graph, coordinate, groups, exchange)


def _bind(
    graph: Graph, coordinate: Mapping[str, int], groups: Mapping[str, str], exchange: bool, pieces: int = 1
) -> Graph:
    """Bind the nodes of a graph, or of a body that runs for several pieces."""
    if exchange:
        in_buckets(graph)
    for node in graph.nodes:
        if node.op != "call_function" or _torch.is_getitem(node.target):
            continue
        if is_collective(node):
            _torch.count_our_collectives()
            args = bound_arguments(node, coordinate)[0]
            node.args = (*args[:-1], groups[str(args[-1])])
            if node_at(node, 0).target is coalesce:
                node.target = COALESCED[node.target]
            elif node.target is funcol.all_gather_into_tensor.default:
                node.target = gather
            elif node.target is funcol.all_reduce.default and _is_fresh(node.all_input_nodes[0]):
                node.target = funcol.all_reduce_.default
            elif node.target is funcol.reduce_scatter_tensor.default and exchange:
                to_exchange(graph, node)
        elif node.target in FUSED:
            args = bound_arguments(node, coordinate)[0]
            node.args = (*args[:-1], groups[str(args[-1])])
        elif node.target in POINT_TO_POINT:
            args, here = bound_arguments(node, coordinate)[0], coordinate[str(node.args[-1])]
            ends = (here, args[1]) if node.target in SENDS else (args[3], here)
            node.args = (*args[:-1], groups.get(channel(str(args[-1]), *ends), groups[str(args[-1])]))
        else:
            args, kwargs = _arguments(node, coordinate, pieces)
            if args is not node.args or kwargs is not node.kwargs:
                _torch.set_operands(node, args, kwargs)
    return graph


def _change_bodies(graph: Graph, change: Callable[[Graph, int], Graph]) -> None:
    """Replace each body that nodes of a graph run, for as many pieces."""
    bodies = {body: pieces for node in graph.nodes for pieces, bodies in [bodies_of(node)] for body in bodies}
    put_bodies(graph, {body: change(body, pieces) for body, pieces in bodies.items()})


def _arguments(node: Node, coordinate: Mapping[str, int], pieces: int) -> tuple[Any, Any]:
    """Arguments of `node` on the rank at `coordinate`, for all pieces."""
    if pieces == 1:
        return bound_arguments(node, coordinate)
    each = [bound_arguments(node, {**coordinate, TIME: piece}) for piece in range(pieces)]
    return cast("tuple[Any, Any]", _by_piece(each))


def _by_piece(values: Sequence[Any]) -> Any:
    """One value, with a `ByPiece` where it differs between pieces."""
    first = values[0]
    if isinstance(first, (list, tuple)):
        return type(cast(Any, first))(_by_piece(each) for each in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _by_piece([value[key] for value in values]) for key in cast("dict[str, Any]", first)}
    return first if all(map(partial(_same, first), values)) else ByPiece(tuple(values))


def _same(argument: Any, other: Any) -> bool:
    """True for arguments that are equal, in batches of all sizes."""
    if isinstance(argument, (SizeInt, SizeFloat)) and isinstance(other, (SizeInt, SizeFloat)):
        return argument.text == other.text
    return argument is other or argument == other


def _is_fresh(node: Node) -> bool:
    """True for a bucket, and a product alone: nothing else reads it, so that it can be reduced where it is."""
    return node.target in (join_rows, put_pieces, multiply_into, part_of_average) and len(node.users) == 1
