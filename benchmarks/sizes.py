"""What batches of changing sizes cost, and whether the numbers stay those of DDP or of one process.

    OMP_NUM_THREADS=1 python benchmarks/sizes.py [--size S] [--calls 50] [--ranks 1 2] [--styles replicate zero1 ...]

Trains a GPT with AdamW and clipping on random lengths and numbers of rows. Beside each other, in turn, call by call:

    wholestep      one style; under per_rank its peer is DDP, under global one process with the batch of all ranks
    DDP            the same step, eager, with DistributedDataParallel; on one rank the plain step
    torch.compile  the model of DDP with torch.compile(dynamic=None), as torch does by itself (--compiled)

A row has the processor time of the first rank's calling thread in the first call; in the second, whose size makes
symbols of rows and length; in each new size after it, median and worst of what the call took longer than a second call
with the same batch. Other processes of a busy machine take no part in these. `known` is the wall time of that second
call, `peer` that of the peer, medians of the slowest rank, taken in turn. All in milliseconds. `error` is the largest
difference of a loss or a parameter from the peer in float64, in a run of its own. Exit status 1 if numbers differ, or a
step is captured more than twice.
"""

import argparse
import copy
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from benchmarks.peers.models import build
from benchmarks.peers.sizes import CONFIGS

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default", "hybrid")
NEEDED = 4  # ranks of a mesh of two axes
MOST_ROWS = 12
TOLERANCE = 1e-9
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One update; returns the loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class Job:
    """What one table measures."""

    size: str
    calls: int
    compiled: bool


@dataclass(frozen=True)
class Row:
    """One style. Times in ms, that of a new size beyond the same batch again."""

    first: float
    second: float
    new: tuple[float, ...]
    known: float
    peer: float
    captures: int
    error: float
    misses: tuple[str, ...]


def sizes_of(job: Job, rank: int, semantics: str) -> list[tuple[int, int]]:
    """Rows and length of each call of a rank, the first two with neither in common; under global, ranks have the same
    length.
    """
    context = CONFIGS[job.size].context
    own, shared = random.Random(rank), random.Random(100)
    drawn = shared if semantics == "global" else own
    first, second = (MOST_ROWS + 1 + rank, context // 2), (MOST_ROWS, context // 2 + 1)
    rest = [(own.randint(2, MOST_ROWS), drawn.randint(2, context)) for _ in range(job.calls - 2)]
    return [first, second, *rest]


def batch(rank: int, call: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Bytes to predict and their predictions, the same in every process that asks."""
    drawn = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randint(256, (rows, length), generator=drawn), torch.randint(256, (rows, length), generator=drawn)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor milliseconds of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)


def made(job: Job, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, equal on all ranks."""
    model = build(CONFIGS[job.size]).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def compiled(style: str, semantics: str) -> ws.CompiledStep:
    mesh = f"replicate=2,shard={dist.get_world_size() // 2}" if style == "hybrid" else None
    how = cast(Literal["per_rank", "global"], semantics)
    return ws.compile(train_step, parallel=ws.DataParallel(cast(Any, style), semantics=how), mesh=mesh)


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def costs(job: Job, rank: int, style: str, semantics: str) -> tuple[list[tuple[float, float]], list[Any], list[float]]:
    """Of each call: wall and processor ms of a new size, the same of a second call, and the wall ms of the peer."""
    model, optimizer = made(job, torch.float32)
    twin = copy.deepcopy(model)
    peer: nn.Module = DistributedDataParallel(twin) if dist.is_initialized() else twin
    peer = cast(nn.Module, torch.compile(peer)) if job.compiled else peer
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    step = compiled(style, semantics)
    new: list[tuple[float, float]] = []
    again: list[Any] = []
    peers: list[float] = []
    for call, (rows, length) in enumerate(sizes_of(job, rank, semantics)):
        given = batch(rank, call, rows, length)
        for into in (new, again):
            barrier()
            wall, cpu = timed(partial(step, model, optimizer, *given))
            into.append((slowest(wall), cpu))
        barrier()
        peers.append(slowest(timed(partial(train_step, peer, plain, *given))[0]))
    return new, again, peers


def difference(job: Job, rank: int, world: int, style: str, semantics: str) -> tuple[float, int, list[str]]:
    """The largest difference from the peer in float64, the captures, and the log of the step."""
    model, optimizer = made(job, torch.float64)
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3)
    peer = DistributedDataParallel(other) if world > 1 and semantics == "per_rank" else other
    step, worst = compiled(style, semantics), 0.0
    for call in range(job.calls):
        sizes = [sizes_of(job, r, semantics)[call] for r in range(world)]
        loss = step(model, optimizer, *batch(rank, call, *sizes[rank]))
        whole = range(world) if semantics == "global" else (rank,)
        parts = [batch(r, call, *sizes[r]) for r in whole]
        expected = train_step(peer, plain, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        worst = max(worst, abs(float(loss) - float(expected)))
    with ws.whole(model):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return slowest(worst), int(slowest(step.captures)), step.misses


def measure(job: Job, rank: int, world: int, style: str, semantics: str) -> Row:
    new, again, peers = costs(job, rank, style, semantics)
    error, captures, misses = difference(job, rank, world, style, semantics)
    beyond = tuple(a[1] - b[1] for a, b in zip(new[2:], again[2:], strict=True))
    known = statistics.median(wall for wall, _ in again)
    first, second = (cpu for _, cpu in new[:2])
    return Row(first, second, beyond, known, statistics.median(peers), captures, error, tuple(misses))


HEADS = ("first", "second", "new", "worst", "known", "peer", "captures", "error")


def shown(name: str, row: Row) -> str:
    cells = [row.first, row.second, statistics.median(row.new), max(row.new), row.known, row.peer]
    return f"{name:34}" + "".join(f"{cell:9.1f}" for cell in cells) + f"{row.captures:9}{row.error:9.0e}"


def rank_main(rank: int, world: int, port: int, job: Job, styles: list[str], failed: Any) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    for style in styles:
        if (style == "hybrid") != (world >= NEEDED):
            continue
        for semantics in ("per_rank", "global") if world > 1 else ("per_rank",):
            row = measure(job, rank, world, style, semantics)
            if rank == 0:
                print(shown(f"{style}, {semantics}, {world} ranks", row), flush=True)
            if row.error > TOLERANCE or row.captures > 2:
                print(f"rank {rank}: {row.misses}", flush=True)
                failed.value = 1
    if world > 1:
        barrier()
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=[name for name, config in CONFIGS.items() if config.kind == "gpt"], default="S"
    )
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="hybrid alone runs on 4")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--compiled", action="store_true", help="the peer is compiled by torch.compile")
    given = parser.parse_args()
    job = Job(given.size, given.calls, given.compiled)
    print(f"torch {torch.__version__}, GPT {given.size}, {given.calls} sizes, milliseconds")
    print(f"{'style':34}" + "".join(f"{head:>9}" for head in HEADS))
    failed = mp.get_context("spawn").Value("i", 0)
    for world in given.ranks:
        if world == 1:
            rank_main(0, 1, 0, job, given.styles[:1], failed)
        else:
            mp.spawn(rank_main, args=(world, free_port(), job, given.styles, failed), nprocs=world)
    return failed.value


if __name__ == "__main__":
    sys.exit(main())
