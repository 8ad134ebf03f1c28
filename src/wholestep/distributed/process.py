"""A process, as other processes know it: whether it still runs, where they can see it."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of some host. `place` is equal for processes that see each other's ids; `started` tells reused ids
    apart. On systems without /proc, both are empty, and no process sees another.
    """

    host: str
    pid: int
    place: str
    started: str

    def is_seen_from(self, other: Process) -> bool:
        """True where `other` can look this process up by its id."""
        return bool(self.place) and self.place == other.place

    def is_gone(self, seen_from: Process) -> bool:
        """True where the process is seen to have ended."""
        if not self.is_seen_from(seen_from):
            return False
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def is_stopped(self, seen_from: Process) -> bool:
        """True where the process is seen to be stopped by a signal, or by a debugger."""
        return self.is_seen_from(seen_from) and _stat(self.pid)[0] in ("T", "t")


def process(pid: int) -> Process:
    """The process of this host with an id, such as this one (`os.getpid()`)."""
    place = ""
    with contextlib.suppress(OSError):
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return Process(socket.gethostname(), pid, place, _stat(pid)[1])


def _stat(pid: int) -> tuple[str, str]:
    """State of a process and when it started; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
