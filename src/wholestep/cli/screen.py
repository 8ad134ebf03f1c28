"""Shows the stages of a command: a live display on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

STAGES = {
    "model": "build the step",
    "capture": "capture the step as one graph",
    "plan": "plan layouts",
    "partition": "write one rank's program",
    "simulate": "simulate the step",
}


class Screen:
    """The progress display of a command: a line per finished stage, and on a terminal the running stage below. A copy
    of the process, which has no thread that draws, shows nothing.
    """

    def __init__(self, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn()
        self._console, self._process = console, os.getpid()
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        if self._progress:
            self._progress.start()

    @property
    def _live(self) -> Progress | None:
        return self._progress if os.getpid() == self._process else None

    def note(self, text: str) -> None:
        """Print a permanent line."""
        if os.getpid() == self._process:
            self._console.print(text, markup=False, highlight=False, soft_wrap=self._live is None)

    def close(self) -> None:
        """End the live display."""
        if self._live:
            self._live.stop()

    def _begin(self, name: str) -> float:
        if self._live:
            self._live.add_task(STAGES.get(name, name), total=None)
        return time.perf_counter()

    def _end(self, name: str, start: float, detail: str = "") -> None:
        took = f"{time.perf_counter() - start:.2f} s"
        if self._live is None:
            self.note(f"{STAGES.get(name, name)}: {took}" + (f" ({detail})" if detail else ""))
            return
        for row in self._live.task_ids:  # stages do not overlap
            self._live.remove_task(row)
        self._console.print(Text.assemble(("✓ ", "green"), f"{STAGES.get(name, name)}  ", (f"{took} {detail}", "dim")))

    @contextmanager
    def stage(self, name: str) -> Generator[list[str]]:
        """Show a stage and its time, with the details that the body appends to the yielded list."""
        details: list[str] = []
        start = self._begin(name)
        yield details
        self._end(name, start, ", ".join(details))

    @contextmanager
    def amount(self, name: str, total: float) -> Generator[Callable[[float], None]]:
        """Show how much of `total` is done, on a terminal; the yielded function is told of each further part."""
        row = self._live.add_task(name, total=total) if self._live else None

        def advance(part: float) -> None:
            if self._live and row is not None:
                self._live.update(row, advance=part)

        yield advance
        if self._live and row is not None:
            self._live.remove_task(row)

    @contextmanager
    def each(self, count: int) -> Generator[Callable[[str], None]]:
        """Show candidates one after the other, each with its time."""
        running: list[tuple[str, float]] = []

        def watch(name: str) -> None:
            if running:
                self._end(*running[-1])
            name = f"[{len(running) + 1}/{count}] {name}" if len(running) < count else name
            running.append((name, self._begin(name)))

        yield watch
        if running:
            self._end(*running[-1])
