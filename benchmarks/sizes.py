"""What batches of changing sizes cost, and whether the numbers stay those of DDP or of one process.

    OMP_NUM_THREADS=1 python -m benchmarks.sizes                                                # all rows
    OMP_NUM_THREADS=1 python -m benchmarks.sizes --ranks 2 --styles zero2 --semantics global    # one of them

Trains a GPT with AdamW and clipping in float64 on random lengths and numbers of rows, each batch twice. One job runs at
a time: first the peer, `--repeats` times, whose losses and parameters are kept in a file, then each style, which is
compared with them. What a new size costs is the difference of two calls of one run, the first with this size and the
same batch again, and of all runs the median, size by size: kernels of 300 ms that differ by a tenth between two calls
make a difference of one run noise. A style with a size that costs too much by this median runs as often again.
`--narrow` leaves as many nodes in the program, and so what a size costs the library, and makes kernels short.

    DDP            the peer under per_rank: the same step, eager, with DistributedDataParallel
    one process    the peer on one rank, and under global: the same step, eager, with the batch of all ranks
    --compiled     compiles the model of the peer with torch.compile, which makes sizes dynamic by itself

All in milliseconds of processor time, so that other processes of a busy machine count little. `first`: the first call;
`second`: that whose size makes symbols of rows and length; `new` and `worst`: what new sizes after it cost, the median
and the largest; all of the calling thread of the first rank. `own`: the largest without the time in the kernel of the
operating system; `kernel` and `MB`: of the worst, the time in that kernel, and memory that nothing had touched, by page
faults. `beyond`: the most by which a size costs more than the peer for this size, both without the kernel of the
operating system: no capture saves that kernels meet a shape for the first time, or that a larger batch needs memory.
`known`: the whole process of the first rank for a batch that it has met, median. `error`: the largest difference of a
loss or a parameter from the peer, on any rank and in any run. Exit status 1 if that is more than rounding, if a step is
captured more than twice, or if `beyond` is more than 5 % of the first call or 50 ms.
"""

