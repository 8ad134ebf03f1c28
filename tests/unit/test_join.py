"""What `join` sets on a job of GPUs; no GPU is needed to see it."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep import _torch
from wholestep.distributed import launch
from wholestep.errors import MeshError
from wholestep.mesh import Mesh


def test_nccl_has_the_timeout_of_the_step_and_its_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is set before the group is made, and what the user has set stays."""
    seen: dict[str, Any] = {"timeouts": []}

    def init(backend: str, device_id: torch.device) -> None:
        seen["backend"], seen["id"], seen["env"] = backend, device_id, dict(os.environ)
        monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)

    group = SimpleNamespace(group_name="0")
    world = type("World", (), {"group_name": "world"})()
    devices = SimpleNamespace(get_all_groups=lambda: [group], get_group=lambda name: group)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCH_FR_BUFFER_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    monkeypatch.setattr(launch.torch.cuda, "set_device", lambda device: seen.update(device=device))
    monkeypatch.setattr(launch.dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(launch.dist, "init_process_group", init)
    monkeypatch.setattr(launch.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(launch.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(launch, "init_device_mesh", lambda *args, **kwargs: devices)
    monkeypatch.setattr(launch.Rendezvous, "of_job", lambda *_: launch.Rendezvous(None, 0, 1, 0.0))
    monkeypatch.setattr(launch, "watch_peers", lambda timeout_s: seen.update(watched=timeout_s))
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    monkeypatch.setattr(_torch, "set_group_timeout", lambda of, timeout_s: seen["timeouts"].append((of, timeout_s)))

    launch.join(Mesh("dp=2"), "cuda", timeout_s=60.0, allowance_s=120.0)
    mine = torch.device("cuda", 1)
    assert (seen["backend"], seen["device"], seen["id"], seen["watched"]) == ("nccl", mine, mine, 60.0)
    assert (seen["env"]["TORCH_FR_BUFFER_SIZE"], seen["env"]["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("7", "1")
    assert seen["timeouts"] == [(world, 180.0), (group, 180.0)]  # the world's group and that of the axis

    seen["timeouts"].clear()
    launch.join(Mesh("dp=2"), "cuda", timeout_s=None)
    assert seen["timeouts"] == []


def test_every_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that never selects a device puts all models on the first one."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MeshError) as caught:
        launch.join(Mesh("dp=2"), "cuda:0")
    assert str(caught.value).splitlines() == [
        "the model of local rank 1 is on cuda:0",
        "  needed: cuda:1: ranks take GPUs in order (CUDA_VISIBLE_DEVICES sets another)",
        '  next: call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made',
    ]


def test_gloo_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the memory of a GPU as the host's."""
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(launch.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    with pytest.raises(MeshError, match="the process group communicates over gloo there"):
        launch.join(Mesh("dp=2"), "cuda:0")
