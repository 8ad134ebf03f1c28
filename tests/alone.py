"""One rank of a mesh run by itself: collectives of torch's fake process group do nothing but make their results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholestep as ws
from tests.live_bytes import peak_of
from wholestep.backend.eager import eager
from wholestep.backend.rank_binding import bind
from wholestep.graph.graph import Input, Role
from wholestep.layout import Layout


@contextmanager
def fake_group(world: int) -> Iterator[str]:
    """The name of a process group of so many ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def predicted_and_measured(local: ws.LocalGraph, group: str, exchange: bool) -> tuple[ws.PeakMemory, int]:
    """The peak of the program of the first rank, of a stage its first: as `peak_memory` says, and in bytes of tensors
    while it runs.
    """
    coordinate = {axis.name: 0 for axis in local.mesh.axes}
    if local.stage is not None:
        coordinate[local.stage_axis] = local.stage
    groups = dict.fromkeys(coordinate, group)
    graph = bind(local, coordinate, groups, exchange, runs=False)
    run = eager(bind(local, coordinate, groups, exchange))
    inputs = [_input(i, layout, local, coordinate) for i, layout in zip(local.inputs, local.layouts, strict=True)]
    run(inputs)  # the first call checks strides
    return ws.peak_memory(replace(local, graph=graph)), peak_of(run, inputs)


def _input(given: Input, layout: Layout, local: ws.LocalGraph, coordinate: dict[str, int]) -> Tensor:
    if given.role is Role.HYPER:
        return torch.zeros((), dtype=torch.float64)
    if given.role is Role.CONST:
        return local.constants[given.name]
    if not layout.is_held_at(coordinate):
        return torch.ones(0, dtype=given.meta.dtype)
    shape = layout.local_shape(given.meta.shape, local.mesh, coordinate)
    return torch.ones(shape, dtype=given.meta.dtype)
