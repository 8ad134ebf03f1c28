"""What every runner trains: a model of some size, its batches, and the step as a user writes it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIP_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """A transformer: `heads` of queries, `key_heads` of keys and values (0: as many); `rows` times `context` tokens."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int
    vocabulary: int
    key_heads: int = 0  # not 0: a Llama, with RMSNorm, rotary positions and a gated MLP
    hidden: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.context


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=32, rows=2, vocabulary=256),
    "tiny-llama": Size(layers=2, width=64, heads=4, context=32, rows=2, vocabulary=256, key_heads=2, hidden=128),
    # a step of a few milliseconds, which launches bound
    "small": Size(layers=6, width=512, heads=8, context=256, rows=8, vocabulary=32768),
    # GPT-2 124M, its 50,257 tokens padded to a multiple of 64 as nanoGPT does
    "gpt2": Size(layers=12, width=768, heads=12, context=1024, rows=8, vocabulary=50304),
    # the shapes of Llama-3.2-1B
    "llama1b": Size(layers=16, width=2048, heads=32, context=2048, rows=4, vocabulary=128256, key_heads=8, hidden=8192),
}


class GPTBlock(nn.Module):
    """One pre-norm layer, (b, t, d) -> (b, t, d)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Mix over tokens, then over features; `angles` are not used."""
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, dim=-1)
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: `x` is (b, heads, t, e), `angles` (t, e / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class LlamaBlock(nn.Module):
    """One layer of Llama 3, (b, t, d) -> (b, t, d)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.heads, self.key_heads = size.width, size.heads, size.key_heads
        narrow = d // size.heads * size.key_heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, wide, bias=False) for wide in (d, narrow, narrow))
        self.proj = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, size.hidden, bias=False), nn.Linear(d, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, d, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Mix over tokens, then over features."""
        b, t, d = x.shape
        h = self.norm1(x)
        shape = b, t, -1, d // self.heads
        q, k, v = (part(h).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Tokens (b, t) -> logits of the next one (b, t, vocabulary); the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        llama = size.key_heads > 0
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = None if llama else nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList((LlamaBlock if llama else GPTBlock)(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width) if llama else nn.LayerNorm(size.width)
        half = size.width // size.heads // 2
        turns = 500000.0 ** (-torch.arange(half).float() / half)
        self.register_buffer("angles", torch.arange(size.context).float()[:, None] * turns, persistent=False)
        for embedding in (self.tokens, self.positions):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits at each place."""
        h = self.tokens(x)
        if self.positions is not None:
            h = h + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h, self.angles)
        return F.linear(self.norm(h), self.tokens.weight)


@dataclass(frozen=True)
class Setting:
    """What all runners of a comparison share.

    `precision` is bf16 (parameters and state in bfloat16), autocast (products in bfloat16) or float32; `optimizer` is
    default, foreach or fused: the implementation of AdamW.
    """

    size_name: str
    size: Size
    device: str = "cuda"
    precision: str = "bf16"
    optimizer: str = "fused"

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model that all start from, and its optimizer."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Transformer(self.size)
        angles = model.angles
        model = model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)
        model.angles = angles  # positions stay exact
        return model, self.optimizer_of(model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over the parameters of `model`."""
        options: dict[str, Any] = {} if self.optimizer == "default" else {self.optimizer: True}
        return torch.optim.AdamW(model.parameters(), lr=3e-4, **options)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the ones that follow, the same for all runners."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.size.rows, self.size.context + 1)
        rows = torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward."""
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "autocast" else nullcontext()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        with self.autocast():
            logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def flops(self, parameters: int) -> float:
        """Of a step: 6 for each parameter and token, 12 for each pair of tokens, feature and layer, masked or not."""
        size = self.size
        return size.tokens * (6.0 * parameters + 12.0 * size.layers * size.width * size.context)


def train_step_of(setting: Setting, loss_of: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """The step as a user writes it: of a model, its optimizer, tokens and their followers."""
    compute_loss = loss_of or setting.loss

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = compute_loss(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.detach()

    return train_step
