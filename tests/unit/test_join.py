"""What `join` sets on a job of GPUs; no GPU is needed to see it."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from wholestep import _torch
from wholestep.distributed import launch
from wholestep.mesh import Mesh


def test_nccl_has_the_timeout_of_the_step_and_its_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is set before the group is made, and what the user has set stays."""
    seen: dict[str, Any] = {"timeouts": []}

    def init(backend: str) -> None:
        seen["backend"], seen["env"] = backend, dict(os.environ)
        monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)

    group = SimpleNamespace(group_name="0")
    devices = SimpleNamespace(get_all_groups=lambda: [group], get_group=lambda name: group)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCH_FR_BUFFER_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    monkeypatch.setattr(launch.torch.cuda, "set_device", lambda index: seen.update(device=index))
    monkeypatch.setattr(launch.dist, "init_process_group", init)
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(launch.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(launch, "init_device_mesh", lambda *args, **kwargs: devices)
    monkeypatch.setattr(launch, "watch_peers", lambda timeout_s: seen.update(watched=timeout_s))
    monkeypatch.setattr(launch.atexit, "register", lambda function: None)
    monkeypatch.setattr(_torch, "set_group_timeout", lambda of, timeout_s: seen["timeouts"].append((of, timeout_s)))

    launch.join(Mesh("dp=2"), "cuda", timeout_s=60.0, allowance_s=120.0)
    assert (seen["backend"], seen["device"], seen["watched"]) == ("nccl", 1, 60.0)
    assert (seen["env"]["TORCH_FR_BUFFER_SIZE"], seen["env"]["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("7", "1")
    assert seen["timeouts"][-1] == (group, 180.0)
    assert len(seen["timeouts"]) == 2  # the world's group and that of the axis

    seen["timeouts"].clear()
    launch.join(Mesh("dp=2"), "cuda", timeout_s=None)
    assert seen["timeouts"] == []
