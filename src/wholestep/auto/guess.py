"""About what a plan takes, from its parameters alone: in which order plans are looked at, never which one wins."""

from __future__ import annotations

from ..graph.graph import Role, TrainGraph
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..plan.strategy import Strategies


def guess_us(graph: TrainGraph, mesh: Mesh, strategies: Strategies, hardware: Hardware, computing_us: float) -> float:
    """Microseconds of a step, the shorter of arithmetic (`computing_us` on one rank) and communication half hidden."""
    together = [a for a in strategies.axes(mesh) if strategies.data is None or a not in strategies.data.axes(mesh)]
    ranks = 1
    for axis in together:
        ranks *= mesh.axis_size(axis)
    computed = computing_us / ranks
    whole = sum(i.meta.size_bytes for i in graph.inputs if i.role is Role.PARAM) / ranks
    sent = sum(hardware.collective_us(*one) for one in _sent(mesh, strategies, whole))
    return max(computed, sent) + 0.5 * min(computed, sent)


def _sent(mesh: Mesh, strategies: Strategies, size: float) -> list[tuple[str, float, Mesh, str]]:
    """The collectives of a data-parallel step, each kind along each axis at once."""
    data = strategies.data
    axes = [a for a in data.axes(mesh) if mesh.axis_size(a) > 1] if data is not None else []
    if data is None or not axes:
        return []
    if not data.kind.shards_state:
        return [("all_reduce", size, mesh, axis) for axis in axes]
    cut = axes[-1:] if data.kind.grouped else axes
    kinds = ["reduce_scatter", "all_gather", *(["all_gather"] if data.reshard_after_forward else [])]
    found = list[tuple[str, float, Mesh, str]]()
    for axis in reversed(cut):
        found += [(kind, size, mesh, axis) for kind in kinds]
        size /= mesh.axis_size(axis)
    rest = axes[:-1] if data.kind.grouped else []
    return [*found, *(("all_reduce", size, mesh, axis) for axis in rest)]
