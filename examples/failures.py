"""One rank fails at its sixth step: every other rank ends with one error that names it.

    torchrun --nproc-per-node 3 examples/failures.py                   # rank 1 is stopped, as by SIGSTOP
    torchrun --nproc-per-node 3 examples/failures.py --how kill        # as by kill -9, or for want of memory
    torchrun --nproc-per-node 3 examples/failures.py --how raise       # an error in its own code

torchrun ends a rank itself as soon as another one has ended. To see what each rank says alone, start them without it:

    for r in 0 1 2; do RANK=$r WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=29500 python examples/failures.py & done
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import wholestep as ws


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The whole step for one device."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def fail(how: str) -> None:
    """What goes wrong on one rank."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("a batch without labels")
    elif how == "exit":
        sys.exit(3)
    elif how == "hang":
        time.sleep(3600)
    elif how == "hang in C":
        ctypes.PyDLL(None).sleep(3600)  # keeps Python's lock: no thread of this rank runs


def batches(rows: int, fails: str, at: int) -> Iterator[Tensor]:
    """This rank's own data; its loader may hang."""
    for number in range(20):
        if number == at and fails:
            print(f"fails now: {fails}", flush=True)
        if number == at and fails == "hang in the loader":
            time.sleep(3600)
        yield torch.randn(rows, 16)


def main(how: str, rank: int, timeout: str, at: int) -> None:
    """Train until `rank` fails, after `at` steps."""
    own = int(os.environ["RANK"]) == rank
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    step = ws.compile(train_step, timeout=timeout)
    for number, x in enumerate(batches(8, how if own else "", at)):
        if own and number == at:
            if how == "leave":
                return
            fail(how)
        step(model, optimizer, x)


HOW = ("kill", "stop", "raise", "exit", "leave", "hang", "hang in C", "hang in the loader")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank fails.", epilog=__doc__)
    parser.add_argument("--how", default="stop", choices=HOW)
    parser.add_argument("--rank", type=int, default=1, help="the rank that fails")
    parser.add_argument("--at", type=int, default=5, help="after so many steps")
    parser.add_argument("--timeout", default="10s", help="the others have ended after it")
    given = parser.parse_args()
    main(given.how, given.rank, given.timeout, given.at)
