"""Context parallelism by hand over DDP: each rank has a part of every sequence. Ranks meet in attention."""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as exchange
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from . import models
from .job import Job

ring: Any = _attention
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def over_tokens(model: nn.Module, job: Job) -> tuple[nn.Module, Optimizer, Any]:
    """The model with its attention replaced, its optimizer, and a step that takes whole sequences."""
    ring = job.spec.has("ring")
    attend = _by_ring if ring else _by_gathering if job.spec.has("gather") else _by_heads
    pieces = torch.arange(job.config.context).chunk(2 * job.world if ring else job.world)
    places = torch.cat([pieces[job.rank], pieces[-1 - job.rank]]) if ring else pieces[job.rank]
    cast(models.GPT, model).places = places
    for block in models.blocks(model):
        cast(models.Block, block).attend = attend
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = models.train_step(model, optimizer, x[:, places], y[:, places])
        dist.all_reduce(loss)
        return loss / job.world

    return wrapped, models.adamw(model, job.config), step


def _by_ring(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """What `torch.distributed.tensor.experimental.context_parallel` runs, which has it for kernels of GPUs alone."""
    assert is_causal, "as the models call it"
    return _Ring.apply(q, k, v)  # pyright: ignore[reportUnknownVariableType]


class _Ring(torch.autograd.Function):
    """A rank has an early piece of the tokens and the late one that mirrors it. Queries, keys, values (b, h, t, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The merged results for the keys of all ranks."""
        out, sums, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, _FORWARD, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Of queries, keys and values."""
        args = dist.group.WORLD, 2, _BACKWARD, grad, "grad_out", *ctx.saved_tensors, True
        return ring._templated_ring_attention_backward(*args, dropout_p=0.0)[:3]


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
