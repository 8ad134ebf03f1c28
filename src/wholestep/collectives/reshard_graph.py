"""The local graph of one reshard: the nodes that partitioning would write between two operations."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.fx import Graph

from ..errors import LayoutError
from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.meta import TensorMeta
from ..graph.verify import check_local_graph
from ..hardware.presets import one_host
from ..layout import Layout
from ..mesh import Mesh
from ..partition.collectives import Emitter, contiguous
from ..reshard import Path, reshard


@lru_cache(maxsize=4096)
def program(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: str, mesh: Mesh
) -> LocalGraph:
    """What one rank runs to bring a tensor of global `shape` from `source` to `target`: one input, one result.

    The input is contiguous. Padding, where a size does not divide, is part of the program.

    Raises:
        LayoutError: a layout does not fit the shape or the mesh, or there is no way between them.
    """
    path = route(source, target, shape, dtype, mesh)
    whole = TensorMeta(shape, (), dtype, device)
    here = contiguous(path.layouts[0].local_shape(shape, mesh, mesh.coordinate(0)), whole)
    graph = Graph()
    given = graph.placeholder("tensor")
    meta.set_tensors(given, (here,))
    _, finish = Emitter(graph, mesh).start(path, given, whole)
    graph.output((finish(),))
    given_input = Input("tensor", Role.BATCH, contiguous(shape, whole))
    local = LocalGraph(graph, mesh, (given_input,), (Output("result", ""),), (path.layouts[0],))
    check_local_graph(local)
    return local


def route(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> Path:
    """The cheapest steps from `source` to `target`. An axis of one rank takes none.

    Raises:
        LayoutError: as `program`.
    """
    for layout in (source, target):
        layout.check(shape, mesh)
    start, end = without_single(source, mesh), without_single(target, mesh)
    averages = [axis for axis, op in start.partial if op == "avg" and not dtype.is_floating_point]
    if averages and not dtype.is_complex:
        raise LayoutError(
            f"an average of {dtype} over {averages[0]!r}",
            "a dtype that holds fractions",
            "convert it, or reduce by sum",
        )
    made = [axis for axis, _ in end.partial if start.state(axis).kind == "S"]
    if made:
        raise LayoutError(
            f"a tensor laid out as {source} cannot become {target}: {made[0]!r} shards it",
            "a partial value that is partial already, or replicated",
            "gather it first: zeros on all ranks but one then make it a sum",
        )
    return reshard(start, end, shape, dtype.itemsize, mesh, one_host())


def without_single(layout: Layout, mesh: Mesh) -> Layout:
    """`layout` without the axes of one rank: along those, whatever they do, a tensor is whole and final."""
    single = {axis for axis in layout.axes if mesh.axis_size(axis) == 1}
    return Layout(
        tuple(tuple(a for a in axes if a not in single) for axes in layout.dims),
        tuple(p for p in layout.partial if p[0] not in single),
        tuple(a for a in layout.varies if a not in single),
    )
