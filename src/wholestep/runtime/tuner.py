"""Lets schedules of a step take turns in its first calls, and keeps the fastest (`compile(tune="auto")`).

Which schedule a call runs follows from how often ranks have called programs that they know as one. That number is the
same on all ranks, as each of these calls has the same collectives on all of them (of programs whose collectives do not
connect all ranks, none take turns). After a round the ranks exchange the
times, and each decides the same from the same numbers.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend.protocol import Run
from ..cache.step_cache import CachedChoices
from ..cost.memory import peak_memory
from ..distributed.activity import ACTIVITY
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import first_line
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..passes.other_schedules import TriedSchedule, scheduled_with, schedules_to_try
from ..tuning import TUNING
from .consistency import RankProgram
from .finalize import Finalizer, bound_to_rank
from .installer import Installer
from .program import Program
from .progress import Stages
from .replica_check import connects_all_ranks
from .trial import Trial, merged

log = logging.getLogger("wholestep")


@dataclass(frozen=True)
class ScheduleTuning:
    """What tuning found, as a table: `chosen` is the number of the schedule that stays, None while they take turns.

    `why_not`: why no schedules take turns. `tried`: the schedules, that of the measured hardware first. `seconds`: the
    times of each that counted.
    """

    why_not: str = ""
    calls: int = 0
    tried: tuple[TriedSchedule, ...] = ()
    seconds: tuple[tuple[float, ...], ...] = ()
    chosen: int | None = None

    def __str__(self) -> str:
        if self.why_not:
            return f"not tuned: {self.why_not}"
        if not self.tried:
            return f"not tuned yet: schedules take turns after {TUNING.calls_before_trial} calls"
        state = "takes turns" if self.chosen is None else "tuned"
        width = len("schedule 0, stays")
        heads = f"{'collectives':>13}{'buckets':>10}{'predicted ms':>14}{'measured ms':>14}"
        rows = [f"{f'{state}, {self.calls} calls':{width}}{heads}"]
        for number, (one, times) in enumerate(zip(self.tried, self.seconds, strict=True)):
            name = f"schedule {number}{', stays' if number == self.chosen else ''}"
            found = f"{1e3 * statistics.median(times):.1f} of {len(times)}" if times else "-"
            size = human(max(one.sizes.bucket_bytes, one.sizes.summed_bytes))
            rows.append(f"{name:{width}}{len(one.order):>13}{size:>10}{one.predicted_us / 1e3:>14.1f}{found:>14}")
        return "\n".join(rows)


def _fixed(program: Program) -> str:
    """Why the schedule of a program is not tried beside others, or ''."""
    if program.plan.async_axes:
        return "async tensor parallelism cuts its products for one schedule"
    return "" if connects_all_ranks(program.local) else "its collectives connect not all ranks"


@dataclass
class Tuner:
    """The trials of one step, by what ranks know its programs as; `why_not` is said of all of them."""

    why_not: str
    world: World
    finalizer: Finalizer
    installer: Installer
    rendezvous: Rendezvous
    stages: Stages
    running: dict[str, RunningTrial] = field(default_factory=dict[str, "RunningTrial"])
    started: int = 0
    _label: str = ""

    def add(self, made: RankProgram, program: Program, knows: Callable[[str], bool]) -> None:
        """From now on `program` takes part in the trial of its kind, if there is one."""
        self.running = {key: one for key, one in self.running.items() if knows(key)}
        key = made.compared
        if self.why_not or key in self.finalizer.tuned or _fixed(program):
            return
        if key not in self.running:
            self.running[key] = RunningTrial(self, key, self.finalizer.choices)
        program.run = TurnTaker(program, made.before, self.running[key])

    def found(self, program: Program | None) -> ScheduleTuning:
        """About the trial of `program`."""
        if self.why_not or program is None:
            return ScheduleTuning(self.why_not)
        if program.compared in self.running:
            return self.running[program.compared].found
        if program.compared in self.finalizer.tuned:
            return ScheduleTuning("an earlier start did (cache=)")
        return ScheduleTuning(_fixed(program))

    def next_label(self) -> str:
        """The same on all ranks, as their trials begin in the same calls."""
        self._label = self._label or self.rendezvous.next_label("trials")
        self.started += 1
        return f"{self._label}/{self.started}"


@dataclass(eq=False)
class RunningTrial:
    """The trial of programs that ranks know as one. Of the calls of a rank, those of one kind count: that of the call
    with which the trial began (`own`).
    """

    tuner: Tuner
    key: str
    choices: CachedChoices
    calls: int = 0
    label: str = ""
    tried: tuple[TriedSchedule, ...] = ()
    trial: Trial = field(default_factory=lambda: Trial(1))
    turns: tuple[int, ...] = ()
    seconds: list[float | None] = field(default_factory=list[float | None])
    chosen: int | None = None
    why_not: str = ""
    own: TurnTaker | None = None

    @property
    def number(self) -> int:
        """Of the schedule that this call runs."""
        return self.chosen if self.chosen is not None else self.turns[len(self.seconds)] if self.turns else 0

    @property
    def found(self) -> ScheduleTuning:
        """What is known so far."""
        seconds = tuple(tuple(self.trial.seconds(number)) for number in range(len(self.tried)))
        return ScheduleTuning(self.why_not, self.calls, self.tried, seconds, self.chosen)

    def took(self, taker: TurnTaker, seconds: float) -> None:
        """A call ran, on all ranks. After a round they exchange what it took."""
        if self.chosen is not None:
            return
        self.calls += 1
        if self.turns:
            self.seconds.append(seconds if taker is self.own else None)
            if len(self.seconds) == len(self.turns):
                self._end_round(taker)
        elif self.calls == TUNING.calls_before_trial:
            self._start(taker)

    def _start(self, taker: TurnTaker) -> None:
        tuner, self.own, self.label = self.tuner, taker, self.tuner.next_label()
        label, what = f"{self.label}/choices", "which schedules take turns"
        with ACTIVITY.doing("choosing schedules to try", tuner.rendezvous.timeout_s):
            self.tried, self.why_not = tuner.rendezvous.choose(label, lambda: self._choose(taker), what)
        if self.why_not:
            self._end(taker)
        else:
            self.trial = Trial(len(self.tried))
            self.turns = self.trial.turns
            tuner.stages.report(f"tune: {len(self.tried)} schedules take turns", "start")

    def _choose(self, taker: TurnTaker) -> tuple[tuple[TriedSchedule, ...], str]:
        """On the first rank: what to try, or why nothing. A pass of the user's may not stand another size."""
        hardware, finalizer = self.tuner.finalizer.hardware_and_schedule()[0], self.tuner.finalizer

        def peak_bytes(made: LocalGraph) -> int:
            return peak_memory(bound_to_rank(made, self.tuner.world)).size_bytes

        try:
            tried = schedules_to_try(taker.before, finalizer.passes(), hardware, peak_bytes)
        except Exception as error:
            return (), f"another schedule cannot be made: {first_line(error)}"
        return (tuple(tried), "") if len(tried) > 1 else ((), "no other buckets give the same bits in as much memory")

    def _end_round(self, taker: TurnTaker) -> None:
        tuner, first = self.tuner, not self.trial.rounds
        what = "the exchange of times of schedules"
        rows: list[Sequence[float | None]]
        rows = tuner.rendezvous.gather(f"{self.label}/{len(self.trial.rounds)}", self.seconds, what)
        if first:  # all ranks have read what to try
            tuner.rendezvous.forget(self.label)
        self.trial = self.trial.after(merged(self.turns, rows))
        self.seconds, self.turns = [], self.trial.turns
        if self.trial.is_over(self.calls):
            self._end(taker)

    def _end(self, taker: TurnTaker) -> None:
        """The fastest stays, for all programs of its kind, those of later compiles and of later starts included."""
        self.chosen, self.own, self.turns = self.trial.fastest, None, ()
        if self.tried:
            stays = self.tried[self.chosen]
            self.tuner.finalizer.keep(self.key, taker.before, stays.sizes, stays.order, self.choices)
        self.tuner.stages.report(f"tune: {self.found}", "done")
        if self.tuner.world.rank == 0:
            log.info("%s", self.found)


@dataclass(eq=False)
class TurnTaker:
    """What a program runs during a trial. `made` has the schedules of it that ran: programs, and how they are run."""

    program: Program
    before: LocalGraph
    running: RunningTrial
    number: int = 0

    def __post_init__(self) -> None:
        self.made: dict[int, tuple[LocalGraph, Run]] = {0: (self.program.local, self.program.run)}

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the schedule whose turn it is."""
        self._become(self.running.number, inputs)
        run = self.made[self.number][1]
        begin = time.perf_counter()
        out = run(inputs)
        self.running.took(self, time.perf_counter() - begin)
        if self.running.chosen is not None:
            self._become(self.running.chosen, inputs)
            self.program.run = self.made[self.number][1]
        return out

    def _become(self, number: int, inputs: Sequence[Any]) -> None:
        if number == self.number:
            return
        self.number = number
        if number not in self.made:
            tuner = self.running.tuner
            with ACTIVITY.doing("compiling a schedule to try", tuner.rendezvous.timeout_s):
                local = scheduled_with(self.before, tuner.finalizer.passes(), self.running.tried[number])
                run = tuner.installer.compiled(local, tuner.world, inputs, tuner.installer.clock)
            self.made[number] = local, run
        self.program.take(self.made[number][0])
