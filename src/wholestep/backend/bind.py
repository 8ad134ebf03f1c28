"""Puts a rank into a local graph: coordinates and process groups in place of axis names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph, copy_graph
from ..graph.verify import is_collective
from ..layout import resolve
from ..partition.pieces import RANK_DEPENDENT


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
        else:
            node.args, node.kwargs = bound_arguments(node, coordinate)
    return graph
