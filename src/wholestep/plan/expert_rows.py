"""Counts the rows of each expert in a step, as further results of its graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..capture.skip_nonfinite import After
from ..graph import meta
from ..graph.graph import EXPERT_ROWS, Output, TrainGraph
from ..graph.nodes import copy_graph, operands
from .rows_in_any_order import sorts_of_groups

aten = torch.ops.aten


def with_expert_rows(graph: TrainGraph) -> TrainGraph:
    """`graph` with a result for each layer whose grouped products take rows in the order of their experts: how many
    rows each expert has.
    """
    if any(out.target.startswith(EXPERT_ROWS) for out in graph.outputs):
        return graph
    graph = replace(graph, graph=copy_graph(graph.graph))
    counts: dict[str, torch.fx.Node] = {}
    for sort, experts in sorts_of_groups(graph.graph):
        keys = operands(sort)[0]
        path = meta.module_path(sort) or sort.name
        if experts and not meta.is_backward(sort):  # which may compute its forward again
            place, device = After(sort), meta.one_tensor(keys).device
            ones = place.call(aten.full_like.default, keys, 1)
            before = counts.get(path) or place.call(aten.full.default, [experts], 0, dtype=torch.int64, device=device)
            counts[path] = place.call(aten.index_add.default, before, 0, keys, ones)
    pairs = graph.results()
    end = sum(out.kind == "result" for out, _ in pairs)
    pairs[end:end] = [(Output("result", EXPERT_ROWS + path), node) for path, node in counts.items()]
    next(iter(reversed(graph.graph.nodes))).args = (tuple(node for _, node in pairs),)
    return replace(graph, outputs=tuple(out for out, _ in pairs))
