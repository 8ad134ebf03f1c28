"""Who steps when, and which of the measured turns count."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

QUIET_CORES = 0.25
LEAST_QUIET = 3


@dataclass(frozen=True)
class Turn:
    """A few steps of one peer, beside the floor's turn just before it. Milliseconds; the median over the turn's steps.

    Args:
        step_ms: of a step, from when the last rank began it to when the last rank was done.
        cpu_ms: processor time of a step, all ranks together.
        sent_bytes: by one rank in a step.
        others: cores that were taken by other processes meanwhile, and by the hypervisor.
        speed_ms: a fixed piece of arithmetic on the slowest rank, just before.
        floor_ms: the floor's step.
        floor_update_ms: the part of it that the optimizer took.
        floor_others: as `others`, during the floor's turn.
        calling_ms: the part of `cpu_ms` of the threads that call the step, which compute.
        packets_ms: of a step, processor time in which the kernel handles packets: no process's.
        simulated_ms: of a step, for the machine as it was measured just after; 0 where nothing is simulated.
    """

    step_ms: float
    cpu_ms: float
    sent_bytes: float
    others: float
    speed_ms: float
    floor_ms: float
    floor_update_ms: float
    floor_others: float
    calling_ms: float = 0.0
    packets_ms: float = 0.0
    simulated_ms: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether both it and the floor had the machine for themselves."""
        return max(self.others, self.floor_others) <= QUIET_CORES


def order(number: int, peers: Sequence[str], anchor: str, every: int = 3) -> list[str]:
    """Turns of round `number`: each peer once, another first in each round, the anchor before every few of them."""
    others = [peer for peer in peers if peer != anchor]
    start = number % len(others) if others else 0
    turned = others[start:] + others[:start]
    groups = [turned[i : i + every] for i in range(0, len(turned), every)] or [[]]
    return [name for group in groups for name in (anchor, *group)]


def counted(turns: Sequence[Turn]) -> list[Turn]:
    """The quiet turns where there are enough of them, else all."""
    quiet = [turn for turn in turns if turn.quiet]
    return quiet if len(quiet) >= LEAST_QUIET else list(turns)


def step_times_ms(answers: Sequence[dict[str, list[float]]], begins: Sequence[float]) -> list[float]:
    """Wall time of each step of a turn, from the seconds at which each rank began and ended.

    A step begins when the last rank was done with the one before.
    """
    last = [max(ends) for ends in zip(*(answer["ends"] for answer in answers), strict=True)]
    marks = [max(begins), *last]
    return [1e3 * (after - before) for before, after in pairwise(marks)]


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median over pairs of the first to the second, measured one after the other."""
    return statistics.median(a / b for a, b in pairs)


def usual_figures(texts: Sequence[str]) -> str:
    """JSON in which each number is the median of those at its place in `texts`; "" of none."""
    return json.dumps(_usual([json.loads(text) for text in texts])) if texts else ""


def _usual(several: Sequence[Any]) -> Any:
    one = several[0]
    if isinstance(one, dict):
        named: Sequence[dict[str, Any]] = several
        return {key: _usual([each[key] for each in named]) for key in named[0]}
    if isinstance(one, list):
        return [_usual(items) for items in zip(*several, strict=True)]
    return statistics.median_low(several) if isinstance(one, int | float) else one
