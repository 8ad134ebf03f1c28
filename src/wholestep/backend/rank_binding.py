"""Puts a rank into a local graph: coordinates and process groups in place of axis names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import copy_graph, is_collective, node_at
from ..layout import resolve
from ..partition.rank_ops import RANK_DEPENDENT
from ..passes.bucket import join_rows
from ..passes.coalesced import coalesce
from ..passes.fused_products import FUSED
from ..passes.write_into_buckets import multiply_into, part_of_average, put_pieces
from .gloo.exchange import add_up, gather, in_buckets, to_exchange
from .start_coalesced import COALESCED

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
    if exchange:
        in_buckets(graph)
    for given, node in zip(local.inputs, [n for n in graph.nodes if n.op == "placeholder"], strict=True):
        if given.role is Role.CARRY and given.key and exchange:
            add_up(graph, node, given.key, local.mesh.axis_size(given.owner))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node):
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
            node.args = (*node.args[:-1], groups[str(node.args[-1])])
        else:
            node.args, node.kwargs = bound_arguments(node, coordinate)
    return graph


def _is_fresh(node: Node) -> bool:
    """True for a bucket, and a product alone: nothing else reads it, so that it can be reduced where it is."""
    return node.target in (join_rows, put_pieces, multiply_into, part_of_average) and len(node.users) == 1
