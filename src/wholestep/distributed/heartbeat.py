"""What a rank tells the others of itself: who it is, what its main thread does, and for how long."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..backend.eager import WAITS
from ..errors import __file__ as wholestep_file
from .activity import Activity
from .process import Process, process

CALL = "the same call of the step"
"""What ranks are said to wait at that give each other numbers before it."""
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_INTERNAL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, wholestep_file))
_WAIT = "wait_tensor"
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), "site-packages"
_BUSY_SHARE, _BUSY_S = 0.01, 0.01  # a thread that uses more of a CPU is not blocked


@dataclass(frozen=True)
class Identity(Process):
    """A rank's process."""

    rank: int
    hosts_store: bool

    @staticmethod
    def own(rank: int, hosts_store: bool) -> Identity:
        """This process."""
        return Identity(**vars(process(os.getpid())), rank=rank, hosts_store=hosts_store)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Beat:
    """A heartbeat. `waits`: the main thread waits for other ranks, at a `point` that is the same for all who wait for
    each other; `still_s`: for how long it does what it does. `news`, `meets` and `trail` are those of `Activity`.
    """

    who: Identity
    number: int = 0
    step: str = ""
    calls: int = 0
    what: str = ""
    where: str = ""
    waits: bool = False
    point: str = ""
    news: str = ""
    meets: int = 0
    trail: tuple[tuple[int, int], ...] = ()
    still_s: float = 0.0
    allowance_s: float = 0.0
    has_left: bool = False

    def last(self, silent_s: float = 0.0) -> str:
        """What the rank did then, for how long, and when that was."""
        ago = f", {silent_s:.0f} s ago" if silent_s >= 1 else ""
        return f"{self.what}, for {self.still_s:.0f} s{ago}" + (f"\n  there: {self.where}" if self.where else "")


@dataclass
class MainThread:
    """Looks at what the main thread of this process does. A frame that waits in a collective is one whose line calls
    `wait_tensor`, or that is torch's own, while the thread uses no CPU.
    """

    activity: Activity
    _doing: tuple[Any, ...] = ()
    _looked: float = field(default_factory=time.monotonic)
    _still_s: float = 0.0
    _cpu_s: float = 0.0

    def beat(self, before: Beat, most_s: float) -> Beat:
        """The next heartbeat after `before`. At most `most_s` count as passed: the process may have been stopped."""
        activity, now, step = self.activity, time.monotonic(), self.activity.step()
        frame = _main_frame()
        name, calls = (step.__name__, step.calls) if step is not None else ("", 0)
        which = f"{name} {step.number}" if step is not None else ""
        collective = waited_for(frame)
        point = _point(activity, which, calls, collective)
        doing = (name, calls, activity.inside, activity.busy, activity.waits_at, collective, point, activity.meets)
        cpu_s = _cpu_s() if collective else 0.0
        still_s = self._still_s + min(now - self._looked, most_s)
        if doing != self._doing or (collective and cpu_s - self._cpu_s > _BUSY_S + _BUSY_SHARE * still_s):
            self._doing, self._cpu_s, still_s = doing, cpu_s, 0.0
        self._looked, self._still_s = now, still_s
        where = _user_line(frame) if frame and still_s else ""
        return replace(
            before, number=before.number + 1, step=which, calls=calls, where=where,
            what=_told(activity, name, calls, collective), waits=bool(activity.waits_at or collective), point=point,
            news=activity.news, meets=activity.meets, trail=tuple(activity.trail.values()), still_s=still_s,
            allowance_s=activity.allowance_s if activity.busy else 0.0,
        )  # fmt: skip


def _point(activity: Activity, name: str, calls: int, collective: str) -> str:
    """Where this rank waits. All waits of a call are one point, as a rank may be ahead of another in it; of a call that
    is made again after it was interrupted, they are another one.
    """
    if activity.inside and (collective or activity.waits_at == CALL) and not activity.point:
        return f"call {calls + 1} of {name}, {activity.unfinished} unfinished"
    return activity.point or activity.waits_at or collective


def _told(activity: Activity, name: str, calls: int, collective: str) -> str:
    if activity.busy:
        what = activity.busy
    elif activity.inside:
        what = f"in call {calls + 1} of {name}"
    elif calls:
        what = f"between steps, after call {calls} of {name}"
    else:
        what = "before the first step"
    waits = activity.waits_at or collective
    what += f", waiting at {waits}" if waits else ""
    return what + (f" (its last call ended in {activity.error})" if activity.error else "")


def end_process(reason: str) -> None:
    """End this process from a thread, after the stack of the main thread and the reason. Nothing else is called, as it
    might wait for the main thread.
    """
    frame = _main_frame()
    stack = "".join(traceback.format_stack(frame)) if frame else ""
    os.write(2, f"The main thread of pid {os.getpid()} was here when it was ended:\n{stack}{reason}\n".encode())
    os._exit(1)


def _main_frame() -> FrameType | None:
    # The frames get no name here: this function's own is among them, and such a circle would keep the tensors that the
    # main thread has at this moment, until Python looks for garbage.
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


def waited_for(frame: FrameType | None) -> str:
    """The collective that a thread at this frame waits for; "" where it does not."""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno or 0
        if WAITS in frame.f_globals:
            return frame.f_globals[WAITS].get(line, "")
        if file.endswith(_COLLECTIVES):
            return f"torch's {frame.f_code.co_name}"
        if _WAIT in frame.f_code.co_names and _WAIT in _source_line(file, line):
            return "a collective"
        if not file.startswith(_INTERNAL):
            break
        frame = frame.f_back
    return ""


def _user_line(frame: FrameType) -> str:
    """The innermost line of this thread that is neither torch's, nor wholestep's, nor Python's own."""
    for caller, line in traceback.walk_stack(frame):
        file = caller.f_code.co_filename
        standard = file.startswith(_STANDARD) and _PACKAGES not in file
        if not (standard or file.startswith((*_INTERNAL, "<"))):
            return f"{file}:{line}  {_source_line(file, line)}"
    return ""


def _source_line(file: str, line: int) -> str:
    """A line of source; "" where the main thread empties Python's table of lines at this moment."""
    try:
        return linecache.getline(file, line).strip()
    except (KeyError, TypeError):
        return ""


def _cpu_s() -> float:
    """CPU time of the main thread, where the system tells it."""
    clock: Any = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(threading.main_thread().ident)) if clock is not None else time.monotonic()
