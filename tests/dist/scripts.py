"""Run a script on several ranks that end as a user's processes do: with their exit codes, and their output in files.

Ranks are forked as those of `launch.run_ranks` are, but nothing waits for the others: each ends when its script does.
"""

import atexit
import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.launch import HOST, USUAL, start_server
from wholestep.distributed.launch import World
from wholestep.hardware.hardware import Hardware
from wholestep.runtime import finalize


@dataclass
class Ranks:
    """The processes of a script, and the folder of what they write."""

    processes: list[BaseProcess]
    folder: Path

    def output(self, rank: int) -> str:
        """What a rank has written."""
        return (self.folder / f"rank{rank}.txt").read_text()

    def wait(self, ranks: list[int], limit_s: float) -> dict[int, int | None]:
        """Exit codes of these ranks; None for one that has not ended in time."""
        end = time.monotonic() + limit_s
        for rank in ranks:
            self.processes[rank].join(max(0.0, end - time.monotonic()))
        return {rank: self.processes[rank].exitcode for rank in ranks}

    def wait_for_line(self, rank: int, line: str, limit_s: float = 60.0) -> None:
        """Until a rank has written a line."""
        end = time.monotonic() + limit_s
        while line not in self.output(rank).splitlines():
            assert time.monotonic() < end, self.output(rank)
            time.sleep(0.02)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()  # also one that is stopped
            process.join()


def start(script: Path, options: list[str], world: int, folder: Path) -> Ranks:
    """Start `world` ranks; the first one hosts the store."""
    start_server()
    port = _free_port()
    context = multiprocessing.get_context("forkserver")
    ranks = Ranks([], folder)
    for rank in range(world):
        output = folder / f"rank{rank}.txt"
        output.write_text("")
        process = context.Process(target=_main, args=(script, options, rank, world, port, output))
        process.start()
        ranks.processes.append(process)
    return ranks


def _free_port() -> int:
    """A port on which nobody listens, below those that the system hands out: none of these may take it until the first
    rank listens there, nor may a rank that connects too early meet itself.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port := random.SystemRandom().randrange(15_000, 32_000)))
            return port


def output_of(script: Path, options: list[str], world: int, folder: Path, limit_s: float = 200.0) -> str:
    """What ranks of a script write, the first one first; all must end well."""
    with start(script, options, world, folder) as ranks:
        codes = ranks.wait(list(range(world)), limit_s)
        text = "".join(map(ranks.output, range(world)))
    assert set(codes.values()) == {0}, f"{codes}\n{text[-6000:]}"
    return text


def _usual(_: World, stage_axis: str) -> Hardware:
    return USUAL


_destroy, _groups = dist.destroy_process_group, list[dist.ProcessGroup]()


def _destroy_only_names(group: dist.ProcessGroup | None = None) -> None:
    """Destroy groups, whose objects live on: where DDP holds the last reference, the end of a gloo group hangs now and
    then, as it waits for a thread that waits for the GIL (torch 2.13).
    """
    _groups.extend(dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]
    _destroy(group)


def _main(script: Path, options: list[str], rank: int, world: int, port: int, output: Path) -> None:
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    finalize.measure_hardware = _usual
    dist.destroy_process_group = _destroy_only_names
    sys.argv, code = [str(script), *options], 0
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # as the interpreter does
        sys.last_value, code = error, 1
        traceback.print_exc()
    exit_functions: Any = atexit._run_exitfuncs  # pyright: ignore[reportPrivateUsage]
    exit_functions()  # a forked process does not call them
    os._exit(code)
