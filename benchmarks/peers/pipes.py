"""Pipelines of torch.distributed.pipelining, whose stages and schedules are written by hand. Imports no wholestep."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.optim import Optimizer

from .job import Job
from .models import GPT, adamw

CPU = torch.device("cpu")
SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
Parts = tuple[nn.Module, Optimizer, Callable[..., Tensor]]
"""A model, its optimizer, and the step to call them with."""


class Part(nn.Module):
    """The layers of one stage of a GPT. The first takes bytes, the last returns logits."""

    def __init__(self, model: GPT, number: int, count: int) -> None:
        super().__init__()
        layers = list(model.blocks)
        if count > len(layers):
            raise ValueError(f"{count} stages of {len(layers)} layers: choose a larger model, or fewer ranks")
        self.first, self.last = number == 0, number == count - 1
        start, end = (len(layers) * at // count for at in (number, number + 1))
        self.blocks = nn.ModuleList(layers[start:end])
        if self.first:
            self.bytes, self.positions = model.bytes, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """What this stage computes."""
        if self.first:
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def torch_pipe(model: nn.Module, job: Job) -> Parts:
    """Stages with as many layers each. The last rank knows the loss; others return none."""
    assert isinstance(model, GPT), "pipelines are of a GPT"
    kind = next(name for name in SCHEDULES if job.spec.has(name))
    chunks = 2 if kind in ("interleaved", "zbv") else 1
    count = job.world * chunks
    numbers = [job.rank + chunk * job.world for chunk in range(chunks)]
    if kind == "zbv":
        numbers = [job.rank, count - 1 - job.rank]
    parts = [Part(model, number, count) for number in numbers]
    stages = [pipelining.PipelineStage(part, number, count, CPU) for part, number in zip(parts, numbers, strict=True)]
    schedule = SCHEDULES[kind](stages[0] if chunks == 1 else stages, job.spec.pieces, loss_fn=_loss)
    begins, ends = (any(getattr(part, end) for part in parts) for end in ("first", "last"))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([x] if begins else []), **({"target": y, "losses": losses} if ends else {}))
        optimizer.step()
        return torch.stack(losses).detach().mean() if losses else torch.tensor(math.nan)

    held = nn.ModuleList(parts)
    return held, adamw(held, job.config), step


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())
