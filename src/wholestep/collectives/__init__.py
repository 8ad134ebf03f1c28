"""Collectives along the dims of a DeviceMesh, and reshards between layouts, on process groups.

Example:
    >>> rows = collectives.shard_dim_scatter(torch.ones(11, 6), 0, devices, "dp")
"""

from .mesh_dim import mesh_broadcast, mesh_scatter, shard_dim_scatter
from .padding import pad, split, unpad
from .reshards import reshard, shard_dim_all_gather, shard_dim_alltoall, shard_dim_reduce_scatter

__all__ = [
    "mesh_broadcast", "mesh_scatter", "pad", "reshard", "shard_dim_all_gather", "shard_dim_alltoall",
    "shard_dim_reduce_scatter", "shard_dim_scatter", "split", "unpad",
]  # fmt: skip
