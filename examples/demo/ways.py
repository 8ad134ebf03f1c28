"""The ways to run one training step that the demo compares, all from the same weights and optimizer state."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import wholestep as ws

from .model import GPT
from .options import Options
from .step import new_optimizer, schedule, train_step

ONE_PROCESS, DDP, FSDP2, WHOLESTEP = "one process", "DDP", "FSDP2", "wholestep"


@dataclass
class Way:
    """One way to train. `run(tokens, targets)` is a step; with `whole_batch` only rank 0 runs it, on all rows."""

    name: str
    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR
    run: Callable[[Tensor, Tensor], Tensor]
    threads: int = 1
    whole_batch: bool = False
    seconds: list[float] = field(default_factory=list[float])
    loss: float = 0.0


@dataclass(frozen=True)
class Start:
    """Whole weights and optimizer state after `done` steps of `options.steps`, equal on all ranks."""

    options: Options
    model: GPT
    optimizer: AdamW
    done: int

    def copy(self) -> tuple[GPT, AdamW, LambdaLR]:
        """A model, an optimizer and a scheduler in the same state."""
        model = copy.deepcopy(self.model)
        optimizer = new_optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # it would share the state
        return model, optimizer, schedule(optimizer, self.options.steps, self.done)


def compiled(start: Start, progress: Callable[[str, str, float], None] | None) -> tuple[Way, "ws.CompiledStep"]:
    """The step as written, compiled by wholestep for the mesh."""
    model, optimizer, scheduler = start.copy()
    options = start.options
    step = ws.compile(
        train_step,
        parallel=ws.DataParallel(options.style),
        mesh=ws.Mesh(options.mesh),
        backend=options.backend,
        measure=True,
        progress=progress,
    )
    return Way(WHOLESTEP, model, optimizer, scheduler, partial(step, model, optimizer)), step


def one_process(start: Start) -> Way:
    """The step as written, on the whole batch, with as many threads as there are ranks."""
    model, optimizer, scheduler = start.copy()
    run = partial(train_step, model, optimizer)
    return Way(ONE_PROCESS, model, optimizer, scheduler, run, start.options.ranks, whole_batch=True)


def ddp(start: Start) -> Way:
    """torch.nn.parallel.DistributedDataParallel."""
    model, optimizer, scheduler = start.copy()
    return Way(DDP, model, optimizer, scheduler, partial(train_step, DistributedDataParallel(model), optimizer))


def fsdp2(start: Start) -> Way:
    """torch.distributed.fsdp.fully_shard of each block, then of the whole model."""
    model, whole, _ = start.copy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[cast(nn.Parameter, parameter)]: state for parameter, state in whole.state.items()}
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = new_optimizer(model)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            key: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value
            for key, value in states.get(name, {}).items()
        }
    scheduler = schedule(optimizer, start.options.steps, start.done)
    return Way(FSDP2, model, optimizer, scheduler, partial(train_step, model, optimizer))


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name; every rank calls this where they are sharded."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in values.items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference between two sets of parameters of equal names."""
    assert one.keys() == other.keys(), f"{sorted(one)} against {sorted(other)}"
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
