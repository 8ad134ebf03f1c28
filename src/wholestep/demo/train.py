"""The training step of the demo, written for one device, with its optimizer and schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from .model import GPT, GPTConfig, build
from .settings import Settings


def train_step(model: nn.Module, optimizer: AdamW, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward, backward, clipping and update; returns the mean loss in nats per byte."""
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def example_step() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The demo's step with a model, its optimizer and a batch, as `wholestep plan` takes them."""
    settings = Settings(directory="")
    model = new_model(settings)
    rows, context = settings.sizes.rows, model.config.context
    batch = torch.zeros(rows, context, dtype=torch.int64)
    return train_step, (model, new_optimizer(model, settings), batch, batch)


def new_model(settings: Settings) -> GPT:
    """The model of a run; equal on every rank."""
    sizes = settings.sizes
    return build(GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.context), settings.seed)


def new_optimizer(model: nn.Module, settings: Settings) -> AdamW:
    """The optimizer of a run, without state."""
    return AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.1, fused=True)


def schedule(optimizer: AdamW, settings: Settings, done: int = 0) -> LambdaLR:
    """Linear warm-up, then a cosine down to a tenth, as it stands after `done` steps."""
    warmup, steps = settings.warmup_steps, settings.steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    for group in optimizer.param_groups:
        group["initial_lr"] = settings.learning_rate
    return LambdaLR(optimizer, factor, last_epoch=done - 1)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters on the CPU by name; every rank must call this when they are sharded."""
    from torch.distributed.tensor import DTensor

    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name.removeprefix("module.")] = value.cpu().clone()
    return whole


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference between two sets of parameters of equal names."""
    assert one.keys() == other.keys(), f"{sorted(one)} against {sorted(other)}"
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def digest(parameters: dict[str, Tensor]) -> str:
    """SHA-256 over names and bits of parameters."""
    import hashlib

    state = hashlib.sha256()
    for name in sorted(parameters):
        state.update(name.encode())
        state.update(parameters[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
