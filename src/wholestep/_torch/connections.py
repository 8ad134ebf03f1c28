"""Ends collectives that wait for a rank that does not come."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_POLLED = re.compile(r"tfd:\s*(\d+) events:\s*\w+ data:\s*(\w+)")


def break_gloo_connections() -> int:
    """Shut this process's gloo connections down, so that waiting collectives raise. Returns how many there were.

    gloo has no abort (`ProcessGroupGloo.abort` of 2.11 to 2.13 does nothing). gloo registers its sockets in an epoll
    with a pointer as data; libuv (of the store) and Python's event loops with the descriptor, in the lower half of the
    data: Python leaves what the upper half held. Linux only; elsewhere 0.
    """
    count = 0
    for fd, _ in _descriptors("anon_inode:[eventpoll]"):
        try:
            polled = _POLLED.findall(Path(f"/proc/self/fdinfo/{fd}").read_text())
        except OSError:
            continue
        count += sum(_shut_down(int(target)) for target, data in polled if int(data[-8:], 16) != int(target))
    return count


def break_connections_to(port: int) -> None:
    """Shut this process's connections to a port of any host down: requests that wait for an answer raise."""
    for fd, _ in _descriptors("socket:"):
        if _peer_port(fd) == port:
            _shut_down(fd)


def listens_at(port: int) -> bool:
    """Whether this process listens at a port. Linux only; elsewhere False."""
    tables = [path for name in ("tcp", "tcp6") if (path := Path("/proc/self/net") / name).exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
    }
    return any(target in sockets for _, target in _descriptors("socket:"))


def abort_groups() -> None:
    """Abort the process groups that can be aborted (NCCL)."""
    dist.distributed_c10d._abort_process_group()


def set_group_timeout(group: Any, timeout_s: float) -> None:
    """Set the time after which the watchdog of a group (NCCL) ends the process; `_set_pg_timeout` (2.3 to 2.15)."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _descriptors(kind: str) -> Iterator[tuple[int, str]]:
    """Descriptors of this process and what they are, where that begins with `kind`."""
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.exists() else ():
        try:
            target = os.readlink(folder / name)
        except OSError:  # closed meanwhile
            continue
        if target.startswith(kind):
            yield int(name), target


def _peer_port(fd: int) -> int | None:
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            address: Any = connection.getpeername()
    except OSError:
        return None
    return int(cast(Any, address)[1]) if isinstance(address, tuple) else None


def _shut_down(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # no connected socket
        return False
    return True
