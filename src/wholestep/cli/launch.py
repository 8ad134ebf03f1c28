"""Starts the ranks of the demo as processes of this machine, hears them, and ends them, each by its id."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from wholestep.demo.settings import Settings

GRACE_SECONDS = 10.0  # how long ranks get to end by themselves once rank 0 is done
TRACE_SECONDS = 1.0  # how long other ranks get to report after one failed: the first cause may arrive second


class RankFailed(Exception):
    """A rank raised, was refused or died; the text is that rank's own."""

    def __init__(self, rank: int, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.rank, self.text, self.refused = rank, text, refused


@dataclass
class Report:
    """One thing a rank said, or `exit` when its process ended."""

    rank: int
    event: str
    fields: dict[str, Any]


class Ranks:
    """Running ranks. A context manager: none of their processes outlives the block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[subprocess.Popen[str]] = []
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def __enter__(self) -> "Ranks":
        try:
            for rank in range(self._settings.ranks):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            _end(process)

    def _start(self, rank: int) -> None:
        settings = self._settings
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(settings.ranks),
            "LOCAL_WORLD_SIZE": str(settings.ranks),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",  # ranks share cores: an idle thread must not spin
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        with open(settings.files.log(rank), "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "wholestep.demo.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        self._processes.append(process)
        self._tell(rank, {"settings": settings.to_json()})
        threading.Thread(target=self._hear, args=(rank, process), daemon=True).start()

    def _hear(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in cast(IO[str], process.stdout):
            fields = json.loads(line)
            self._reports.put(Report(rank, fields.pop("event"), fields))
        self._reports.put(Report(rank, "exit", {"code": process.wait(), "time": time.time()}))

    def _tell(self, rank: int, message: dict[str, object]) -> None:
        stdin = cast(IO[str], self._processes[rank].stdin)
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        except BrokenPipeError:  # that rank is gone: its exit is reported anyway
            return

    def ask_to_stop(self) -> None:
        """All ranks save after the same step and end. May be called in a signal handler."""
        self._reports.put(Report(0, "stop", {}))

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What rank 0 reports, until every rank is done.

        Raises:
            RankFailed: as soon as a rank fails or dies.
        """
        done: set[int] = set()
        while len(done) < len(self._processes):
            report = self._next(GRACE_SECONDS if 0 in done else None)
            if report is None:
                late = sorted(set(range(len(self._processes))) - done)
                raise RankFailed(late[0], f"ranks {late} had not ended {GRACE_SECONDS:g} s after rank 0 was done")
            if report.event == "done":
                done.add(report.rank)
            elif report.event == "port":
                for rank in range(1, len(self._processes)):
                    self._tell(rank, {"port": report.fields["port"]})
            elif report.event == "stop":
                self._tell(0, {"stop": True})
                yield "stopping", {}
            elif report.event in ("error", "refused") or (report.event == "exit" and report.rank not in done):
                raise self._first_failure(report)
            elif report.rank == 0 and report.event != "exit":
                yield report.event, report.fields

    def _next(self, seconds: float | None) -> Report | None:
        try:
            return self._reports.get(timeout=seconds)
        except queue.Empty:
            return None

    def _first_failure(self, report: Report) -> RankFailed:
        """Wait a moment for the other ranks' failures and take the earliest: the others follow from it."""
        found = [report]
        deadline = time.monotonic() + TRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            other = self._next(left)
            if other and other.event in ("error", "refused", "exit"):
                found.append(other)
        first = min(found, key=_precedence)
        if first.event != "exit":
            return RankFailed(first.rank, first.fields["text"], refused=first.event == "refused")
        tail = self._settings.files.log(first.rank).read_text().splitlines()[-20:]
        return RankFailed(first.rank, "\n".join([f"the process ended: {_cause(first.fields['code'])}", *tail]))


def _precedence(report: Report) -> tuple[int, float]:
    """Sorts failures: a process that died without a word explains the others, one that ended after a word does not."""
    died = report.event == "exit" and report.fields["code"] not in (0, 1)
    return (0 if died else 2 if report.event == "exit" else 1, report.fields["time"])


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a rank and what it started (compilers): it leads its own process group, so its id names them all."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it has ended since
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin:
        with suppress(BrokenPipeError):
            process.stdin.close()
