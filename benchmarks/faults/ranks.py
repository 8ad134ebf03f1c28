"""Processes of a job, forked from a server that has torch and wholestep imported; each says things through a pipe."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.launch import HOST, start_server

MESSAGE_END_S = 5.0
_STORE = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented as public
STACK_S = 0.3  # a process gets to write its stack
Message = tuple[Any, ...]


class Job:
    """The ranks of one start of a job, and what each has said. On leaving, all of them are killed.

    `target(*args, rank, say)` is a top-level function of an importable module; what it raises is said as `error`.
    """

    def __init__(self, world: int, target: Callable[..., None], *args: Any, timeout_s: float = 60.0) -> None:
        start_server()
        self.begun, self.timeout_s = time.monotonic(), timeout_s
        self.said: list[list[Message]] = [[] for _ in range(world)]
        self._store = _STORE(HOST, 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        context = multiprocessing.get_context("forkserver")
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, world, self._store.port, timeout_s, self._stacks.name, theirs, target, args)
            process = context.Process(target=_rank_main, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes[ours] = rank

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill(range(len(self._processes)))
        for process in self._processes:
            process.join()
        self.listen(MESSAGE_END_S, lambda: False)
        for pipe in self._pipes:
            pipe.close()
        self._stacks.cleanup()

    def kill(self, ranks: "range | list[int]") -> None:
        """End these processes at once."""
        for rank in ranks:
            self._processes[rank].kill()

    def dead(self, rank: int) -> bool:
        """True once the process has ended: its end of the pipe is closed."""
        return rank not in self._pipes.values()

    def listen(self, seconds: float, enough: Callable[[], bool]) -> bool:
        """Take in what ranks say until it is `enough`; False after so many seconds, or when nobody is left to speak."""
        end = time.monotonic() + seconds
        while not enough():
            left = end - time.monotonic()
            if left <= 0 or not self._pipes:
                return False
            for pipe in wait(list(self._pipes), left):
                assert isinstance(pipe, Connection)
                self._take(pipe)
        return True

    def _take(self, pipe: Connection) -> None:
        try:
            self.said[self._pipes[pipe]].append(pipe.recv())
        except (EOFError, OSError):  # it has ended, perhaps within a message
            del self._pipes[pipe]
            pipe.close()

    def of_kind(self, kind: str, rank: int | None = None) -> list[Message]:
        """What was said of one kind, by all ranks or by one."""
        said = self.said if rank is None else [self.said[rank]]
        return [message for of_rank in said for message in of_rank if message[0] == kind]

    def stacks(self) -> str:
        """Where the processes are that still run."""
        lines: list[str] = []
        for rank, process in enumerate(self._processes):
            file = Path(self._stacks.name) / str(rank)
            if process.is_alive() and process.pid is not None and file.exists():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(STACK_S)
                lines += [f"rank {rank} was here:", file.read_text()]
            else:
                lines.append(f"rank {rank} had ended or not begun")
        return "\n".join(lines)


def _rank_main(
    rank: int, world: int, port: int, timeout_s: float, stacks: str, pipe: Connection, target: Callable[..., None],
    args: Any,
) -> None:  # fmt: skip
    with open(Path(stacks) / f"{rank}.new", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        os.rename(file.name, Path(stacks) / str(rank))
        _serve(rank, world, port, timeout_s, pipe, target, args)


def _serve(
    rank: int, world: int, port: int, timeout_s: float, pipe: Connection, target: Callable[..., None], args: Any
) -> None:
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

    speaking = threading.Lock()

    def say(*message: Any) -> None:
        with speaking:
            pipe.send(message)

    try:
        store = _STORE(HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        target(*args, rank, say)
    except BaseException:
        say("error", traceback.format_exc())
    say("end")
    signal.pause()  # until it is killed: leaving earlier would break collectives of slower ranks
