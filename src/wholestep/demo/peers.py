"""The ways of running one training step that the demo compares, all started from the same weights and state."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import wholestep as ws

from .model import GPT
from .settings import Settings
from .train import new_optimizer, schedule, train_step

ONE_PROCESS, DDP, FSDP2, WHOLESTEP = "one process", "DDP", "FSDP2", "wholestep"


@dataclass
class Peer:
    """One way of training. `run(tokens, targets)` is a step; `whole_batch` peers run on rank 0 alone."""

    name: str
    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR
    run: Callable[[Tensor, Tensor], Tensor]
    whole_batch: bool = False
    seconds: list[float] = field(default_factory=list[float])
    loss: float = 0.0


@dataclass(frozen=True)
class Start:
    """Whole weights and optimizer state, equal on all ranks, after `done` steps."""

    model: GPT
    optimizer: AdamW
    done: int

    def copy(self, settings: Settings) -> tuple[GPT, AdamW]:
        """A model and an optimizer of their own, in the same state."""
        model = copy.deepcopy(self.model)
        optimizer = new_optimizer(model, settings)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # it would share the state
        return model, optimizer


def one_process(start: Start, settings: Settings) -> Peer:
    """The step as written, on the global batch, with as many threads as there are ranks."""
    model, optimizer = start.copy(settings)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(settings.ranks)
        try:
            return train_step(model, optimizer, tokens, targets)
        finally:
            torch.set_num_threads(before)

    return Peer(ONE_PROCESS, model, optimizer, schedule(optimizer, settings, start.done), run, whole_batch=True)


def ddp(start: Start, settings: Settings) -> Peer:
    """torch.nn.parallel.DistributedDataParallel."""
    model, optimizer = start.copy(settings)
    wrapped = DistributedDataParallel(model)
    return Peer(
        DDP,
        model,
        optimizer,
        schedule(optimizer, settings, start.done),
        lambda tokens, targets: train_step(wrapped, optimizer, tokens, targets),
    )


def fsdp2(start: Start, settings: Settings) -> Peer:
    """torch.distributed.fsdp.fully_shard, each block and then the whole model."""
    model, loaded = start.copy(settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[cast(nn.Parameter, parameter)]: state for parameter, state in loaded.state.items()}
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = new_optimizer(model, settings)
    for name, parameter in model.named_parameters():
        if name in states:
            optimizer.state[parameter] = {
                key: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value
                for key, value in states[name].items()
            }
    return Peer(
        FSDP2,
        model,
        optimizer,
        schedule(optimizer, settings, start.done),
        lambda tokens, targets: train_step(model, optimizer, tokens, targets),
    )


def wholestep(
    start: Start, settings: Settings, progress: Callable[[str, str, float], None] | None
) -> tuple[Peer, "ws.CompiledStep"]:
    """The step as written, compiled for the mesh."""
    model, optimizer = start.copy(settings)
    backend: Any = settings.backend
    style: Any = settings.style
    step = ws.compile(
        train_step,
        parallel=ws.DataParallel(style),
        mesh=ws.Mesh(settings.mesh),
        backend=backend,
        measure=True,
        progress=progress,
    )
    peer = Peer(
        WHOLESTEP,
        model,
        optimizer,
        schedule(optimizer, settings, start.done),
        lambda tokens, targets: step(model, optimizer, tokens, targets),
    )
    return peer, step
