"""Where this rank stands in a DeviceMesh, in wholestep's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError
from ..mesh import Axis, Mesh


@dataclass(frozen=True)
class MeshPosition:
    """This rank's coordinate on a mesh and the process group of each of its axes."""

    mesh: Mesh
    coordinate: Mapping[str, int]
    groups: Mapping[str, dist.ProcessGroup]

    def along(self, axis: str) -> MeshPosition:
        """The same rank on the mesh that has this axis alone."""
        only = Mesh((Axis(axis, self.mesh.axis_size(axis)),))
        return MeshPosition(only, {axis: self.coordinate[axis]}, {axis: self.groups[axis]})


def place(devices: DeviceMesh) -> MeshPosition:
    """This rank on `devices`. Axes of a mesh without names are called d0, d1 and so on.

    Raises:
        MeshError: this rank is no part of the mesh, or a group of the mesh counts its ranks in another order than the
            mesh does (torch sorts the ranks of a group).
    """
    found = devices.get_coordinate()
    if found is None:
        raise MeshError(
            f"rank {dist.get_rank()} is no part of {devices}",
            "a rank of the mesh",
            "call this on the ranks of the mesh only",
        )
    sizes: list[int] = list(devices.mesh.shape)
    names = devices.mesh_dim_names or tuple(f"d{dim}" for dim in range(len(sizes)))
    groups = {name: devices.get_group(dim) for dim, name in enumerate(names)}
    for dim, name in enumerate(names):
        cut = tuple(slice(None) if d == dim else c for d, c in enumerate(found))
        line = cast(list[int], devices.mesh[cut].tolist())
        counted = dist.get_process_group_ranks(groups[name])
        if line != counted:
            raise MeshError(
                f"ranks {line} along {name!r} of {devices}, whose group counts them {counted}",
                "ranks in rising order along each dim of the mesh",
                "build the mesh with init_device_mesh",
            )
    mesh = Mesh(tuple(Axis(name, size) for name, size in zip(names, sizes, strict=True)))
    return MeshPosition(mesh, dict(zip(names, found, strict=True)), groups)


def axis_of(here: MeshPosition, devices: DeviceMesh, mesh_dim: int | str) -> str:
    """The name of a dim of the mesh, given by number or name.

    Raises:
        MeshError: there is no such dim.
    """
    names = here.mesh.names
    if isinstance(mesh_dim, str):
        here.mesh.axis_size(mesh_dim)
        return mesh_dim
    if not -len(names) <= mesh_dim < len(names):
        raise MeshError(f"mesh_dim={mesh_dim} of {devices}", f"from 0 to {len(names) - 1}, or a name", "correct it")
    return names[mesh_dim]
