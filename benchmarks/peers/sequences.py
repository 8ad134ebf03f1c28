"""Context parallelism by hand over DDP: each rank has a part of every sequence. Ranks meet in attention."""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as exchange
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from . import models
from .job import Job


def over_tokens(model: nn.Module, job: Job) -> tuple[nn.Module, Optimizer, Any]:
    """The model with its attention replaced, its optimizer, and a step that takes whole sequences."""
    length = job.config.context // job.world
    begin = job.rank * length
    attend = _by_gathering if job.spec.has("gather") else _by_heads
    cast(models.GPT, model).first = begin
    for block in models.blocks(model):
        cast(models.Block, block).attend = attend
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        part = slice(begin, begin + length)
        loss = models.train_step(model, optimizer, x[:, part].contiguous(), y[:, part].contiguous())
        dist.all_reduce(loss)
        return loss / job.world

    return wrapped, models.adamw(model, job.config), step


def _by_gathering(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Keys and values (b, h, t, d) of all ranks, in one message; each query sees those up to its own place."""
    assert is_causal, "as the models call it"
    pieces = exchange.all_gather(torch.stack([k, v]))
    keys, values = torch.cat(cast(list[Tensor], pieces[: dist.get_rank() + 1]), dim=3)
    seen = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """All tokens of some heads: queries, keys and values in one exchange (b, h, t, d), the result in another."""
    world = dist.get_world_size()
    sent = torch.stack([q, k, v]).chunk(world, dim=2)
    received = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in sent]
    q, k, v = torch.cat(exchange.all_to_all(received, [part.contiguous() for part in sent]), dim=3)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).chunk(world, dim=2)
    received = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in mixed]
    return torch.cat(exchange.all_to_all(received, [part.contiguous() for part in mixed]), dim=1)
