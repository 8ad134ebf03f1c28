"""Shows a run while it goes on: a live display on a terminal, plain lines elsewhere."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

STAGES = {
    "processes": "start the ranks",
    "model": "make the step",
    "data": "read the text, build the model",
    "capture": "capture the step as one graph",
    "plan": "plan where tensors rest",
    "simulate": "predict the step",
    "partition": "write one rank's program",
    "backend": "prepare it to run",
    "agree": "check that all ranks agree",
    "place": "put parameters in place",
}
PLAIN_SECONDS = 5.0  # between plain lines


@dataclass(frozen=True)
class Progressed:
    """Where training stands after a step.

    `exposed` is the share of the step spent waiting for other ranks; None where the backend does not tell.
    """

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    exposed: float | None

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        exposed = "not measured" if self.exposed is None else f"{self.exposed:.0%}"
        return f"loss {self.loss:.3f} | {speed} | exposed communication {exposed}"


class Screen(ABC):
    """What a run shows of itself."""

    @abstractmethod
    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A stage starts or is done."""

    @abstractmethod
    def step(self, now: Progressed) -> None:
        """A training step is done."""

    @abstractmethod
    def note(self, text: str) -> None:
        """A line that stays."""

    @abstractmethod
    def close(self) -> None:
        """Nothing live is shown from here on."""


@final
class PlainScreen(Screen):
    """A line per stage, and a line for the first step, the last and one every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0.0

    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A line when the stage is done."""
        if done:
            self.note(f"{STAGES.get(name, name)}: {seconds:.2f} s{_in_brackets(detail)}")

    def step(self, now: Progressed) -> None:
        """A line now and then."""
        if now.step in (1, now.steps) or time.monotonic() - self._shown > PLAIN_SECONDS:
            self._shown = time.monotonic()
            self.note(f"step {now.step}/{now.steps} | {now}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left to do."""
        return


@final
class LiveScreen(Screen):
    """A line per finished stage; below it, while it runs, the present stage or the training bar."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn()
        )
        self._training: TaskID | None = None
        self._running: list[TaskID] = []
        self._live = Live(self._progress, console=console, transient=True)
        self._live.start()

    def stage(self, name: str, done: bool, seconds: float, detail: str = "") -> None:
        """A spinner while it runs, a line when it is done."""
        label = STAGES.get(name, name)
        for row in self._running:  # stages do not overlap
            self._progress.remove_task(row)
        self._running = [] if done else [self._progress.add_task(label, total=None)]
        if done:
            self._finished(label, f"{seconds:.2f} s {detail}")

    def step(self, now: Progressed) -> None:
        """The bar moves on."""
        if self._training is None:
            self._training = self._progress.add_task("train", total=now.steps)
        self._progress.update(self._training, completed=now.step, description=f"step {now.step}/{now.steps}")
        self._live.update(Group(self._progress, Text(f"  {now}")))
        if now.step == now.steps:
            self._finished(f"step {now.step}/{now.steps}", str(now))

    def note(self, text: str) -> None:
        """A line above what is live."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """The live rows go."""
        self._live.stop()

    def _finished(self, label: str, detail: str) -> None:
        self._live.console.print(Text.assemble(("✓ ", "green"), f"{label}  ", (detail, "dim")))


def screen(console: Console) -> Screen:
    """The display that fits the console."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""


@contextmanager
def staged(shown: Screen, name: str) -> Generator[list[str]]:
    """Show how long a stage takes; what it appends to the list stands beside that."""
    said: list[str] = []
    start = time.perf_counter()
    shown.stage(name, done=False, seconds=0.0)
    yield said
    shown.stage(name, done=True, seconds=time.perf_counter() - start, detail=", ".join(said))


@contextmanager
def each(shown: Screen, count: int) -> Generator[Callable[[str], None]]:
    """Shows one candidate after the other, each with the seconds it took."""
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
