"""What calling a compiled step costs over running its program: target 100 us + 0.1 us per state tensor.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [--parameters 200] [--rounds 300] [--on-nonfinite skip]

The step has many tiny parameters, so computing takes as little of it as it can. The first three take turns, call by
call, so that a busy moment of the machine meets all of them alike:

    eager      the step as written, on one device, without any communication
    compiled   the compiled step
    bare       the generated function alone, on inputs gathered beforehand
    hollow     the compiled step with its generated function replaced by one that returns earlier results

Overhead is the median over turns of (compiled - bare), both in CPU time of the calling thread, which leaves out what
other processes of a busy machine take and what a rank waits for others. The first four columns of times are wall time.
With `--beside PATH`, the `src` of another checkout, two processes take turns, one with each: what a call does around
its program, in CPU time, and the median over turns of the ratio and of the difference. A busy machine meets both alike.

With several ranks, hundreds of small collectives still make that difference noise, so there the overhead is `hollow`:
what a call does around the generated function, and nothing else, measured on rank 0 while the others wait.
"""

import argparse
import gc
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.call_structure import take_apart

BASE_US, PER_STATE_TENSOR_US = 100.0, 0.1
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
}


class Many(nn.Module):
    """A sum of `count` scaled vectors: as many parameters as wanted and next to no arithmetic."""

    def __init__(self, count: int, size: int = 4) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((size,), 0.01 * i)) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """(b, size) -> (b, size)."""
        return x * torch.stack(list(self.parts)).sum(0)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def timed_us(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and CPU time of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return 1e6 * (time.perf_counter() - wall), 1e6 * (time.thread_time() - cpu)


def median_wall(times: list[tuple[float, float]]) -> float:
    return statistics.median(wall for wall, _ in times)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure(name: str, parameters: int, rounds: int, style: str, on_nonfinite: Any = None) -> dict[str, float]:
    """Medians in microseconds on this rank."""
    x = torch.randn(2, 4)
    model, eager_model = Many(parameters), Many(parameters)
    optimizer, eager_optimizer = OPTIMIZERS[name](model), OPTIMIZERS[name](eager_model)
    options: Any = {"check_every": 10**9, "verify": False, "on_nonfinite": on_nonfinite}  # one rank calls alone below
    step = ws.compile(train_step, parallel=ws.DataParallel(style), **options)
    for _ in range(3):
        step(model, optimizer, x)
        train_step(eager_model, eager_optimizer, x)
    program = step.programs[-1]
    inputs = program.gather_inputs(take_apart(((model, optimizer, x), {})).leaves)
    run, results = program.run, program.run(inputs)
    whole, bare, eager, hollow = [], [], [], [(0.0, 0.0)]
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        whole.append(timed_us(lambda: step(model, optimizer, x)))
        train_step(eager_model, eager_optimizer, x)  # bare finds the caches as compiled does
        bare.append(timed_us(lambda: run(inputs)))
        eager.append(timed_us(lambda: train_step(eager_model, eager_optimizer, x)))
    program.run = lambda _: results
    barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        hollow = [timed_us(lambda: step(model, optimizer, x)) for _ in range(max(rounds, 100))]
    barrier()
    gc.enable()
    held = parameters + sum(isinstance(v, Tensor) for state in optimizer.state.values() for v in state.values())
    return {
        "tensors": held,
        "step": median_wall(whole),
        "bare": median_wall(bare),
        "eager": median_wall(eager),
        "hollow": median_wall(hollow),
        "difference": statistics.median(a - b for (_, a), (_, b) in zip(whole, bare, strict=True)),
    }


def hollow_turns(parameters: int, given: Any, said: Any) -> None:
    """For each number of calls that is `given`, say the CPU microseconds of a call around its program."""
    torch.set_num_threads(1)
    x, model = torch.randn(2, 4), Many(parameters)
    optimizer = OPTIMIZERS["SGD"](model)
    step = ws.compile(train_step, check_every=10**9, verify=False)
    for _ in range(3):
        step(model, optimizer, x)
    program = step.programs[-1]
    results = program.run(program.gather_inputs(take_apart(((model, optimizer, x), {})).leaves))
    program.run = lambda _: results
    gc.disable()
    for line in given:
        begin = time.thread_time()
        for _ in range(int(line)):
            step(model, optimizer, x)
        print(1e6 * (time.thread_time() - begin) / int(line), file=said, flush=True)


def beside(path: str, parameters: int, turns: int, calls: int = 50) -> None:
    """Compare this checkout with another one, turn by turn."""
    workers: list[subprocess.Popen[str]] = []
    for source in (str(Path(ws.__file__).parents[1]), path):
        known = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(Path(__file__).parents[1])])}
        code = (
            f"import sys; from benchmarks.overhead import hollow_turns as run; run({parameters}, sys.stdin, sys.stdout)"
        )
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": known}
        workers.append(subprocess.Popen([sys.executable, "-c", code], **pipes))

    def turn(worker: subprocess.Popen[str]) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(calls, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    try:
        for worker in workers:
            turn(worker)  # compiles
        pairs = [(turn(workers[0]), turn(workers[1])) for _ in range(turns)]
    finally:
        for worker in workers:
            worker.communicate(timeout=60)
    here, there = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    more = statistics.median(a - b for a, b in pairs)
    print(
        f"around a program: {here:.1f} us here, {there:.1f} us there; ratio {ratio:.3f}, {more:+.2f} us, {turns} turns"
    )


def report(name: str, style: str, ranks: int, m: dict[str, float]) -> bool:
    """Print a row; True when the overhead is within the target."""
    target = BASE_US + PER_STATE_TENSOR_US * m["tensors"]
    overhead = m["difference"] if ranks == 1 else m["hollow"]
    cells = [m["tensors"], m["eager"], m["step"], m["bare"], m["hollow"], overhead]
    row = "".join(f"{cell:9.0f}" for cell in cells) + f"{overhead / m['tensors']:11.2f}{target:8.0f}"
    print(f"{name:12} {f'{style}, {ranks} ranks':22}{row}  {'ok' if overhead <= target else 'OVER'}", flush=True)
    return overhead <= target


def rank_main(rank: int, ranks: int, port: int, options: argparse.Namespace, verdicts: list[bool]) -> None:
    """All measurements of one world size; rank 0 reports."""
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in OPTIMIZERS:
        for style in ("replicate", "fully_shard"):
            rounds = options.rounds if ranks == 1 else max(10, options.rounds // 10)
            measured = measure(name, options.parameters, rounds, style, options.on_nonfinite)
            if rank == 0:
                verdicts.append(report(name, style, ranks, measured))
    if ranks > 1:
        barrier()
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=300, help="turns in a world of 1; a tenth of them with 2 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--on-nonfinite", choices=["skip", "raise"], help="an option of the compiled step")
    parser.add_argument("--check", action="store_true", help="exit 1 when a world of 1 is over its target")
    parser.add_argument("--beside", metavar="PATH", help="compare with the src of another checkout, in turns")
    options = parser.parse_args()
    if options.beside:
        beside(options.beside, options.parameters, options.rounds)
        return 0
    print(f"torch {torch.__version__}, {options.parameters} parameters, medians in us")
    heads = "".join(f"{head:>9}" for head in ("tensors", "eager", "compiled", "bare", "hollow", "overhead"))
    print(f"{'optimizer':12} {'style':22}{heads}{'us / tensor':>11}{'target':>8}")
    verdicts: list[bool] = []
    for ranks in options.ranks:
        if ranks == 1:
            rank_main(0, 1, 0, options, verdicts)
        else:
            mp.spawn(rank_main, args=(ranks, free_port(), options, []), nprocs=ranks)
    return int(options.check and not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
