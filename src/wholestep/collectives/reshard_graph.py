"""Builds the local graph of one reshard."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.fx import Graph

from ..errors import LayoutError
from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.meta import TensorMeta, contiguous
from ..graph.verify import check_local_graph
from ..hardware.presets import one_host
from ..layout import Layout
from ..mesh import Mesh
from ..partition.collectives import Emitter
from ..reshard import Path, reshard


@lru_cache(maxsize=4096)
def program(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: str, mesh: Mesh
) -> LocalGraph:
    """Return the program that reshards a tensor of global `shape` from `source` to `target`: one input, one result.

    The input is contiguous. The program pads uneven shards.

    Raises:
        LayoutError: a layout does not fit the shape or the mesh, or there is no path between them.
    """
    path = route(source, target, shape, dtype, mesh)
    whole = TensorMeta(shape, (), dtype, device)
    graph = Graph()
    given = graph.placeholder("tensor")
    meta.set_tensors(given, (contiguous(path.layouts[0].local_shape(shape, mesh, mesh.coordinate(0)), whole),))
    _, finish = Emitter(graph, mesh).start(path, given, whole)
    graph.output((finish(),))
    given_input = Input("tensor", Role.BATCH, contiguous(shape, whole))
    local = LocalGraph(graph, mesh, (given_input,), (Output("result", ""),), (path.layouts[0],))
    check_local_graph(local)
    return local


def route(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> Path:
    """Return the cheapest path from `source` to `target`, without steps along axes of one rank.

    Raises:
        LayoutError: see `program`.
    """
    for layout in (source, target):
        layout.check(shape, mesh)
    start, end = without_single(source, mesh), without_single(target, mesh)
    averages = [axis for axis, op in start.partial if op == "avg" and not dtype.is_floating_point]
    if averages and not dtype.is_complex:
        raise LayoutError(
            f"an average of {dtype} over {averages[0]!r}", "a floating-point dtype", "convert it, or reduce by sum"
        )
    made = [axis for axis, _ in end.partial if start.state(axis).kind == "S"]
    if made:
        raise LayoutError(
            f"a tensor laid out as {source} cannot become {target}: {made[0]!r} shards it",
            "a partial or replicated tensor along this axis",
            "gather it first: zeros on all ranks except one then make it a partial sum",
        )
    return reshard(start, end, shape, dtype.itemsize, mesh, one_host())


def without_single(layout: Layout, mesh: Mesh) -> Layout:
    """Return `layout` without the axes of one rank, along which a tensor is always replicated."""
    single = {axis for axis in layout.axes if mesh.axis_size(axis) == 1}
    return Layout(
        tuple(tuple(a for a in axes if a not in single) for axes in layout.dims),
        tuple(p for p in layout.partial if p[0] not in single),
        tuple(a for a in layout.varies if a not in single),
    )
