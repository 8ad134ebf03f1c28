"""Packed documents as one long sequence, whose tokens the ranks share.

    python examples/long_sequences.py --tokens 2048 --steps 2
    torchrun --nproc-per-node 2 examples/long_sequences.py --tokens 8192 --steps 3

Files of the Python standard library lie one after the other in one row. A token attends to the tokens before it in its
own document; positions begin anew in each. Every rank is given the row, and takes its part of the tokens.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from demo.corpus import standard_library

BYTES, LONGEST = 256, 1024


class Block(nn.Module):
    """Attention with grouped heads, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head, self.sizes = width // heads, [width, width // 2, width // 2]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A small decoder over bytes."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        before = torch.arange(tokens.shape[1])[:, None] >= torch.arange(tokens.shape[1])
        mask = (documents[:, :, None] == documents[:, None]) & before
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return self.head(self.norm(x))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, row: Tensor) -> Tensor:
    """One update from (4, 1, tokens): bytes, positions, documents and labels; -1 is no label."""
    tokens, positions, documents, labels = row
    optimizer.zero_grad()
    logits = model(tokens, positions, documents)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    loss.backward()
    optimizer.step()
    return loss.detach()


def packed(text: Tensor, count: int, drawn: torch.Generator) -> Tensor:
    """Documents of 100 to 1,000 bytes, as many as `count` tokens hold; the last byte of each has no label."""
    rows, place, document = list[Tensor](), 0, 0
    while place < count:
        length = min(int(torch.randint(100, 1000, (), generator=drawn)), count - place)
        start = int(torch.randint(len(text) - length - 1, (), generator=drawn))
        piece, labels = text[start : start + length].long(), text[start + 1 : start + length + 1].long()
        labels = torch.where(torch.arange(length) == length - 1, -1, labels)
        rows.append(torch.stack([piece, torch.arange(length), torch.full((length,), document), labels]))
        place, document = place + length, document + 1
    return torch.cat(rows, 1)[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="in a row; any number")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = ws.compile(train_step, mesh=f"cp={ranks}", parallel=ws.ContextParallel(input_dim=2))
    text, drawn = standard_library(limit_bytes=1 << 22).text, torch.Generator().manual_seed(0)
    for number in range(options.steps):
        row, begun = packed(text, options.tokens, drawn), time.perf_counter()
        loss = step(model, optimizer, row)
        if rank == 0:
            rate = options.tokens / (time.perf_counter() - begun)
            print(f"step {number + 1} loss {loss:.6f}  {rate:,.0f} tokens/s on {ranks} ranks", flush=True)


if __name__ == "__main__":
    main()
