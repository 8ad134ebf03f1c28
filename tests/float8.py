"""Linear layers in float8, written by hand: what `wholestep.Float8` must compute, in float32 arithmetic."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(matrix: Tensor, dtype: torch.dtype, rowwise: bool, dim: int) -> Tensor:
    """The numbers that float8 stands for: `matrix` in steps of its scale."""
    amax = matrix.abs().amax(dim, keepdim=True) if rowwise else matrix.abs().max()
    scale = LARGEST[dtype] / amax.double().clamp(min=1e-12)
    if rowwise:
        scale = 2.0 ** torch.floor(torch.log2(scale))
    scale = scale.float()
    return (matrix.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() / scale


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        e4m3 = torch.float8_e4m3fn
        out = rounded(x.flatten(0, -2), e4m3, rowwise, 1) @ rounded(weight, e4m3, rowwise, 1).t()
        return out.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rowwise, e4m3 = ctx.rowwise, torch.float8_e4m3fn
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        narrow = e4m3 if rowwise else torch.float8_e5m2
        for_x = rounded(grad, narrow, rowwise, 1) @ rounded(weight, e4m3, rowwise, 0)
        for_weight = rounded(grad, narrow, rowwise, 0).t() @ rounded(rows, e4m3, rowwise, 0)
        return for_x.to(x.dtype).reshape(x.shape), for_weight.to(weight.dtype), None


class Linear(nn.Module):
    """A linear layer in float8 with the parameters of `plain`."""

    def __init__(self, plain: nn.Linear, rowwise: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.rowwise = plain.weight, plain.bias, rowwise

    def forward(self, x: Tensor) -> Tensor:
        out: Any = ByHand.apply(x, self.weight, self.rowwise)
        return out if self.bias is None else out + self.bias


class Block(nn.Module):
    """A gated layer with a residual."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """An embedding, blocks, and a projection to the vocabulary."""

    def __init__(self, blocks: int = 2, width: int = 32, hidden: int = 64, vocab: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LAYERS = ["layers.*.gate", "layers.*.up", "layers.*.down"]


def by_hand(model: Model, rowwise: bool) -> Model:
    """Replace the layers of the blocks in place."""
    for block in model.layers:
        assert isinstance(block, Block)
        for name in ("gate", "up", "down"):
            setattr(block, name, Linear(getattr(block, name), rowwise))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def batch(step: int, rank: int = 0, rows: int = 4, length: int = 16, vocab: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, vocab, (rows, length + 1), generator=generator)
