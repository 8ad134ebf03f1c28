"""Puts a rank into a local graph: coordinates and process groups in place of axis names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, copy_graph
from ..graph.verify import is_collective
from ..layout import resolve
from ..partition.pieces import RANK_DEPENDENT

funcol = torch.ops._c10d_functional


def bound_arguments(node: Node, coordinate: Mapping[str, int]) -> tuple[Any, Any]:
    """Arguments of `node` on the rank at `coordinate`."""
    args = node.args
    if node.target in RANK_DEPENDENT:
        args = (*args[:-1], coordinate[str(args[-1])])
    if meta.is_ranked(node):
        return resolve(args, coordinate), {k: resolve(v, coordinate) for k, v in node.kwargs.items()}
    return args, node.kwargs


def bind(local: LocalGraph, coordinate: Mapping[str, int], groups: Mapping[str, str]) -> Graph:
    """A copy of the graph for one rank; `groups` maps axis names to registered process group names."""
    graph = copy_graph(local.graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node):
            node.args = (*node.args[:-1], groups[str(node.args[-1])])
            if node.target is funcol.all_gather_into_tensor.default:
                node.target = gather
                _torch.count_gather_out()
        else:
            node.args, node.kwargs = bound_arguments(node, coordinate)
    return graph


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
