"""What a process holds after many steps, sizes of batches and compiled steps: memory, files, threads, programs.

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--scale 1.0] [--cases steps ranks sizes deleted]

    steps      100,000 calls on one rank, every tenth with a loss that is not finite, which is skipped
    ranks      20,000 calls on two ranks; each has batches of three sizes, in an order of its own
    sizes      1,000 sizes of batches on one rank, with room for 32 programs
    deleted    200 steps, each compiled with a model of its own, called and deleted

A row is printed after each tenth of a case: resident memory, open descriptors, threads, programs that are held, objects
that Python's collector tracks, and keys in the store of the job. The last column of the last row is the growth from the
middle to the end, in MiB and in objects. `--scale` multiplies the numbers of calls.
"""

import argparse
import gc
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import wholestep as ws
from wholestep import _torch
from wholestep.runtime.program import Program

COLUMNS = ("calls", "seconds", "RSS MiB", "files", "threads", "programs", "objects", "store keys")
CASES = {"steps": (1, 100_000), "ranks": (2, 20_000), "sizes": (1, 1_000), "deleted": (1, 200)}
SAMPLES = 10


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def steps(rank: int, calls: int) -> Iterator[None]:
    """The same call again and again."""
    job, step = made(), ws.compile(train_step, on_nonfinite="skip")
    good, bad = torch.randn(4, 16), torch.full((4, 16), torch.nan)
    for call in range(calls):
        step(*job, bad if call % 10 == 9 else good)
        yield
    step.flush()
    assert step.skipped == calls // 10, "each call that is not finite is skipped"


def ranks(rank: int, calls: int) -> Iterator[None]:
    """Sizes that differ between ranks; replicas are compared every thousand calls."""
    job, step = made(), ws.compile(train_step, parallel=ws.DataParallel("fully_shard"), on_nonfinite="skip")
    batches = [torch.randn(4 + rows, 16) for rows in range(3)]
    for call in range(calls):
        step(*job, batches[(call // 7 if rank else call) % 3])
        yield


def sizes(rank: int, calls: int) -> Iterator[None]:
    """A batch of another size in each call."""
    job, step = made(), ws.compile(train_step)
    for call in range(calls):
        step(*job, torch.randn(1 + call, 16))
        yield


def deleted(rank: int, calls: int) -> Iterator[None]:
    """A step with a model of its own in each call."""
    for _ in range(calls):
        ws.compile(train_step)(*made(), torch.randn(4, 16))
        yield


def sample(calls: int, start: float) -> tuple[float, ...]:
    """One row: what this process holds now."""
    gc.collect()
    alive = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return (
        calls, round(time.monotonic() - start), round(resident, 1), len(os.listdir("/proc/self/fd")),
        threading.active_count(), sum(isinstance(one, Program) for one in alive), len(alive),
        _torch.default_store().num_keys() if dist.is_initialized() else 0,
    )  # fmt: skip


def soak(name: str, case: Callable[[int, int], Iterator[None]], rank: int, calls: int) -> None:
    """Run a case; the first rank prints."""
    rows, start, every = list[tuple[float, ...]](), time.monotonic(), max(1, calls // SAMPLES)
    for call, _ in enumerate(case(rank, calls), start=1):
        if call % every == 0:
            rows.append(sample(call, start))
            if rank == 0:
                print(f"{name:8}" + "".join(f"{cell:>12,}" for cell in rows[-1]), flush=True)
    middle, last = rows[len(rows) // 2 - 1], rows[-1]
    if rank == 0:
        grown = f"{last[2] - middle[2]:+.1f} MiB, {last[6] - middle[6]:+,} objects, {last[3] - middle[3]:+} files"
        print(f"{name:8}  from the middle to the end: {grown}", flush=True)


def rank_main(rank: int, world: int, name: str, calls: int, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    soak(name, {"steps": steps, "ranks": ranks, "sizes": sizes, "deleted": deleted}[name], rank, calls)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    print(f"torch {torch.__version__}\n{'case':8}" + "".join(f"{head:>12}" for head in COLUMNS), flush=True)
    for name in options.cases:
        world, calls = CASES[name]
        mp.spawn(rank_main, args=(world, name, max(SAMPLES, int(calls * options.scale)), free_port()), nprocs=world)


if __name__ == "__main__":
    main()
