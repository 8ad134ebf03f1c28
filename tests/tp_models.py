"""Small models for tensor parallelism, with their plans, and steps over them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.optim import Optimizer

VOCAB = 21


class MLP(nn.Module):
    def __init__(self, dim: int = 12, hidden: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.net1 = nn.Linear(dim, hidden, bias=bias)
        self.net2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(F.relu(self.net1(x)))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Normed(nn.Module):
    """RMSNorm(10), then an MLP 10-16-10."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(10), MLP(10, 16, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3 = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.net3(self.net2(F.relu(self.net1(x))))


class Attention(nn.Module):
    """Grouped-query attention, as in Llama; `by_hand` by products and a softmax."""

    def __init__(self, dim: int, heads: int, kv: int, width: int, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.heads, self.kv, self.width = heads, kv, width
        self.wq = nn.Linear(dim, heads * width, bias=False)
        self.wk = nn.Linear(dim, kv * width, bias=False)
        self.wv = nn.Linear(dim, kv * width, bias=False)
        self.wo = nn.Linear(heads * width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.wq(x).view(rows, length, self.heads, self.width).transpose(1, 2)
        k, v = (self._repeated(w(x)) for w in (self.wk, self.wv))
        if self.by_hand:
            above = torch.full((length, length), -1e9, dtype=x.dtype).triu(1)
            out = (q @ k.transpose(-2, -1) / self.width**0.5 + above).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(rows, length, self.heads * self.width))

    def _repeated(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        x = x.view(rows, length, self.kv, self.width).transpose(1, 2)
        x = x[:, :, None].expand(rows, self.kv, self.heads // self.kv, length, self.width)
        return x.reshape(rows, self.heads, length, self.width)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, width: int, hidden: int, by_hand: bool) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(dim, heads, kv, width, by_hand), FeedForward(dim, hidden)
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A small language model with the parts of Llama but for rotary positions; `tied` shares the table."""

    def __init__(self, heads: int = 4, kv: int = 2, layers: int = 2, tied: bool = False, by_hand: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(Block(16, heads, kv, 4, 24, by_hand) for _ in range(layers))
        self.norm, self.out = RMSNorm(16), nn.Linear(16, VOCAB, bias=False)
        if tied:
            self.out.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


MLP_PLAN = {"net1": "colwise", "net2": "rowwise"}
LAYERS = {
    "layers.*.attn.w[qkv]": "colwise", "layers.*.attn.wo": "rowwise",
    "layers.*.mlp.w[13]": "colwise", "layers.*.mlp.w2": "rowwise",
}  # fmt: skip
WHOLE_VOCABULARY = {**LAYERS, "tok": "rowwise", "out": "colwise"}
SEQUENCE = {
    "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm[12]": SequenceParallel(),
    "layers.*.attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attn.w[qkv]": ColwiseParallel(),
    "layers.*.attn.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.mlp.w[13]": ColwiseParallel(),
    "layers.*.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}  # torchtitan's plan for Llama, with loss parallel
NORMED_PLAN = {
    "norm": SequenceParallel(),
    "mlp.net1": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.net2": RowwiseParallel(output_layouts=Shard(1)),
}
SIMPLE_PLAN = {
    "net1": ColwiseParallel(input_layouts=Shard(0)),
    "net2": RowwiseParallel(output_layouts=Shard(0)),
}


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).sum()


def next_token(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)


def step_of(loss: Callable[..., Tensor], clip: float | None = 1.0) -> Callable[..., Tensor]:
    """A whole step over `loss(model, *batch)`."""

    def step(model: nn.Module, optimizer: Optimizer, *batch: Any) -> Tensor:
        optimizer.zero_grad()
        found = loss(model, *batch)
        found.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return found.detach()

    return step
