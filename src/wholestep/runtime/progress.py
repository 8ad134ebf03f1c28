"""Progress of a compile: events for the user, or one line in the first rank's terminal while it lasts."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TextIO

from ..distributed.launch import job

Progress = Callable[[str, str, float], None]

_QUIET_S = 2.0  # nothing is shown of what takes less
_REWRITE_S = 0.2
_ERASE = "\r\x1b[2K"


@dataclass
class ProgressLine:
    """The line: what is being done, and since when. A thread rewrites it, for a stage may take minutes."""

    name: str
    out: TextIO
    _stages: list[str] = field(default_factory=list[str])
    _shown: bool = False
    _finished: threading.Event = field(default_factory=threading.Event)
    _start: float = field(default_factory=time.monotonic)

    def __call__(self, stage: str, what: str, seconds: float) -> None:
        """As a `progress` of the user's: a stage starts or is done."""
        if what == "start":
            self._stages.append(stage)
        elif stage in self._stages:
            del self._stages[self._stages.index(stage) :]

    @contextmanager
    def showing(self) -> Generator[None]:
        """The line is there inside, and gone afterwards, also where an error ends it."""
        thread = threading.Thread(target=self._rewrite, name="wholestep progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._finished.set()
            thread.join()
            if self._shown:
                self._write(_ERASE)

    def _rewrite(self) -> None:
        wait = _QUIET_S
        while not self._finished.wait(wait):
            stages = list(self._stages)
            stage = f"{stages[-1]}, " if stages else ""
            text = f"wholestep compiles {self.name}: {stage}{time.monotonic() - self._start:.0f} s"
            self._shown = True
            self._write(_ERASE + text[: shutil.get_terminal_size().columns - 1])
            wait = _REWRITE_S

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
            self.out.flush()
        except (OSError, ValueError):  # the terminal is gone
            self._finished.set()


@dataclass
class Stages:
    """Reports the stages of the compiles of a step, called `name`, to what was given as `progress=`."""

    progress: Progress | Literal["auto"] | None
    name: str
    _progress: Progress | None = None

    @contextmanager
    def reporting(self) -> Generator[None]:
        """Stages inside are reported: to the user's function, in a line on a terminal, or not at all."""
        line = None
        if self.progress == "auto" and os.environ.get("WHOLESTEP_PROGRESS") != "0" and job()[0] == 0 and _is_terminal():
            line = ProgressLine(self.name, sys.stderr)
        self._progress = line if self.progress == "auto" else self.progress
        with nullcontext() if line is None else line.showing():
            yield

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """The time inside is that of a stage."""
        start = time.perf_counter()
        self.report(name, "start")
        yield
        self.report(name, "done", time.perf_counter() - start)

    def waits(self, missing: list[int]) -> None:
        """Ranks are waited for."""
        self.report(f"agree: waiting for ranks {missing}", "start")

    def report(self, stage: str, what: str, seconds: float = 0.0) -> None:
        """One event."""
        if self._progress:
            self._progress(stage, what, seconds)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False
