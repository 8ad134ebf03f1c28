"""Joins the job this process was started in: process group, device, device mesh. Any c10d launcher will do."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import _torch
from ..backend.recordable import transport
from ..errors import MeshError
from ..mesh import Mesh
from .activity import ACTIVITY
from .peers import leave_peers, watch_peers
from .rendezvous import Rendezvous

_LAST_MOMENT_S = 0.05
_MOST_OWN = 4  # steps with groups of their own
_FLIGHT_RECORDER = {  # of NCCL: the last collectives of each rank, written where the watchdog ends a process
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_devices: WeakKeyDictionary[Any, dict[Any, list[DeviceMesh]]] = WeakKeyDictionary()  # by the job's group


@dataclass(frozen=True)
class World:
    """This rank's place: the mesh, its coordinate, and the process groups by axis (none in a world of one), and by
    channel where channels between stages have their own (`open_channels`). It computes on `device`; state rests on
    `home`, on `devices_of_state`. `timeout_s`: after which the watchdog of a group ends the process, None for torch's.
    """

    mesh: Mesh
    rank: int
    device: str
    devices: DeviceMesh | None
    devices_of_state: DeviceMesh | None
    groups: dict[str, str]
    home: str
    timeout_s: float | None = None

    @property
    def coordinate(self) -> dict[str, int]:
        """Position of this rank along each axis."""
        return self.mesh.coordinate(self.rank)


def job() -> tuple[int, int]:
    """This rank and the number of ranks, also before there is a process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ensure_group(device: str | None) -> None:
    """Make the process group from the launcher's RANK and WORLD_SIZE, unless there is one or no launcher. Where
    `device` is not known yet, the group is for CPUs and GPUs.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        gpus = torch.cuda.is_available() if device is None else device.startswith("cuda")
        options: dict[str, Any] = {}
        if gpus:
            for name, value in _FLIGHT_RECORDER.items():
                os.environ.setdefault(name, value)
            options["device_id"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            _check_gpu(device)
            torch.cuda.set_device(options["device_id"])
        dist.init_process_group("gloo" if not gpus else "nccl" if device else "cpu:gloo,cuda:nccl", **options)
    if dist.is_initialized():
        atexit.unregister(_let_go)
        atexit.register(_let_go)  # the group's threads must end before the interpreter does


def watch(timeout_s: float | None) -> None:
    """Watch ranks from now on, where there is a group."""
    if dist.is_initialized():
        ensure_group(None)
        watch_peers(timeout_s)


def join(
    mesh: Mesh | None, device: str, home: str | None = None, timeout_s: float | None = None, allowance_s: float = 120.0,
    on_wait: Callable[[list[int]], None] | None = None,
) -> World:  # fmt: skip
    """Use the process group there is, or make it from the launcher's RANK and WORLD_SIZE; else a world of one. State
    rests on `home`, by default on `device` too. Ranks are watched, with `timeout_s`; one may come, or compile, for
    `allowance_s`. Raises MeshError: the mesh does not have as many ranks as the job. RankMismatchError: a rank is late.
    """
    ensure_group(device)
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = mesh or Mesh(f"dp={size}")
    if mesh.size != size:
        problem = f"mesh {mesh} has {mesh.size} ranks, the job has {size}"
        next_step = f'give mesh="dp={size}", or start {mesh.size} processes (torchrun --nproc-per-node {mesh.size})'
        raise MeshError(problem, f"axis sizes whose product is {size}", next_step)
    if not dist.is_initialized():
        return World(mesh, 0, device, None, None, {}, home or device)
    _check_gpu(device)
    _check_library(device)
    watch_peers(timeout_s)
    ranks = Rendezvous.of_job(allowance_s, on_wait)
    ranks.gather(ranks.next_label("join"), True, "the first call of a step", bool)
    with ACTIVITY.waiting("the making of process groups"):
        of_state, devices = (_devices_of(mesh, torch.device(device).type, most) for most in (1, _MOST_OWN))
    patience_s = timeout_s + allowance_s if timeout_s is not None and device.startswith("cuda") else None
    if patience_s is not None:
        for group in (dist.group.WORLD, *devices.get_all_groups()):
            _torch.set_group_timeout(group, patience_s)
    groups: dict[str, str] = {axis.name: devices.get_group(axis.name).group_name for axis in mesh.axes}
    return World(mesh, dist.get_rank(), device, devices, of_state, groups, home or device, patience_s)


def _devices_of(mesh: Mesh, kind: str, most: int) -> DeviceMesh:
    """The ranks with groups for a step of its own, else a collective of another step, or of the script, is taken for
    one of it; or, with `most` 1, for all state: a script calls `full_tensor()`. Each group over gloo has threads and
    sockets, so that steps after `most` share these groups in turn; those over NCCL are dear, and shared by all.
    """
    backends: dict[Any, Any] = {name: "gloo" for name in mesh.names if transport(kind) == "gloo"}
    most = most if backends else 1
    meshes = _devices.setdefault(dist.group.WORLD, {}).setdefault((str(mesh), kind, most), [])
    if len(meshes) < most:
        sizes = tuple(axis.size for axis in mesh.axes)
        meshes.append(init_device_mesh(kind, sizes, mesh_dim_names=mesh.names, backend_override=backends))
    else:
        meshes.append(meshes.pop(0))
    return meshes[-1]


def _check_gpu(device: str | None) -> None:
    """Each rank of a host has a GPU of its own, by LOCAL_RANK."""
    index = torch.device(device).index if device is not None and device.startswith("cuda") else None
    rank, ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if index is not None and index != rank and 1 < ranks <= torch.cuda.device_count():
        text = f"the model of local rank {rank} is on {device}"
        next_step = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made'
        raise MeshError(text, f"cuda:{rank}: ranks take GPUs in order (CUDA_VISIBLE_DEVICES sets another)", next_step)


def _check_library(device: str) -> None:
    """Gloo reads the memory of a GPU as if it were the host's."""
    if device.startswith("cuda") and "cuda:gloo" in dist.get_backend_config().split(","):
        problem = f"the step runs on {device}, and the process group communicates over gloo there"
        next_step = 'call init_process_group("nccl"), or none: wholestep makes the group'
        raise MeshError(problem, "NCCL, with a GPU for each rank", next_step)


def _let_go() -> None:
    """Leave the job, and let the group's threads end: a thread that lets go of a tensor while the interpreter is shut
    down aborts the process ("terminate called without an active exception"). A group lives as long as meshes do, those
    of a script's own globals too, also where another library has ended it; so its threads get a moment.
    """
    leave_peers()
    if dist.is_initialized():
        dist.destroy_process_group()
    _torch.forget_shardings()
    gc.collect()
    time.sleep(_LAST_MOMENT_S)
