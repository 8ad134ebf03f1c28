"""A byte-level GPT and an MLP over bytes in plain torch.nn, and the training step that every torch peer runs."""

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .job import Job
from .sizes import Config

Attend = Callable[..., Tensor]


class Block(nn.Module):
    """One pre-norm transformer layer. Shapes: (b, t, d) -> (b, t, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attend = heads, cast(Attend, F.scaled_dot_product_attention)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix over tokens, then over features."""
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d, dim=-1)
        )
        mixed = self.attend(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (b, t) -> logits of the next byte (b, t, vocabulary). `places` of the t in a sequence; None: from 0 on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.places: Tensor | None = None
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits at each place."""
        places = torch.arange(x.shape[1], device=x.device) if self.places is None else self.places
        h = self.bytes(x) + self.positions(places)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class MLP(nn.Module):
    """Bytes (b, t) -> logits of the byte that follows them (b, vocabulary). Many bytes to send for each operation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.embed)
        widths = [config.context * config.embed] + [config.width] * config.layers
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of one byte."""
        h = self.bytes(x).flatten(1)
        for layer in self.blocks:
            h = F.relu(layer(h))
        return self.head(h)


def build(config: Config, seed: int = 0) -> GPT | MLP:
    """The model of a configuration, equal on every rank and for every peer."""
    torch.manual_seed(seed)
    return GPT(config) if config.kind == "gpt" else MLP(config)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that are wrapped one by one."""
    return list(cast(nn.ModuleList, model.blocks))


def adamw(model: nn.Module, config: Config) -> AdamW:
    """The optimizer of every peer."""
    return AdamW(model.parameters(), lr=config.learning_rate, fused=True)


def zeros(job: Job) -> tuple[Tensor, Tensor]:
    """A batch of the size that a rank is given."""
    x = torch.zeros(job.config.rows // job.share[1], job.config.context, dtype=torch.int64)
    return x, x if job.config.kind == "gpt" else x[:, 0]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss in nats per byte."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward and update; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()
