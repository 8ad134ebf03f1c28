"""A small GPT, tied and untied, with dropout, and its step: what pipelines are compared on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F
from torch.optim import Optimizer

TOKENS, WIDTH, LENGTH = 20, 8, 6
SEQUENCE: dict[str, Any] = {
    "blocks.*.up": "colwise", "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)), "blocks.*.norm_*": "sequence",
}  # fmt: skip
"""Tensor parallelism of the `Gpt` that shards tokens between its layers."""


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_a(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_b(x)))))


class Gpt(nn.Module):
    def __init__(self, layers: int, tied: bool, drop: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(drop) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def maker(layers: int, tied: bool, drop: float, fused: bool = True) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Gpt(layers, tied, drop)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=fused)

    return make


def batches(rows: int, count: int, seed: int = 1) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ({name: torch.randint(TOKENS, (rows, LENGTH), generator=generator) for name in ("x", "y")},)
        for _ in range(count)
    ]
