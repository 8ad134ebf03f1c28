"""What the cores and the link leave of a step when nothing waits for communication: the floor, and as many bytes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from . import models


@dataclass
class BesideTheWire:
    """The floor's step with collectives of `parameter_bytes` in all, `bucket_bytes` each, that it does not wait for.

    They start with the step, or with its backward if `late`: gradients are not there before. They are all-reduces, or
    where ranks keep `parts`, exchanges and gathers, which send as much.
    """

    parameter_bytes: int
    bucket_bytes: int
    late: bool = False
    parts: bool = False

    def __post_init__(self) -> None:
        count = max(round(self.parameter_bytes / self.bucket_bytes), 1)
        ranks = dist.get_world_size()
        numel = -(-self.parameter_bytes // (4 * count * ranks)) * ranks
        self.wholes = [torch.ones(numel) for _ in range(count)]
        self.others = [torch.empty(numel) for _ in range(count)] if self.parts else []
        self.pieces = [torch.ones(numel // ranks) for _ in range(count)] if self.parts else []

    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """One step; returns the loss."""
        works = [] if self.late else self._start()
        optimizer.zero_grad()
        loss = models.loss_of(model, x, y)
        works += self._start() if self.late else []
        loss.backward()
        optimizer.step()
        for work in works:
            work.wait()
        return loss.detach()

    def _start(self) -> list[Any]:
        if not self.parts:
            return [dist.all_reduce(whole, async_op=True) for whole in self.wholes]
        works = list[Any]()
        for whole, other, piece in zip(self.wholes, self.others, self.pieces, strict=True):
            works.append(dist.all_to_all_single(other, whole, async_op=True))
            works.append(dist.all_gather(list(whole.chunk(dist.get_world_size())), piece, async_op=True))
        return works
