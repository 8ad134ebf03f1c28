"""A byte-level GPT in plain torch.nn: nothing in it knows of any parallelism."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: `context` bytes seen at once, `width` features, `heads` per layer."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then a 4x wide MLP. Shapes: (b, t, d) -> (b, t, d)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix over tokens, then over features."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (b, t) int64 -> logits (b, t, 256). Input and output embeddings are one tied parameter."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte at each place."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


def build(config: GPTConfig, seed: int) -> GPT:
    """The same weights for the same seed, whatever the process drew before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        nn.init.zeros_(module.bias)
