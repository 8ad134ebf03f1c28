"""Training that goes on with the ranks that are left when some are lost, and grows when ranks come back.

Start this on each node; any number from 1 to 4 trains, and nodes may be lost and may come back at any time:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each restart has a store of its own; the first node may be lost too
    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        --rdzv-conf last_call_timeout=5 examples/elastic.py --folder SHARED/checkpoints

torchrun ends what is left of the job and starts it again with the nodes that are there. Each start loads the newest
checkpoint on the mesh of its size. The global batch of a step is the same at every size: each rank takes its rows, and
`semantics="global"` computes what one device computes on all of them.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws

ROWS = 24  # of the global batch
STYLES = ["fully_shard", "replicate", "zero1", "zero2", "default", "hybrid"]


class MLP(nn.Module):
    """Two layers of which one has 33 rows: they divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(b, 16) -> (b, 4)."""
        return self.layers(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The whole step for one device: nothing in it knows of other ranks."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def my_rows(number: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global batch of a step, which follows from the number of the step alone."""
    draw = torch.Generator().manual_seed(number)
    x, noise = torch.randn(ROWS, 16, generator=draw), torch.randn(ROWS, 4, generator=draw)
    y = x[:, :4] * x[:, 4:8] + 0.1 * noise
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return x[rows], y[rows]


def mesh_for(style: str, world: int) -> str:
    """The mesh of a job of this size; `hybrid` has two replicas where ranks divide by two."""
    if style != "hybrid":
        return f"dp={world}"
    return f"replicate=2,shard={world // 2}" if world % 2 == 0 else f"replicate=1,shard={world}"


class StepLog:
    """A line of JSON for each completed step, in a file beside the checkpoints; the first rank writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.last = json.loads(lines[-1]) if lines else None

    def add(self, number: int, world: int, loss: float) -> None:
        """Note a completed step; the first of a restart says how long no new step was completed."""
        now = time.time()
        if self.last is not None:
            lost, again = now - self.last["time"], self.last["step"] + 1 - number
            print(f"ranks {self.last['world']} -> {world}: {lost:.1f} s from the last completed step to this one, "
                  f"{again} steps computed again", flush=True)  # fmt: skip
            self.last = None
        with self.path.open("a") as file:
            file.write(json.dumps({"step": number, "world": world, "time": now, "loss": loss}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("checkpoints"), help="on a file system that all nodes share"
    )
    parser.add_argument("--style", choices=STYLES, default="fully_shard", help="where tensors rest")
    parser.add_argument("--steps", type=int, default=100, help="of the whole training")
    parser.add_argument("--stop", type=int, help="end after so many of them")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--memory", type=Path, help="keep copies here, in memory of the node: /dev/shm/my-job")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to wait after a step, as a larger model would"
    )
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # of this start

    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    parallel = ws.DataParallel(options.style, semantics="global")
    step = ws.compile(train_step, parallel=parallel, mesh=mesh_for(options.style, world), timeout="60s")

    options.folder.mkdir(parents=True, exist_ok=True)
    first, log = 0, StepLog(options.folder / "steps.jsonl")
    copies = ws.MemoryCopies(options.memory) if options.memory else None
    checkpoint = copies.load(step) if copies else None  # None: a node was lost that held what no other did
    if checkpoint is None and (options.folder / "latest").exists():
        checkpoint = ws.load(options.folder, step)  # saved by any number of ranks
    if checkpoint is not None:
        scheduler.load_state_dict(checkpoint.extra["scheduler"])
        first = checkpoint.number
    for number in range(first, options.stop or options.steps):
        loss = step(model, optimizer, *my_rows(number, rank, world)).item()
        scheduler.step()
        if rank == 0:
            log.add(number, world, loss)
            print(f"step {number} of {world} ranks: loss {loss:.6f}", flush=True)
        extra = {"scheduler": scheduler.state_dict()}
        if copies:
            copies.save(step, extra=extra)
        if (number + 1) % options.every == 0:
            ws.save(options.folder, step, extra=extra)
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
