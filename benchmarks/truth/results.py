"""What a run of the comparison found, and the tables of it. Imports no torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

BEGIN, END = "<!-- truth: begin -->", "<!-- truth: end -->"
QUIET_CORES = 0.25
ALIKE = 0.04  # measured steps that differ by less are as fast as each other


@dataclass(frozen=True)
class Turn:
    """A few steps of one style: milliseconds of the median step, cores that others took meanwhile, and milliseconds
    of a step by the simulator, on figures taken before and after.
    """

    step_ms: float
    others: float
    simulated_ms: float


@dataclass(frozen=True)
class Style:
    """One style in one scene. Milliseconds of a step; `classes` has those of each class of op, predicted and measured.

    Args:
        name: of the style.
        first_ms: by the simulator, on figures that the job measured at its start, by which it schedules.
        turns: measured, and simulated on figures of the moment.
        waited_ms: of the step, waiting for collectives: predicted, and measured with every op timed.
        collectives: how many of each kind.
        chosen: what `Auto` chose.
        machine: the figures.
    """

    name: str
    first_ms: float
    turns: tuple[Turn, ...]
    waited_ms: tuple[float, float]
    collectives: dict[str, int]
    classes: dict[str, tuple[float, float]]
    hardware: dict[str, Any] = field(default_factory=dict[str, Any])
    chosen: str = ""

    @property
    def counted(self) -> Sequence[Turn]:
        """Turns in which nobody else computed, where there are three."""
        quiet = [turn for turn in self.turns if turn.others <= QUIET_CORES]
        return quiet if len(quiet) >= 3 else self.turns

    @property
    def measured_ms(self) -> float:
        """The median over turns."""
        return median(turn.step_ms for turn in self.counted)

    @property
    def predicted_ms(self) -> float:
        """The median over turns, simulated."""
        return median(turn.simulated_ms for turn in self.counted)

    @property
    def error(self) -> float:
        """Of the simulated step, as a share of the measured one of the same turn: the median."""
        return median(turn.simulated_ms / turn.step_ms for turn in self.counted) - 1


@dataclass(frozen=True)
class Scene:
    """All styles of one model over one link."""

    size: str
    rate: str
    world: int
    styles: tuple[Style, ...]

    @property
    def title(self) -> str:
        """In words."""
        link = "loopback" if self.rate == "none" else self.rate
        return f"{self.size}, {self.world} ranks, {link}"

    def swapped(self) -> list[tuple[str, str]]:
        """Pairs of styles ranked the wrong way round: the first is faster as measured, by more than `ALIKE`."""
        found: list[tuple[str, str]] = []
        for pair in combinations([s for s in self.styles if not s.chosen], 2):
            fast, slow = sorted(pair, key=lambda style: style.measured_ms)
            apart = slow.measured_ms > fast.measured_ms * (1 + ALIKE)
            if apart and slow.predicted_ms < fast.predicted_ms:
                found.append((fast.name, slow.name))
        return found

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self), indent=1)


def read(path: Path) -> Scene:
    """What `Scene.to_json` wrote.

    Raises:
        ValueError: naming the file, when it holds something else: what an earlier version wrote.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        styles: list[dict[str, Any]] = fields.pop("styles")
        return Scene(**fields, styles=tuple(map(_style, styles)))
    except (TypeError, KeyError, IndexError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no scene of this version ({error}): remove it or give another --dir") from error


def _style(fields: dict[str, Any]) -> Style:
    turns: list[dict[str, Any]] = fields.pop("turns")
    waited: list[float] = fields.pop("waited_ms")
    return Style(**fields, turns=tuple(Turn(**turn) for turn in turns), waited_ms=(waited[0], waited[1]))


def markdown(scenes: Iterable[Scene]) -> str:
    """A row for each style of each scene, and what the ranking came to."""
    lines = [
        "| model, ranks, link | style | simulated ms | measured ms | error | at first ms | waits ms | collectives |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    said: list[str] = []
    for scene in scenes:
        for style in scene.styles:
            name = f"{style.name}: {style.chosen}" if style.chosen else style.name
            kinds = ", ".join(f"{count} {kind}" for kind, count in style.collectives.items())
            waits = "{:.0f}, {:.0f}".format(*style.waited_ms)
            lines.append(
                f"| {scene.title} | {name} | {style.predicted_ms:.0f} | {style.measured_ms:.0f} | {style.error:+.0%} "
                f"| {style.first_ms:.0f} | {waits} | {kinds} |"
            )
        wrong = [f"{fast} is faster than {slow}" for fast, slow in scene.swapped()]
        said.append(f"- {scene.title}: {'; '.join(wrong) if wrong else 'ranked as measured'}.")
    return "\n".join([*lines, "", *said]) + "\n"


def into(document: str, text: str) -> str:
    """`document` with `text` between its marks; `text` alone where it has none."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n\n{text}\n{end}{tail}" if begin and end else text
