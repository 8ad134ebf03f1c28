"""This rank's position in a DeviceMesh, as a wholestep Mesh with coordinate and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError
from ..mesh import Mesh, mesh_of_torch


@dataclass(frozen=True)
class MeshPosition:
    """This rank's coordinate on a mesh, and the process group of each axis."""

    mesh: Mesh
    coordinate: Mapping[str, int]
    groups: Mapping[str, dist.ProcessGroup]


def place(devices: DeviceMesh) -> MeshPosition:
    """Return this rank's place on `devices`. Axes of a mesh without names are called d0, d1, ...

    Refuses a mesh without this rank, and one with another order of ranks than a group: torch sorts these.
    """
    coordinate = devices.get_coordinate()
    if coordinate is None:
        problem, next_step = f"rank {dist.get_rank()} is not in {devices}", "call this on the ranks of the mesh only"
        raise MeshError(problem, "a rank of the mesh", next_step)
    sizes: list[int] = list(devices.mesh.shape)
    names = devices.mesh_dim_names or tuple(f"d{dim}" for dim in range(len(sizes)))
    groups = {name: devices.get_group(dim) for dim, name in enumerate(names)}
    for dim, name in enumerate(names):
        cut = tuple(slice(None) if d == dim else c for d, c in enumerate(coordinate))
        line = cast(list[int], devices.mesh[cut].tolist())
        counted = dist.get_process_group_ranks(groups[name])
        if line != counted:
            problem = f"ranks {line} along {name!r} of {devices}, but {counted} in its group"
            needed = "ranks in ascending order along each dim of the mesh"
            raise MeshError(problem, needed, "build the mesh with init_device_mesh")
    mesh = mesh_of_torch(tuple(names), tuple(sizes))
    return MeshPosition(mesh, dict(zip(names, coordinate, strict=True)), groups)


def along(devices: DeviceMesh, mesh_dim: int | str) -> tuple[str, MeshPosition]:
    """Return the name of a dim of the mesh, given by number or name, and this rank's place on the mesh of that dim."""
    placed = place(devices)
    names = placed.mesh.names
    if not isinstance(mesh_dim, str) and not -len(names) <= mesh_dim < len(names):
        raise MeshError(f"mesh_dim={mesh_dim} of {devices}", f"from 0 to {len(names) - 1}, or a name", "correct it")
    axis = mesh_dim if isinstance(mesh_dim, str) else names[mesh_dim]
    only = mesh_of_torch((axis,), (placed.mesh.axis_size(axis),))
    return axis, MeshPosition(only, {axis: placed.coordinate[axis]}, {axis: placed.groups[axis]})
