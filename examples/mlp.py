"""An MLP learns another one, from a step written for one device.

    python examples/mlp.py                                                   # one process
    torchrun --nproc-per-node 2 examples/mlp.py --style zero1 --steps 20     # two, each with its own data
    wholestep plan examples/mlp.py:build --mesh dp=8 --compare               # no process: what each style would cost

`train_step` is the same in all; `--style` says where tensors rest, and the collectives follow from that.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

STYLES = ["fully_shard", "replicate", "zero1", "zero2", "default"]


class MLP(nn.Module):
    """Two hidden layers of different widths: 33 rows do not divide evenly, and that is fine."""

    def __init__(self, inputs: int = 16, outputs: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 33), nn.GELU(), nn.Linear(33, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs) -> (b, outputs)."""
        return self.layers(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The whole step for one device: nothing in it knows of other ranks."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def build() -> tuple[Callable[..., Tensor], tuple]:
    """The step and its arguments, for the commands `wholestep plan`, `simulate` and `diff`."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return train_step, (model, optimizer, torch.empty(64, 16), torch.empty(64, 4))


def batches(teacher: nn.Module, steps: int, rows: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's own data: other ranks draw other numbers."""
    draw = torch.Generator().manual_seed(1000 + rank)
    out = []
    with torch.no_grad():
        for _ in range(steps):
            x = torch.randn(rows, 16, generator=draw)
            out.append((x, teacher(x)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64, help="batch size of each rank")
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))  # torchrun sets it

    torch.manual_seed(0)
    teacher, model = MLP(), MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    step = ws.compile(train_step, parallel=ws.DataParallel(options.style), backend=options.backend)
    for number, (x, y) in enumerate(batches(teacher, options.steps, options.rows, rank), start=1):
        loss = step(model, optimizer, x, y)
        scheduler.step()  # the learning rate is an input of the graph: no new capture
        if rank == 0:
            print(f"step {number} loss {loss:.6f}", flush=True)

    if rank == 0:
        print(step.plan)
        for kind, total in step.local_graph.collectives().items():
            print(f"{kind}: {total.count} a step, {total.bytes:,} bytes sent per rank")


if __name__ == "__main__":
    main()
