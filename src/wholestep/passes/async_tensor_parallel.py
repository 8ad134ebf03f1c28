"""Async tensor parallelism: products and the collectives next to them in blocks, which overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, cast

from torch.fx import Graph, Node

from ..cost.simulation import Clock, run_all
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import copy_node, drop_dead, node_at, operands, redirect
from ..graph.storage import shared_operand
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..tuning import TUNING
from .base import InPlace
from .bucket import join_rows, part_of_gather
from .bucket_sizes import on_gpus
from .coalesced import coalesce, part_of_coalesced_gather
from .product_blocks import FUSED_PARTS, GatheredRows, ScatteredProducts, Site, Writer, factor, sites

WHOLE = 1


@dataclass(frozen=True)
class Cut:
    """A place where products may be cut: into one of `parts` blocks, the fastest first; `exact`: only if the result has
    the same bits. Places of equal `likeness` compute alike.
    """

    site: Site
    parts: tuple[int, ...]
    exact: bool
    likeness: Any

    @property
    def name(self) -> str:
        """The name of its collective."""
        return self.site.collective.name


Agree = Callable[[Sequence[Cut]], Mapping[str, int]]
"""From what a rank would cut to the number of blocks of each collective, by name, the same on all ranks."""


@dataclass(frozen=True)
class AsyncTensorParallel(InPlace):
    """Cuts products next to gathers and reduce-scatters of tensor parallelism into blocks, where that is simulated to
    gain: while one block is sent, another is multiplied.

    It works along the axes whose `TensorParallel(async_tp=...)` asks for it. The number of blocks of each place is the
    fastest of `TUNING.async_parts` on `hardware`; a place without a gain stays as it is. With "exact", `agree` is asked
    whether the kernels of this machine compute the same bits in blocks; without it, as in a plan, they are taken to.
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    agree: Agree | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("Overlap", "Reinplace")

    def change(self, local: LocalGraph) -> LocalGraph:
        """Cut the products of `local`."""
        modes = dict(local.async_axes)
        if not modes:
            return local
        cuts = self._proposed(local, modes)
        parts = {one.name: one.parts[0] for one in cuts} if self.agree is None else self.agree(cuts)
        place = {node: (i, 0) for i, node in enumerate(local.graph.nodes)}
        replaced = dict[Node, Node]()
        for cut in cuts:
            if cut.name in parts and replaced.keys().isdisjoint(cut.site.nodes):
                replaced |= _write(cut.site, parts[cut.name], local.graph, place)
        redirect(replaced)
        _sort(local.graph, place)
        drop_dead(local.graph)
        return local

    def _proposed(self, local: LocalGraph, modes: Mapping[str, str]) -> list[Cut]:
        known = dict[Any, tuple[int, ...]]()
        gpus, found = on_gpus(local, self.hardware), list[Cut]()
        whole = _sized_alike(local, tuple(modes))
        for site in sites(local.graph, tuple(modes)):
            axis = str(site.collective.args[-1])
            exact = modes[axis] == "exact"
            if exact and gpus and isinstance(site, ScatteredProducts):
                continue  # where a number is in a buffer decides in which order NCCL adds it up
            if exact and not whole.issuperset(factor(product, 1) for product in site.products):
                continue  # other ranks run kernels for other sizes
            if exact and not all(_is_dense(factor(product, place)) for product in site.products for place in (0, 1)):
                continue  # how far apart its rows are is not known
            key = _likeness(site)
            if key not in known:
                fuses = not exact and gpus and site.can_fuse and self.hardware.is_in_node(local.mesh, axis)
                known[key] = faster_parts(site, self.hardware, local.mesh, fuses)
            found += [Cut(site, known[key], exact, key)] if known[key] else []
        return found


def _sized_alike(local: LocalGraph, axes: Sequence[str]) -> set[Node]:
    """What is computed of parameters alone that `axes` divide evenly: it has one size on all ranks of an axis."""
    found = set[Node]()
    for (given, node), layout in zip(local.placeholders(), local.layouts, strict=True):
        divided = zip(given.meta.shape, layout.dims, strict=True)
        if given.role is Role.PARAM and all(_divides(size, dim, axes, local.mesh) for size, dim in divided):
            found.add(node)
    for node in local.graph.nodes:
        if node.op == "call_function" and (given := _sources(node)) and found.issuperset(given):
            found.add(node)
    return found


