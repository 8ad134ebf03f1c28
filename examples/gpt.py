"""A byte-level GPT on the source text of the Python standard library, with what a real run needs.

    python examples/gpt.py --steps 20
    torchrun --nproc-per-node 2 examples/gpt.py --style fully_shard --steps 20 --save runs/gpt
    torchrun --nproc-per-node 3 examples/gpt.py --style replicate --steps 40 --load runs/gpt

The step adds up the gradients of several micro-batches, clips and updates; gradients are reduced once. A checkpoint
written on one mesh and style is read on any other.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from demo.corpus import standard_library
from demo.model import GPTConfig, build

STYLES = ["fully_shard", "replicate", "zero1", "zero2", "default"]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """One update from (m, b, t) bytes: m micro-batches of b rows."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for x, y in zip(tokens, targets, strict=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / len(tokens)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def weight_decay_groups(model: nn.Module) -> list[dict]:
    """Matrices decay, norms and biases do not: two parameter groups of one optimizer."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=20, help="number of the last step")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--rows", type=int, default=12, help="rows of one micro-batch over all ranks")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--save", help="directory to save to at the end")
    parser.add_argument("--load", help="directory to continue from")
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.rows % ranks:
        parser.error(f"--rows {options.rows} cannot be shared equally by {ranks} ranks")

    text = standard_library(limit_bytes=1 << 22)
    model = build(GPTConfig(options.layers, options.width, heads=4, context=64), seed=0)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=1e-3, fused=True)
    step = ws.compile(train_step, parallel=ws.DataParallel(options.style))
    first = ws.load(options.load, step).number if options.load else 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 5))
    for _ in range(first):
        scheduler.step()

    for number in range(first, options.steps):
        pieces = [
            text.batch(number * options.micro + i, seed=0, rows=options.rows, context=64, rank=rank, ranks=ranks)
            for i in range(options.micro)
        ]
        tokens, targets = (torch.stack(part) for part in zip(*pieces, strict=True))
        loss = step(model, optimizer, tokens, targets)
        scheduler.step()
        if rank == 0:
            print(f"step {number + 1} loss {loss:.6f}", flush=True)

    if options.save:
        where = ws.save(options.save, step, number=options.steps)
        if rank == 0:
            print(f"saved {where}")
    if rank == 0:
        print(step.plan)


if __name__ == "__main__":
    main()
