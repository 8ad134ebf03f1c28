"""Async tensor parallelism: products fused with the gather before them, or with the reduce-scatter behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch.fx import Graph, Node

from ..cost.simulation import Clock, run_all
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import cone, copy_graph, copy_node, drop_dead, operands, redirect
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from .base import InContext
from .bucket_sizes import on_gpus
from .context import Choice, Context
from .fusible_products import Site, Writer, sites

FUSED: Choice[tuple[str, ...]] = Choice(
    "fused", "which collectives are fused with products", tuple[str, ...],
    lambda first, by_rank: tuple(name for name in first if all(name in names for names in by_rank)),
)  # fmt: skip
"""Names of the collectives that all ranks would fuse."""


@dataclass(frozen=True)
class AsyncTensorParallel(InContext):
    """Fuses products with gathers and reduce-scatters of tensor parallelism, on GPUs of one node, where that is
    simulated to gain: while one rank's block is copied, another is multiplied.

    It works along the axes whose `TensorParallel(async_tp=True)` asks for it. Ranks fuse what all of them
    would: what is faster on `hardware`.
    """

    hardware: Hardware = field(default_factory=Hardware.default)

    must_precede: ClassVar[tuple[str, ...]] = ("Overlap", "Reinplace")
    keeps_nothing: ClassVar[bool] = True

    def within(self, local: LocalGraph, context: Context) -> LocalGraph:
        """Fuse products of `local`."""
        axes = [axis for axis in local.async_axes if self.hardware.is_in_node(local.mesh, axis)]
        if not axes or not on_gpus(local, self.hardware):
            return local
        local = replace(local, graph=copy_graph(local.graph))
        faster = {site.collective.name: site for site in faster_sites(local, axes, self.hardware)}
        decide = context.decide
        agreed = faster.keys() if decide is None else decide(FUSED, lambda: tuple(faster), local)
        position = {node: (i, 0) for i, node in enumerate(local.graph.nodes)}
        replaced = dict[Node, Node]()
        for name, site in faster.items():
            if name in agreed and replaced.keys().isdisjoint(site.nodes):
                writer = Writer(local.graph)
                replaced |= site.fused(writer)
                position |= {node: (position[site.wait][0], i + 1) for i, node in enumerate(writer.appended)}
        redirect(replaced)
        _sort(local.graph, position)
        drop_dead(local.graph)
        return local


def faster_sites(local: LocalGraph, axes: Sequence[str], hardware: Hardware) -> Iterator[Site]:
    """The places along `axes` that are simulated to be faster as one op."""
    gains = dict[Any, bool]()
    for site in sites(local.graph, axes):
        key = _likeness(site)
        if key not in gains:
            gains[key] = site_us(site, True, hardware, local.mesh) < site_us(site, False, hardware, local.mesh)
        if gains[key]:
            yield site


def site_us(site: Site, fused: bool, hardware: Hardware, mesh: Mesh) -> float:
    """Simulated microseconds of a place by itself, from the start of its first op to the end of its last."""
    graph, copies = Graph(), dict[Node, Node]()

    def read(node: Node) -> Node:
        if node not in copies:
            with graph.inserting_before(next(iter(graph.nodes), None)):  # pyright: ignore[reportArgumentType]
                copies[node] = graph.placeholder(node.name)
            meta.copy(node, copies[node])
        return copies[node]

    if fused:
        site.fused(Writer(graph, read))
    else:
        for node in site.nodes:
            copies[node] = copy_node(node, graph, read)
    clock = Clock(hardware, mesh)
    run_all(clock, graph.nodes)
    return clock.now


def _likeness(site: Site) -> Any:
    """Equal for places that take equal time."""

    def about(node: Node) -> Any:
        return tuple((meta.tensors(operand), meta.is_strided(operand)) for operand in operands(node))

    calls = tuple((node.target, meta.tensors(node), about(node)) for node in site.nodes)
    return calls, site.collective.args[-1], site.is_read


def _sort(graph: Graph, position: Mapping[Node, tuple[int, int]]) -> None:
    """Put calls in the order of `position`, each behind what it reads."""
    output = next(node for node in graph.nodes if node.op == "output")
    placed = {node for node in graph.nodes if node.op == "placeholder"}
    calls = sorted((node for node in graph.nodes if node.op == "call_function"), key=position.__getitem__)
    for last in calls:
        for node in cone(last, placed):
            placed.add(node)
            output.prepend(node)
