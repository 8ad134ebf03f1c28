"""Run one function on several gloo ranks of this machine and hand back what each returned.

Ranks are fresh processes, forked from a server that has torch imported and a step captured already (`warm.py`), so a
job of two ranks costs well under a second and no state leaks from one job to the next. What a rank would measure of
the machine at its first call is told to it, the same in every run; jobs that are about measuring say so.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wholestep.distributed.activity import ACTIVITY
from wholestep.distributed.launch import World
from wholestep.hardware.curves import CollectiveCost
from wholestep.hardware.hardware import Hardware
from wholestep.runtime import finalize

HOST = "127.0.0.1"
STACK_SECONDS = 1.0  # how long a hanging rank gets to write its stack
DEATH_SECONDS = 0.5  # how long after a failure another rank may turn out dead: peers see its broken connection first
EXIT_SECONDS = 10.0  # how long a rank gets to tear its process group down once all results are in
PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.export._trace",  # looked up where a trace reads a number of a tensor, as SGD its rate
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.validator",
    "torch.testing._internal.composite_compliance",
    "wholestep",
    "tests.dist.warm",
]
USUAL = Hardware.measured(
    flops_per_us=77_000.0, memory_bytes_per_us=18_000.0, launch_us=28.0, link_us=200.0, link_bytes_per_us=1_100.0,
    math_bytes_per_us=9_000.0, attention_flops_per_us=44_000.0, view_us=14.0, bucket_copy_bytes_per_us=5_000.0,
    collectives=(
        CollectiveCost("all_reduce", 200.0, 0.0009, 1_200.0, 0.00056, 213.0, 0.00004, 0.0, 1.1),
        CollectiveCost("all_gather", 195.0, 0.0012, 360.0, 0.0013, 238.0, 0.0002, 0.0, 1.2),
        CollectiveCost("reduce_scatter", 127.0, 0.0009, 430.0, 0.0006, 208.0, 0.00016, 0.001, 1.2),
    ),
)  # as two ranks on loopback measured it  # fmt: skip


class RankError(RuntimeError):
    """A rank raised or died; the text holds its traceback."""


class RankTimeout(TimeoutError):
    """Some ranks had not finished in time; the text holds their stacks."""


def start_server() -> None:
    """Start the process that ranks are forked from. Does nothing when it runs already."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, measures: bool = False
) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` gloo ranks and return their results in rank order.

    `fn` is a top-level function of an importable module; `args` and results are pickled. Ranks know the machine as
    `USUAL` unless the job `measures` it. Raises `RankError` with the traceback of the first rank that failed, and
    `RankTimeout` when not all have finished after `timeout` seconds. No rank outlives the call.
    """
    start_server()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    job = pickle.dumps((fn, args, measures))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as stacks:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(rank, world, store.port, timeout, stacks, theirs, job), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            results = _collect(ranks, timeout, Path(stacks))
            for process, connection in ranks:
                connection.close()  # tells the rank that nobody needs it any longer
                process.join(EXIT_SECONDS)
            return results
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
                process.join()


def _collect(ranks: list[tuple[BaseProcess, Connection]], timeout: float, stacks: Path) -> list[Any]:
    deadline = time.monotonic() + timeout
    rank_of = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    results: dict[int, Any] = {}
    failures: list[tuple[bool, float, str]] = []
    while rank_of:
        ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise RankTimeout(_hang_text(ranks, list(rank_of.values()), timeout, stacks))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank, died = rank_of.pop(connection), False
            try:
                when, ok, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                ranks[rank][0].join(EXIT_SECONDS)
                code = ranks[rank][0].exitcode
                died, when, ok = True, time.monotonic(), False
                value = f"the process ended with exit code {code} and no result"
            if ok:
                results[rank] = value
            else:
                failures.append((not died, when, f"rank {rank} of {len(ranks)} failed:\n{value}"))
        if failures:
            if any(not alive for alive, _, _ in failures) or not ready or not rank_of:
                raise RankError(min(failures)[-1])
            deadline = min(deadline, time.monotonic() + DEATH_SECONDS)
    for (rank, (_, ran)), (other, (_, theirs)) in combinations(sorted(results.items()), 2):
        apart = [call for call in ran.keys() & theirs.keys() if ran[call] != theirs[call]]
        if apart:
            raise RankError(f"ranks {rank} and {other} ran different programs until call {min(apart)}")
    return [results[rank][0] for rank in range(len(ranks))]


def _hang_text(ranks: list[tuple[BaseProcess, Connection]], late: list[int], timeout: float, stacks: Path) -> str:
    for rank in late:
        pid = ranks[rank][0].pid
        if pid is not None and (stacks / str(rank)).exists():  # else the handler is not set yet
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    lines = [f"ranks {late} of {len(ranks)} had not finished after {timeout:g} s"]
    for rank in late:
        file = stacks / str(rank)
        lines += [f"rank {rank} was here:", file.read_text() if file.exists() else "  (still starting)"]
    return "\n".join(lines)


def _usual(_: World, stage_axis: str) -> Hardware:
    return USUAL


def _rank_main(rank: int, world: int, port: int, timeout: float, stacks: str, results: Connection, job: bytes) -> None:
    with open(Path(stacks) / f"{rank}.new", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        os.rename(stack.name, Path(stacks) / str(rank))
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
        }
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        try:
            store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=timeout))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
            fn, args, measures = pickle.loads(job)
            if not measures:
                finalize.measure_hardware = _usual
            result = fn(rank, world, *args)
            whole = ACTIVITY.failure is None and not ACTIVITY.error
            message = pickle.dumps((time.monotonic(), True, (result, dict(ACTIVITY.trail.values()) if whole else {})))
        except BaseException:  # SystemExit and KeyboardInterrupt are failures of a rank as well
            message = pickle.dumps((time.monotonic(), False, traceback.format_exc()))
        results.send_bytes(message)
        results.poll(None)  # until the caller hangs up: leaving earlier would break collectives of slower ranks
        if dist.is_initialized():
            dist.destroy_process_group()
