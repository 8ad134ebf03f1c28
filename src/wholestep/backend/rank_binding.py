"""Puts a rank into a local graph: coordinates and process groups in place of axis names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role, copy_graph, node_at
from ..graph.op_kinds import collective
from ..graph.verify import is_collective, is_wait
from ..layout import resolve
from ..partition.rank_ops import RANK_DEPENDENT
from ..passes.bucket import join_rows
from ..passes.write_into_buckets import multiply_into, part_of_average, put_pieces

funcol = torch.ops._c10d_functional


def bound_arguments(node: Node, coordinate: Mapping[str, int]) -> tuple[Any, Any]:
    """Arguments of `node` on the rank at `coordinate`."""
    args = node.args
    if node.target in RANK_DEPENDENT:
        args = (*args[:-1], coordinate[str(args[-1])])
    if meta.is_ranked(node):
        return resolve(args, coordinate), {k: resolve(v, coordinate) for k, v in node.kwargs.items()}
    return args, node.kwargs


def bind(local: LocalGraph, coordinate: Mapping[str, int], groups: Mapping[str, str], exchange: bool = False) -> Graph:
    """A copy of the graph for one rank; `groups` maps axis names to registered process group names.

    With `exchange`, a reduce-scatter is an all-to-all and a local sum. That moves (W-1)/W of the tensor, where gloo's
    own moves what an all-reduce does, and adds ranks in their order, whatever else is in the tensor.
    """
    _torch.count_our_collectives()
    graph = copy_graph(local.graph)
    for given, node in zip(local.inputs, [n for n in graph.nodes if n.op == "placeholder"], strict=True):
        if given.role is Role.CARRY and given.key and exchange:
            _add_up(graph, node, given.key, local.mesh.axis_size(given.owner))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node):
            args = bound_arguments(node, coordinate)[0]
            node.args = (*args[:-1], groups[str(args[-1])])
            if node.target is funcol.all_gather_into_tensor.default:
                node.target = gather
            elif node.target is funcol.all_reduce.default and _is_fresh(node.all_input_nodes[0]):
                node.target = funcol.all_reduce_.default
            elif node.target is funcol.reduce_scatter_tensor.default and exchange:
                _exchange(graph, node)
        else:
            node.args, node.kwargs = bound_arguments(node, coordinate)
    return graph


@collective("all_gather")
def gather(value: Tensor, parts: int, group: str) -> Tensor:
    """all_gather_into_tensor, by way of its out variant on the CPU: two of the plain one in flight can crash gloo.

    Each of gloo's two threads stores the name of the operation it completed in one string, without a lock. The plain
    variant's name, ALLGATHER_COALESCED, is too long to be stored in place: when both threads complete one at once, its
    memory is freed twice (torch 2.11 and 2.13). The out variant has a short name, as the other collectives here have.
    """
    if value.device.type != "cpu" or value.is_complex():
        return funcol.all_gather_into_tensor.default(value, parts, group)
    made = value.new_empty((value.shape[0] * parts, *value.shape[1:]))
    return funcol.all_gather_into_tensor_out.default(value, parts, group, out=made)


def _is_fresh(node: Node) -> bool:
    """True for a bucket, and a product alone: nothing else reads it, so that it can be reduced where it is."""
    return node.target in (join_rows, put_pieces, multiply_into, part_of_average) and len(node.users) == 1


def _exchange(graph: Graph, node: Node) -> None:
    """Parts for all ranks go out in place of a reduce-scatter, and what arrived is added up after the wait."""
    value, op, parts, group = node.args
    node.target, node.args = swap, (value, parts, group)
    meta.set_tensors(node, meta.tensors(node_at(node, 0)))
    _add_up(graph, node, op, parts)


def _add_up(graph: Graph, node: Node, op: Any, parts: Any) -> None:
    for wait in [user for user in node.users if is_wait(user)]:
        with graph.inserting_after(wait):
            added = graph.call_function(add_parts, (wait, parts, op))
        meta.copy(wait, added)
        wait.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)


@collective("reduce_scatter")
def swap(value: Tensor, parts: int, group: str) -> Tensor:
    """Part number i of `value` goes to rank i of the group."""
    rows = [value.shape[0] // parts] * parts
    return funcol.all_to_all_single.default(value, rows, rows, group)


def add_parts(value: Tensor, parts: int, op: str, out: Tensor | None = None) -> Tensor:
    """The sum, average or extreme of the parts that came from all ranks, in the order of the ranks."""
    rows = value.view(parts, value.shape[0] // parts, *value.shape[1:])
    if op in ("max", "min"):
        return rows.amax(0) if op == "max" else rows.amin(0)
    total = torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        total += row
    return total.div_(parts) if op == "avg" else total