def _sources(node: Node) -> Sequence[Node]:
    """What `node` is computed of; of a piece of a bucket, the piece that was put there."""
    if node.target not in (part_of_gather, part_of_coalesced_gather):
        return operands(node)
    row = node
    while row.target not in (join_rows, coalesce):
        row = node_at(row, 0)
    return [cast("list[Node]", row.args[0])[cast(int, node.args[2])]]


def _is_dense(node: Node) -> bool:
    """True if `node` has known strides, or all elements of its storage, by rows or by columns."""
    if not meta.is_strided(node):
        return True
    source: Node | None = node
    while source is not None:
        if meta.one_tensor(source).numel != meta.one_tensor(node).numel:
            return False
        source = shared_operand(source)
    return True


def _divides(size: int, dim: Sequence[str], axes: Sequence[str], mesh: Mesh) -> bool:
    """True if the pieces of a dim are equal along `axes`, and along what cuts it before them."""
    last = max((i for i, axis in enumerate(dim) if axis in axes), default=-1)
    return size % prod(mesh.axis_size(axis) for axis in dim[: last + 1]) == 0


def faster_parts(site: Site, hardware: Hardware, mesh: Mesh, fuses: bool) -> tuple[int, ...]:
    """The numbers of blocks whose simulated time is shorter than that of no blocks, the fastest first. `fuses`:
    `FUSED_PARTS` is one of them.
    """
    several = (*TUNING.async_parts, FUSED_PARTS) if fuses else TUNING.async_parts
    times = {parts: site_us(site, parts, hardware, mesh) for parts in (WHOLE, *several)}
    return tuple(sorted((n for n in times if times[n] < times[WHOLE]), key=times.__getitem__))


def site_us(site: Site, parts: int, hardware: Hardware, mesh: Mesh) -> float:
    """Simulated microseconds of a place by itself, from the start of its first op to the end of its last."""
    clock = Clock(hardware, mesh)
    run_all(clock, alone(site, parts)[0].nodes)
    return clock.now


def alone(site: Site, parts: int) -> tuple[Graph, dict[Node, Node], dict[Node, Node]]:
    """A graph of one place in so many blocks. Also its placeholder of each node that is read, and what it computes of
    each node of the place that others read.
    """
    graph, given, made = Graph(), dict[Node, Node](), dict[Node, Node]()

    def read(node: Node) -> Node:
        if node in made:
            return made[node]
        if node not in given:
            with graph.inserting_before(next(iter(graph.nodes), None)):  # pyright: ignore[reportArgumentType]
                given[node] = graph.placeholder(node.name)
            meta.copy(node, given[node])
        return given[node]

    if parts != WHOLE:
        return graph, given, site.write(parts, Writer(graph, read))
    for node in site.nodes:
        made[node] = copy_node(node, graph, read)
    return graph, given, made


def _likeness(site: Site) -> Any:
    """Equal for places that take equal time."""

    def about(node: Node) -> Any:
        return tuple((meta.tensors(given), meta.is_strided(given)) for given in operands(node))

    calls = tuple((node.target, meta.tensors(node), about(node)) for node in site.nodes)
    return calls, site.collective.args[-1], isinstance(site, GatheredRows) and (site.is_read, site.dtype)


def _write(site: Site, parts: int, graph: Graph, place: dict[Node, tuple[int, int]]) -> dict[Node, Node]:
    """Append the blocks of `site`, and note where they belong; return what replaces nodes of it."""
    writer = Writer(graph)
    replaced = site.write(parts, writer)
    ends = place[site.collective][0], place[site.wait][0]
    for i, node in enumerate(writer.made):
        place[node] = ends[i >= writer.started], i + 1
    return replaced


def _sort(graph: Graph, place: Mapping[Node, tuple[int, int]]) -> None:
    """Put calls in the order of `place`, each behind what it reads."""
    output = next(node for node in graph.nodes if node.op == "output")
    placed = {node for node in graph.nodes if node.op == "placeholder"}
    calls = sorted((node for node in graph.nodes if node.op == "call_function"), key=place.__getitem__)
    for last in calls:
        todo = [last]
        while todo:
            node = todo[-1]
            missing = [given for given in operands(node) if given not in placed]
            todo += missing
            if not missing:
                todo.pop()
                if node not in placed:
                    placed.add(node)
                    output.prepend(node)
