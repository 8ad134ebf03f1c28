"""Schedules of one step take turns: whose turn it is, what their times say, and when enough is known. No clock here.

In a round each schedule that is left has one turn of a few calls. The first call of a turn does not count: caches are
full of what the schedule before left. Times are compared within rounds, so that a machine that gets slower or faster
counts for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..tuning import TUNING

Round = Mapping[int, tuple[float, ...]]
"""The seconds that counted, by the number of the schedule."""


@dataclass(frozen=True)
class Trial:
    """The rounds so far of `count` schedules; `left` are in the next one.

    Example:
        >>> trial = Trial(2).after({0: (1.0, 1.1), 1: (2.0, 2.1)}).after({0: (1.0, 1.1), 1: (2.0, 2.1)})
        >>> assert trial.left == (0,) and trial.is_over(calls=14) and trial.fastest == 0
    """

    count: int
    rounds: tuple[Round, ...] = ()
    out: tuple[int, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """The schedules that may still be the fastest."""
        return tuple(number for number in range(self.count) if number not in self.out)

    @property
    def turns(self) -> tuple[int, ...]:
        """The schedule of each call of the next round. Each round begins with another one."""
        shift = len(self.rounds) % len(self.left)
        order = (*self.left[shift:], *self.left[:shift])
        return tuple(number for number in order for _ in range(TUNING.turn_calls))

    def after(self, latest: Round) -> Trial:
        """With one more round. What is slower than the fastest beyond the noise is out."""
        trial = replace(self, rounds=(*self.rounds, latest))
        lost = tuple(number for number in trial.left if number != trial.fastest and trial.loses(number, trial.fastest))
        return replace(trial, out=(*self.out, *lost))

    def is_over(self, calls: int) -> bool:
        """True once one is left, or another round would exceed the calls that a trial may take; `calls` so far."""
        return len(self.left) == 1 or calls + len(self.turns) > TUNING.trial_calls

    @property
    def fastest(self) -> int:
        """Of those left, the one with the least median of times relative to those of its round; the first where one was
        never timed.
        """
        relative: dict[int, list[float]] = {number: [] for number in self.left}
        for timed in self.rounds:
            times = {number: timed.get(number, ()) for number in self.left}
            usual = statistics.median([t for of in times.values() for t in of] or [1.0])
            for number, of in times.items():
                relative[number] += [t / usual for t in of]
        if not all(relative.values()):
            return self.left[0]
        return min(self.left, key=lambda number: statistics.median(relative[number]))

    def seconds(self, number: int) -> list[float]:
        """All times of a schedule that counted."""
        return [seconds for timed in self.rounds for seconds in timed.get(number, ())]

    def loses(self, number: int, other: int) -> bool:
        """True where `number` is slower beyond the noise: of the pairs of their times in a round, it wins so few that
        equal schedules would show it with a probability below 3 % (two rounds of two times: none of 8 pairs).
        """
        pairs = [
            (mine, theirs)
            for timed in self.rounds
            for mine in timed.get(number, ())
            for theirs in timed.get(other, ())
        ]  # fmt: skip
        wins = sum(mine < theirs for mine, theirs in pairs)
        return len(pairs) >= TUNING.fewest_pairs and wins < TUNING.lost_share * len(pairs)


Call = tuple[float, float] | None
"""The seconds of a call, and the microseconds that are predicted for its batch; None where it does not count."""


def for_one_batch(rows: Sequence[Sequence[Call]], usual_us: float) -> tuple[list[list[float | None]], float]:
    """A row of each rank with the seconds of each call, as they would be for a batch that is predicted to take
    `usual_us`; 0: for that of the first call that counts, whose prediction is returned.

    A call takes as long as that of the rank with the largest batch.
    """
    largest = [max((call[1] for call in calls if call is not None), default=0.0) for calls in zip(*rows, strict=True)]
    usual_us = usual_us or next((predicted for predicted in largest if predicted), 0.0)
    share = [usual_us / predicted if predicted else 1.0 for predicted in largest]
    return [[call and call[0] * times for call, times in zip(row, share, strict=True)] for row in rows], usual_us


def merged(turns: Sequence[int], rows: Sequence[Sequence[float | None]]) -> Round:
    """The times of a round, from a row of each rank with the seconds of each call. None does not count, and neither
    does the first call of a turn.

    The least of the ranks counts: a rank that was late for a call of its own accord finds the others waiting for it.
    """
    counted: dict[int, list[float]] = {number: [] for number in turns}
    for at, (number, times) in enumerate(zip(turns, zip(*rows, strict=True), strict=True)):
        timed = [seconds for seconds in times if seconds is not None]
        if at % TUNING.turn_calls and len(timed) == len(times):
            counted[number].append(min(timed))
    return {number: tuple(times) for number, times in counted.items()}
