"""Meshes of a number of ranks: which factorizations are worth a look on a machine."""

from __future__ import annotations

from ..hardware.hardware import Hardware
from ..mesh import Axis, Mesh
from ..tuning import TUNING

_OPEN = "auto"
_NODES = TUNING.nodes_in_a_group


def is_open(mesh: Mesh) -> bool:
    """True for a mesh `"auto=N"`: N ranks, axes to be chosen."""
    return mesh.names == (_OPEN,)


def meshes(ranks: int, hardware: Hardware, tensor_axis: str | None = None) -> list[Mesh]:
    """Data parallelism outside, tensor parallelism inside a node (in parts of it that are equal), and for `hybrid` the
    data-parallel ranks in groups, `shard`, that fill one node or eight.
    """
    node = hardware.ranks_per_node
    node = min(node, ranks) if node else ranks
    found: list[Mesh] = []
    for inside in range(1, node + 1 if tensor_axis else 2):
        if ranks % inside or node % inside:
            continue
        last = [Axis(tensor_axis, inside)] if tensor_axis and inside > 1 else []
        rest = ranks // inside
        found.append(Mesh((*([Axis("dp", rest)] if rest > 1 or not last else []), *last)))
        for nodes in _NODES:
            group = node * nodes // inside
            if 1 < group < rest and rest % group == 0:
                found.append(Mesh((Axis("replicate", rest // group), Axis("shard", group), *last)))
    return found
