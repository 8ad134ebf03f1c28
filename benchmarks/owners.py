"""Muon of a GPT: each matrix updated by its owner, beside every rank updating all of them. Time, bytes, state.

python -m benchmarks.owners [CONFIG] [--ranks N] [--rounds N]     by default S (3.3 M parameters) on 2 gloo ranks

All ways take turns in one job, on the same batches. `sent`: bytes of a rank and step, by the program's collectives
(DDP: by the formula of a ring). `CPU` is of all ranks, in seconds; wall times are those of a machine with few cores.
"""

import argparse
import os
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from benchmarks.peers.models import build, loss_of
from benchmarks.peers.sizes import CONFIGS, Config

STYLES: dict[str, ws.DataParallel] = {
    "replicate, all on each rank": ws.DataParallel("replicate"),
    "zero1, all on each rank": ws.DataParallel("zero1"),
    "zero1, owners": ws.DataParallel("zero1", owners=True),
}


def step_of(model: nn.Module, optimizers: list[Optimizer], x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward and both optimizers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of the blocks, AdamW for all else, as Muon is used."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "blocks" in name]
    others = [p for name, p in named if p.dim() != 2 or "blocks" not in name]
    return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, lr=3e-4, fused=True)]


class Way:
    """One way to train, with what it needs."""

    def __init__(self, config: Config, name: str) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, build(config)
        self.optimizers = optimizers_of(self.model)
        self.step = ws.compile(step_of, parallel=STYLES[name]) if name in STYLES else None
        self.wrapped = None if self.step else Ddp(self.model)
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def run(self, x: Tensor, y: Tensor) -> float:
        """One step; its loss."""
        if self.step is not None:
            return self.step(self.model, self.optimizers, x, y).item()
        return step_of(self.wrapped, self.optimizers, x, y).item()  # type: ignore[arg-type]

    def timed(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Some steps, on the clocks."""
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            self.run(*batch)
        self.cpu.append((time.process_time() - cpu) / len(batches))
        self.wall.append((time.perf_counter() - wall) / len(batches))

    def row(self) -> dict[str, Any]:
        """What this rank saw."""
        whole = sum(p.numel() * p.element_size() for p in self.model.parameters())
        ranks = dist.get_world_size()
        sent, stored = 2 * whole * (ranks - 1) // ranks, 0
        if self.step is not None:
            assert self.step.local_graph is not None
            assert self.step.plan is not None
            sent = sum(total.bytes for total in self.step.local_graph.collectives().values())
            stored = self.step.plan.stored_bytes("state")
        else:
            states = (value for o in self.optimizers for entry in o.state.values() for value in entry.values())
            stored = sum(value.nbytes for value in states if isinstance(value, Tensor))
        return {"wall": median(self.wall), "cpu": median(self.cpu), "sent": sent, "state": stored}


def job(rank: int, ranks: int, config: Config, rounds: int, file: str) -> None:
    """What a rank does; the first one prints."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    seed = torch.Generator().manual_seed(rank)
    shape = config.rows // ranks or 1, config.context
    given = [torch.randint(config.vocabulary, shape, generator=seed) for _ in range(2 * (rounds * 3 + 2))]
    batches = list(zip(given[::2], given[1::2], strict=True))
    ways = [Way(config, name) for name in ("DDP, all on each rank", *STYLES)]
    for way in ways:
        losses = [way.run(*batch) for batch in batches[:2]]
        print(f"# rank {rank} {way.name}: {losses}", file=sys.stderr, flush=True)
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            way.timed(batches[2 + 3 * number : 5 + 3 * number])
    rows: list[Any] = [None] * ranks
    dist.all_gather_object(rows, [way.row() for way in ways])
    apart = max(
        float((ours - theirs).abs().max()) for ours, theirs in zip(*map(_whole, (ways[-1], ways[0])), strict=True)
    )
    if rank == 0:
        print(f"{config.name}, {ranks} ranks, torch {torch.__version__}, {rounds} rounds of 3 steps in turn")
        print(f"{'':30} {'wall ms':>9} {'CPU s':>9} {'sent':>10} {'state of a rank':>16}")
        for number, way in enumerate(ways):
            each = [one[number] for one in rows]
            print(
                f"{way.name:30} {1e3 * max(one['wall'] for one in each):9.0f} {sum(one['cpu'] for one in each):9.2f}"
                f" {max(one['sent'] for one in each) / 1e6:7.1f} MB {max(one['state'] for one in each) / 1e6:13.1f} MB"
            )
        print(f"largest difference of a parameter, owners and DDP: {apart:.1e}", flush=True)
    dist.destroy_process_group()


def _whole(way: Way) -> list[Tensor]:
    held = [p.detach() for p in way.model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in held]


def main() -> None:
    """One job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="S", choices=list(CONFIGS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = given.ranks, CONFIGS[given.config], given.rounds, f"{folder}/store"
        mp.spawn(job, args, nprocs=given.ranks)


if __name__ == "__main__":
    main()
