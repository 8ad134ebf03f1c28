"""Shows the stages of a command: a live display on a terminal, plain lines elsewhere."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

STAGES = {
    "model": "build the step",
    "capture": "capture the step as one graph",
    "plan": "plan layouts",
    "partition": "write one rank's program",
    "simulate": "simulate the step",
}


class Screen(ABC):
    """The progress display of a command."""

    @abstractmethod
    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A stage starts or is done."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a permanent line."""

    @abstractmethod
    def close(self) -> None:
        """End the live display."""


@final
class PlainScreen(Screen):
    """A line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A line when the stage is done."""
        if done:
            in_brackets = f" ({detail})" if detail else ""
            self.note(f"{STAGES.get(name, name)}: {seconds:.2f} s{in_brackets}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing."""


@final
class LiveScreen(Screen):
    """A line per finished stage, and below it the running stage."""

    def __init__(self, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True)
        self._running: list[TaskID] = []
        self._progress.start()

    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A spinner while it runs, a line when it is done."""
        label = STAGES.get(name, name)
        for row in self._running:  # stages do not overlap
            self._progress.remove_task(row)
        self._running = [] if done else [self._progress.add_task(label, total=None)]
        if done:
            line = Text.assemble(("✓ ", "green"), f"{label}  ", (f"{seconds:.2f} s {detail}", "dim"))
            self._progress.console.print(line)

    def note(self, text: str) -> None:
        """Print a line above the live display."""
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Remove the live rows."""
        self._progress.stop()


def screen(console: Console) -> Screen:
    """The display that fits the console."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


@contextmanager
def staged(shown: Screen, name: str) -> Generator[list[str]]:
    """Show a stage and its time, with the details that the body appends to the yielded list."""
    details: list[str] = []
    start = time.perf_counter()
    shown.stage(name, done=False, seconds=0.0)
    yield details
    shown.stage(name, done=True, seconds=time.perf_counter() - start, detail=", ".join(details))


@contextmanager
def each(shown: Screen, count: int) -> Generator[Callable[[str], None]]:
    """Show candidates one after the other, each with its time."""
    before: list[tuple[str, float]] = []

    def watch(name: str) -> None:
        now = time.perf_counter()
        if before:
            shown.stage(before[-1][0], done=True, seconds=now - before[-1][1])
        place = f"[{len(before) + 1}/{count}] " if len(before) < count else ""
        before.append((place + name, now))
        shown.stage(before[-1][0], done=False, seconds=0.0)

    yield watch
    if before:
        shown.stage(before[-1][0], done=True, seconds=time.perf_counter() - before[-1][1])
