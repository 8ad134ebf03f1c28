"""The training step, written for one device, with its optimizer and its schedule: nothing here knows of other ranks."""

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

LEARNING_RATE = 1e-3
WARMUP_STEPS = 10


def train_step(model: nn.Module, optimizer: AdamW, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward, backward, clipping and update; returns the mean loss in nats per byte."""
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def new_optimizer(model: nn.Module) -> AdamW:
    """The optimizer of a run, without state."""
    return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)


def schedule(optimizer: AdamW, steps: int, done: int = 0) -> LambdaLR:
    """Linear warm-up, then a cosine down to a tenth over `steps`, as it stands after `done` steps."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    for group in optimizer.param_groups:
        group["initial_lr"] = LEARNING_RATE
    return LambdaLR(optimizer, factor, last_epoch=done - 1)
