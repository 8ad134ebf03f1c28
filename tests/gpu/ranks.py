"""Two ranks on two GPUs, real ones or null devices, started from a test."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def _start(rank: int, port: int, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        job(rank, *args)
    finally:
        dist.destroy_process_group()


def on_ranks(job: Callable[..., None], *args: Any) -> None:
    """Run `job(rank, *args)` on each rank; raises what a rank raises."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(_start, (port, job, args), nprocs=RANKS)  # pyright: ignore[reportUnknownMemberType]
