"""The two drawings of a report as data: live bytes in columns of time, and spans by stream in parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cost.timeline import COMPUTE, WAIT, Span, Timeline

COLUMNS = 720
"""Number of columns of the memory chart; each shows the peak of its part of the step."""


def columns(memory: Sequence[tuple[float, int]], step_us: float, count: int = COLUMNS) -> list[int]:
    """The peak bytes in each of `count` equal parts of the step. `memory`: (end of a node, live bytes during it)."""
    most = [0] * count
    last = 0
    for end, size in memory:
        first, last = last, min(int(end / step_us * count), count - 1) if step_us else 0
        for column in range(first, last + 1):
            most[column] = max(most[column], size)
    return most


def peak_at(made: Timeline) -> float:
    """Time of the peak in microseconds: the middle of the first node that reaches it."""
    before = 0.0
    for end, size in made.memory:
        if size == made.peak.size_bytes:
            return (before + end) / 2
        before = end
    return 0.0


def outline(most: Sequence[int], top: int) -> str:
    """An SVG path of the area under columns of bytes, 0 to len(most) wide and 100 high for `top` bytes."""
    parts = ["M0 100"]
    parts += [f"V{100 - 100 * size / max(top, 1):.2f}H{column + 1}" for column, size in enumerate(most)]
    return "".join([*parts, "V100Z"])


def lanes(made: Timeline) -> dict[str, Any]:
    """Spans for the page's script, in microseconds; strings are numbers into the list `words`."""
    words: dict[str, int] = {}

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    drawn: dict[str, list[Span]] = {stream: [] for stream in made.streams}
    for span in made.spans:
        drawn[span.stream].append(span)
    found = [
        {
            "title": title(stream),
            "kind": stream if stream in (COMPUTE, WAIT) else "axis",
            "start": [round(s.start_us, 3) for s in spans],
            "us": [round(s.us, 3) for s in spans],
            "node": [s.name for s in spans],
            "op": [number(s.op) for s in spans],
            "phase": [number(s.phase) for s in spans],
            "module": [number(s.module) for s in spans],
            "bytes": [s.size_bytes for s in spans],
        }
        for stream, spans in drawn.items()
    ]
    return {"step": round(made.simulated.step_us, 3), "lanes": found, "words": list(words)}


def title(stream: str) -> str:
    """The name of a stream on the page."""
    return stream if stream in (COMPUTE, WAIT) else f"axis {stream}"