import argparse
import os
import pickle
import random
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from benchmarks.peers.models import build
from benchmarks.peers.sizes import CONFIGS, Config

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "hybrid")
SEMANTICS = ("per_rank", "global")
NEEDED = 4  # ranks of a mesh of two axes
MOST_ROWS = 4
TOLERANCE = 1e-9
MOST_NEW_MS, MOST_NEW_SHARE = 50.0, 0.05


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
    """What runs at a time: `style` on `world` ranks, or the peer ("")."""

    size: str
    narrow: bool
    calls: int
    compiled: bool
    world: int
    semantics: str
    folder: str
    style: str = ""

    @property
    def has_peers(self) -> bool:
        """True if each rank has a peer, on its own batch."""
        return self.world > 1 and self.semantics == "per_rank"

    @property
    def name(self) -> str:
        """The name of its row."""
        peer = ("DDP" if self.has_peers else "one process") + (", compiled" if self.compiled else "")
        return f"{self.style or peer}, {self.semantics}, {self.world} rank{'s' if self.world > 1 else ''}"

    @property
    def config(self) -> Config:
        """The model, or the one with the same layers that has an eighth of its width."""
        config = CONFIGS[self.size]
        return replace(config, width=config.width // 8) if self.narrow else config

    @property
    def record(self) -> Path:
        """Where the first rank leaves what a run found."""
        return Path(self.folder) / "run.pt"

    def kept(self, rank: int) -> Path:
        """Where the peer of a rank leaves its losses, and its parameters."""
        number = rank if self.has_peers else 0
        kind = ("narrow-" if self.narrow else "") + ("compiled" if self.compiled else "eager")
        return Path(self.folder) / f"{self.size}-{self.calls}-{kind}-{self.semantics}-{self.world}-{number}.pt"


@dataclass(frozen=True)
class Found:
    """What a job computed, and what it used for each size: milliseconds of the thread for a `new` size, and of the
    process for one that is `known`; milliseconds `beyond` the same batch again, by the thread, its `own` without the
    kernel of the operating system, and those in that `kernel`; MB `touched` first beyond the same batch again.
    """

    losses: list[float]
    params: list[Tensor]
    new: list[float]
    known: list[float]
    beyond: list[float]
    own: list[float]
    kernel: list[float]
    touched: list[float]


@dataclass(frozen=True)
class Run:
    """A job from its start to its end: what the first rank found; of a style, the captures and the largest difference
    from the peer on any rank, and what this rank captured anew.
    """

    found: Found
    captures: int | None = None
    error: float | None = None
    misses: str = ""


def median_of(runs: Sequence[Found]) -> Found:
    """Size by size; losses and parameters are of the first."""
    columns = [each.name for each in fields(Found) if each.name not in ("losses", "params")]
    by_size = {name: zip(*(getattr(run, name) for run in runs), strict=True) for name in columns}
    return replace(runs[0], **{name: [statistics.median(size) for size in sizes] for name, sizes in by_size.items()})


def sizes_of(job: Job, rank: int) -> list[tuple[int, int]]:
    """Rows and length of each batch of a rank, the first two with neither in common; under global, ranks have the same
    length.
    """
    context = job.config.context
    own, shared = random.Random(rank), random.Random(100)
    drawn = shared if job.semantics == "global" else own
    first, second = (MOST_ROWS + 1 + rank, context // 2), (MOST_ROWS, context // 2 + 1)
    rest = [(own.randint(2, MOST_ROWS), drawn.randint(2, context)) for _ in range(job.calls - 2)]
    return [first, second, *rest]


def batch(job: Job, rank: int, call: int) -> tuple[Tensor, Tensor]:
    """Bytes to predict and their predictions, the same in every process that asks."""
    drawn, size = torch.Generator().manual_seed(1000 * rank + call), sizes_of(job, rank)[call]
    return torch.randint(256, size, generator=drawn), torch.randint(256, size, generator=drawn)


def whole_batch(job: Job, rank: int, call: int) -> tuple[Tensor, Tensor]:
    """What a peer trains on: the batch of its rank, or of all ranks."""
    parts = [batch(job, r, call) for r in ((rank,) if job.has_peers else range(job.world))]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def used() -> list[float]:
    """Milliseconds of the processor: of this thread, of the process, of this thread in the kernel; MB touched first."""
    thread = resource.getrusage(resource.RUSAGE_THREAD)
    pages = thread.ru_minflt * resource.getpagesize()
    return [1e3 * time.thread_time(), 1e3 * time.process_time(), 1e3 * thread.ru_stime, pages / 1e6]


def timed(step: Callable[[], Tensor]) -> tuple[float, list[float]]:
    """The loss, and what a step used."""
    before = used()
    loss = float(step())
    return loss, [b - a for a, b in zip(before, used(), strict=True)]


def run(job: Job, step: Callable[[int], Tensor], params: Callable[[], list[Tensor]]) -> Found:
    """Train; `step` gets the number of the batch."""
    losses, calls = list[float](), list[list[float]]()
    for call in range(job.calls):
        for _ in range(2):
            loss, found = timed(partial(step, call))
            losses.append(loss)
            calls.append(found)
    new, again = calls[::2], calls[1::2]
    beyond = [[a - b for a, b in zip(*both, strict=True)] for both in zip(new, again, strict=True)]
    own = [thread - kernel for thread, _, kernel, _ in beyond]
    of_new, known = [one[0] for one in new], [one[1] for one in again]
    of_beyond = ([one[column] for one in beyond] for column in (2, 3))
    return Found(losses, params(), of_new, known, [one[0] for one in beyond], own, *of_beyond)


def run_peer(job: Job, rank: int) -> Found:
    """Train the peer, and keep what it computed."""
    model = build(job.config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peer: nn.Module = DistributedDataParallel(model) if job.has_peers else model
    peer = cast(nn.Module, torch.compile(peer)) if job.compiled else peer
    found = run(
        job,
        lambda call: train_step(peer, optimizer, *whole_batch(job, rank, call)),
        lambda: [param.detach() for param in model.parameters()],
    )
    torch.save(found.__dict__, job.kept(rank))
    return found


def run_style(job: Job, rank: int) -> tuple[Found, ws.CompiledStep]:
    """Train a style."""
    model = build(job.config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = f"replicate=2,shard={job.world // 2}" if job.style == "hybrid" else None
    how = cast(Literal["per_rank", "global"], job.semantics)
    step = ws.compile(train_step, parallel=ws.DataParallel(cast(Any, job.style), semantics=how), mesh=mesh)

    def params() -> list[Tensor]:
        with ws.whole(model, writeback=False):
            return [param.detach().clone() for param in model.parameters()]

    return run(job, lambda call: step(model, optimizer, *batch(job, rank, call)), params), step


def difference(found: Found, peer: Found) -> float:
    """The largest difference of a loss, or of a parameter."""
    losses = max(abs(a - b) for a, b in zip(found.losses, peer.losses, strict=True))
    params = max(float((a - b).abs().max()) for a, b in zip(found.params, peer.params, strict=True))
    return max(losses, params)


def largest(value: float) -> float:
    """The largest value of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


HEADS = ("first", "second", "new", "worst", "own", "kernel", "MB", "known", "beyond", "captures", "error")


def shown(job: Job, found: Found, runs: int, rest: str) -> str:
    beyond = found.beyond[2:]
    worst = max(range(len(beyond)), key=beyond.__getitem__)
    of_worst = found.kernel[2:][worst], found.touched[2:][worst]
    cells = [*found.new[:2], statistics.median(beyond), beyond[worst], max(found.own[2:]), *of_worst]
    cells.append(statistics.median(found.known))
    return f"{job.name:34}{runs:5}" + "".join(f"{cell:9.1f}" for cell in cells) + rest


def rank_main(rank: int, port: int, job: Job) -> None:
    """One run of a job, on one rank."""
    torch.set_num_threads(1)
    if job.world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if job.style or job.has_peers:
            dist.init_process_group("gloo")
    if not job.style:
        result = Run(run_peer(job, rank))
    else:
        found, step = run_style(job, rank)
        peer = Found(**torch.load(job.kept(rank), weights_only=True))
        result = Run(found, int(largest(step.captures)), largest(difference(found, peer)), str(step.misses))
    if rank == 0:
        job.record.write_bytes(pickle.dumps(replace(result, found=replace(result.found, params=[]))))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run_once(job: Job) -> Run:
    """Run a job in processes of its own, and wait until they have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = job.world if job.style or job.has_peers else 1
    mp.spawn(rank_main, args=(port, job), nprocs=ranks)
    return cast(Run, pickle.loads(job.record.read_bytes()))


def holds(job: Job, repeats: int) -> bool:
    """Run a job `repeats` times, print its row, and say whether it is as wanted. A style that is slow runs as often
    again, which tells a cost from noise.
    """
    try:
        runs = [run_once(job) for _ in range(repeats)]
        if job.style and is_slow(job, runs):
            runs += [run_once(job) for _ in range(repeats)]
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"{job.name:34} failed: {str(error).strip().splitlines()[-1]}", flush=True)
        return False
    found = median_of([run.found for run in runs])
    if not job.style:
        print(shown(job, found, len(runs), f"{'-':>9}" * 3), flush=True)
        kept = torch.load(job.kept(0), weights_only=True)
        torch.save({**found.__dict__, "losses": kept["losses"], "params": kept["params"]}, job.kept(0))
        return True
    captures, error = max(cast(int, run.captures) for run in runs), max(cast(float, run.error) for run in runs)
    print(shown(job, found, len(runs), f"{beyond_peer(job, found):9.1f}{captures:9}{error:9.0e}"), flush=True)
    right = error <= TOLERANCE and captures <= 2
    if not right:
        print(f"rank 0: {runs[0].misses}", flush=True)
    return right and not is_slow(job, runs)


def beyond_peer(job: Job, found: Found) -> float:
    """The most by which a new size costs more than it costs the peer."""
    peer = Found(**torch.load(job.kept(0), weights_only=True))
    return max(own - max(theirs, 0.0) for own, theirs in list(zip(found.own, peer.own, strict=True))[2:])


def is_slow(job: Job, runs: Sequence[Run]) -> bool:
    """True if a new size costs more than is wanted, by the median of these runs."""
    found = median_of([run.found for run in runs])
    return beyond_peer(job, found) > min(MOST_NEW_MS, MOST_NEW_SHARE * found.new[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpts = [name for name, config in CONFIGS.items() if config.kind == "gpt"]
    parser.add_argument("--size", choices=gpts, default="S")
    parser.add_argument("--narrow", action="store_true", help="an eighth of the width: short kernels")
    parser.add_argument("--calls", type=int, default=50, help="sizes; each batch is trained on twice")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a peer and of a style")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="hybrid alone runs on 4")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--semantics", nargs="+", choices=SEMANTICS, default=list(SEMANTICS))
    parser.add_argument("--compiled", action="store_true", help="the peer is compiled by torch.compile")
    parser.add_argument("--keep", metavar="FOLDER", help="of what peers computed, which is read where it is there")
    given = parser.parse_args()
    narrow = "narrow " if given.narrow else ""
    print(f"torch {torch.__version__}, {narrow}GPT {given.size}, {given.calls} sizes, processor milliseconds")
    print(f"{'style':34} runs" + "".join(f"{head:>9}" for head in HEADS), flush=True)
    right = True
    with tempfile.TemporaryDirectory() as folder:
        kept = given.keep or folder
        Path(kept).mkdir(parents=True, exist_ok=True)
        for world in given.ranks:
            styles = [style for style in given.styles if (style == "hybrid") == (world >= NEEDED)]
            for semantics in given.semantics if world > 1 else given.semantics[:1]:  # they are one on one rank
                job = partial(Job, given.size, given.narrow, given.calls, given.compiled, world, semantics, kept)
                if styles and not job().kept(world - 1).exists():
                    right &= holds(job(), given.repeats)
                for style in styles:
                    right &= holds(job(style), given.repeats)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
