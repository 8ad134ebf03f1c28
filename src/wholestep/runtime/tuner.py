"""Lets schedules of a step take turns in its first calls, and keeps the fastest (`compile(tune="auto")`).

Which schedule a call runs follows from how often ranks have called programs that they know as one. That number is the
same on all ranks, as each of these calls has the same collectives on all of them (of programs whose collectives do not
connect all ranks, none take turns). After a round the ranks exchange the times, and each decides the same from the same
numbers. Calls may differ in size: their times are compared by what is simulated for each.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ..backend.protocol import Run
from ..backend.rank_binding import bound_calls
from ..cache.step_cache import CachedChoices
from ..capture.effects import SizesFixedError
from ..cost.compute import stage_us
from ..cost.memory import peak_memory
from ..cost.simulation import simulate
from ..distributed.activity import ACTIVITY
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import PlanError, first_line
from ..graph.graph import LocalGraph
from ..graph.sizes_in_graph import at_sizes
from ..graph.text import human
from ..passes.order_collectives import CallOrder
from ..passes.other_schedules import TriedSchedule, blocks_to_try, orders_to_try, scheduled_with, schedules_to_try
from ..planner.prediction import simulate as simulate_all
from ..tuning import TUNING
from .consistency import RankProgram
from .finalize import Finalizer, bound_to_rank
from .installer import Installer
from .program import Program
from .progress import Stages
from .replica_check import connects_all_ranks
from .trial import Call, Trial, for_one_batch, merged

log = logging.getLogger("wholestep")


@dataclass(frozen=True)
class ScheduleTuning:
    """What tuning found, as a table: `chosen` is the number of the schedule that stays, None while they take turns.

    `why_not`: why no schedules take turns. `tried`: the schedules, that of the measured hardware first. `seconds`: the
    times of each that counted, of batches of several sizes as they would be for the first.
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
        names = [tried.blocks or f"schedule {number}" for number, tried in enumerate(self.tried)]
        width = max(map(len, names)) + len(", stays")
        heads = f"{'collectives':>13}{'buckets':>10}{'predicted ms':>14}{'measured ms':>14}"
        rows = [f"{f'{state}, {self.calls} calls':{width}}{heads}"]
        for number, (tried, times) in enumerate(zip(self.tried, self.seconds, strict=True)):
            name = f"{names[number]}{', stays' if number == self.chosen else ''}"
            timing = f"{1e3 * statistics.median(times):.1f} of {len(times)}" if times else "-"
            size = human(max(tried.sizes.bucket_bytes, tried.sizes.summed_bytes)) if tried.sizes else "-"
            rows.append(f"{name:{width}}{len(tried.order):>13}{size:>10}{tried.predicted_us / 1e3:>14.1f}{timing:>14}")
        return "\n".join(rows)


def _fixed(program: Program) -> str:
    """Why the schedule of a program is not tried beside others, or ''."""
    if program.plan.async_axes:
        return "async tensor parallelism fuses its products for one schedule"
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

    def add(self, rank_program: RankProgram, program: Program, knows: Callable[[str], bool]) -> None:
        """From now on `program` takes part in the trial of its kind, if there is one. Raises SizesFixedError: another
        schedule of it is not right for all sizes.
        """
        self.running = {key: trial for key, trial in self.running.items() if knows(key)}
        key = rank_program.compared
        if self.why_not or key in self.finalizer.tuned or _fixed(program):
            return
        if key not in self.running:
            self.running[key] = RunningTrial(self, key, self.finalizer.choices)
        taker = TurnTaker(program, rank_program, self.running[key])
        for number in range(1, len(taker.running.tried)):
            taker.make(number)
        taker.running.takers.append(taker)
        program.run = taker

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
    """The trial of programs that ranks know as one, and these (`takers`). Times are those of a batch that is predicted
    to take `usual_us`.
    """

    tuner: Tuner
    key: str
    choices: CachedChoices
    calls: int = 0
    label: str = ""
    tried: tuple[TriedSchedule, ...] = ()
    trial: Trial = field(default_factory=lambda: Trial(1))
    turns: tuple[int, ...] = ()
    round: list[Call] = field(default_factory=list[Call])
    usual_us: float = 0.0
    chosen: int | None = None
    why_not: str = ""
    takers: list[TurnTaker] = field(default_factory=list["TurnTaker"])

    @property
    def number(self) -> int:
        """Of the schedule that this call runs."""
        return self.chosen if self.chosen is not None else self.turns[len(self.round)] if self.turns else 0

    @property
    def found(self) -> ScheduleTuning:
        """What is known so far."""
        seconds = tuple(tuple(self.trial.seconds(number)) for number in range(len(self.tried)))
        return ScheduleTuning(self.why_not, self.calls, self.tried, seconds, self.chosen)

    def took(self, taker: TurnTaker, seconds: float) -> None:
        """A call ran, on all ranks. After a round they exchange what it took. The first call of a program is slow."""
        if self.chosen is not None:
            return
        self.calls += 1
        if self.turns:
            self.round.append((seconds, taker.predicted_us()) if taker.calls > 1 else None)
            if len(self.round) == len(self.turns):
                self._end_round()
        elif self.calls == TUNING.calls_before_trial:
            self._start(taker)

    def _start(self, taker: TurnTaker) -> None:
        tuner, self.label = self.tuner, self.tuner.next_label()
        label, what = f"{self.label}/choices", "which schedules take turns"
        with ACTIVITY.doing("choosing schedules to try", tuner.rendezvous.timeout_s):
            self.tried, self.why_not = tuner.rendezvous.choose(
                label, lambda: self._choose(taker), what, tuple[tuple[TriedSchedule, ...], str]
            )
        if not self.why_not:
            self._make_all()
        if self.why_not:
            self._end()
        else:
            self.trial = Trial(len(self.tried))
            self.turns = self.trial.turns
            tuner.stages.report(f"tune: {len(self.tried)} schedules take turns", "start")

    def _make_all(self) -> None:
        """Make the schedules on all ranks, and try none of them if one cannot be made somewhere."""
        rendezvous, failed = self.tuner.rendezvous, ""
        failures: list[str]
        with ACTIVITY.doing("compiling schedules to try", rendezvous.timeout_s):
            try:
                for taker in self.takers:
                    taker.refuse_other_bits()
                    for number in range(1, len(self.tried)):
                        taker.make(number)
            except Exception as error:
                failed = first_line(error)
            failures = rendezvous.gather(f"{self.label}/made", failed, "whether schedules can be made", str)
        if why_not := next((why for why in failures if why), ""):
            self.tried, self.why_not = (), f"another schedule cannot be made: {why_not}"

    def _choose(self, taker: TurnTaker) -> tuple[tuple[TriedSchedule, ...], str]:
        """On the first rank: what to try, or why nothing. A pass of the user's may not stand another size."""
        hardware, finalizer = self.tuner.finalizer.hardware_and_schedule()[0], self.tuner.finalizer
        before, why_not = taker.compiled.before, "no other buckets give the same bits in as much memory"
        passes = finalizer.passes(before)

        def peak_bytes(candidate: LocalGraph) -> int:
            return peak_memory(bound_to_rank(candidate, self.tuner.world)).size_bytes

        try:
            if before.stage_axis:
                why_not = "no other order of blocks gives the same bits in as much memory, or the pipeline names one"
                tried = orders_to_try(
                    before, passes, taker.compiled.plan.hardware, lambda local: simulate_all(local, hardware).step_us
                )
            else:
                tried = schedules_to_try(before, passes, hardware, peak_bytes)
        except Exception as error:
            return (), f"another schedule cannot be made: {first_line(error)}"
        return (tuple(tried), "") if len(tried) > 1 else ((), why_not)

    def _end_round(self) -> None:
        tuner, first = self.tuner, not self.trial.rounds
        what = "the exchange of times of schedules"
        calls: list[Sequence[Call]]
        calls = tuner.rendezvous.gather(f"{self.label}/{len(self.trial.rounds)}", self.round, what, tuple[Call, ...])
        if first:  # all ranks have read what to try
            tuner.rendezvous.forget(self.label)
        rows, self.usual_us = for_one_batch(calls, self.usual_us)
        self.trial = self.trial.after(merged(self.turns, rows))
        self.round, self.turns = [], self.trial.turns
        if self.trial.is_over(self.calls):
            self._end()

    def _end(self) -> None:
        """The fastest stays, for all programs of its kind, those of later compiles and of later starts included."""
        self.chosen, self.turns = self.trial.fastest, ()
        if self.tried:
            stays = self.tried[self.chosen]
            first = self.takers[0]  # a later start compiles it first, and looks then
            self.tuner.finalizer.keep(self.key, first.compiled.before, stays, self.choices)
        self.takers.clear()
        self.tuner.stages.report(f"tune: {self.found}", "done")
        if self.tuner.world.rank == 0:
            log.info("%s", self.found)


@dataclass(eq=False)
class TurnTaker:
    """What a program runs during a trial. `schedules` are programs, those of all stages that they are of, and how they
    are run: all are made before one of them has its turn, so that what they compare of sizes is known.
    """

    program: Program
    compiled: RankProgram
    running: RunningTrial
    number: int = 0
    calls: int = 0
    _predicted: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    def __post_init__(self) -> None:
        program = self.program
        self.schedules: dict[int, tuple[LocalGraph, LocalGraph, Run]] = {
            0: (program.local, self.compiled.before, program.run)
        }

    def refuse_other_bits(self) -> None:
        """Raise PlanError: an order that the first rank chose computes other bits for the sizes of this rank."""
        names = blocks_to_try(self.compiled.before) if self.compiled.before.stage_axis else [""]
        if other := next((tried.blocks for tried in self.running.tried if tried.blocks not in names), ""):
            raise PlanError(f"order of blocks {other!r} adds up pieces otherwise", f"one of {', '.join(names)}")

    def make(self, number: int) -> None:
        """Make a schedule to try. Raises SizesFixedError: it is not right for all sizes for which the program is."""
        symbols = self.program.capture.symbols  # other programs of this capture may have been made since
        with nullcontext() if symbols is None else symbols.kept():
            self._make(number)
        if self.program.guards.sizes is not None:
            self.program.guards.sizes.prove()

    def _make(self, number: int) -> None:
        tuner, tried, symbols = self.running.tuner, self.running.tried[number], self.program.capture.symbols
        finalizer, before, priced_on = tuner.finalizer, self.compiled.before, self.compiled.plan.hardware
        passes, calls = finalizer.passes(before), CallOrder()

        def ordered(full: LocalGraph) -> LocalGraph:
            return finalizer.ordered(full, self.running.key, tried.blocks, priced_on)

        def scheduled(full: LocalGraph) -> LocalGraph:
            return scheduled_with(finalizer.own_stage(ordered(full)), passes, tried, calls)

        local = scheduled(before)
        for expected in self.compiled.planned:
            if symbols is None or not symbols.hold(expected.sizes):
                raise SizesFixedError("another schedule is for fewer sizes")
            expected.refuse_other_after(scheduled, local, tuner.world)
        run = tuner.installer.compiled(local, tuner.world, (), tuner.installer.clock)
        self.schedules[number] = local, ordered(before), run

    def predicted_us(self) -> float:
        """What is simulated for a batch of the sizes of this call."""
        check, local = self.program.guards.sizes, self.schedules[0][0]
        now = () if check is None else check.record.now
        if now not in self._predicted:
            hardware = self.running.tuner.finalizer.hardware_and_schedule()[0]
            if check is not None:
                local = replace(local, graph=bound_calls(local.graph, self.running.tuner.world.coordinate))
                at_sizes(local.graph, dict(zip(check.record.dims, now, strict=True)))
            if local.stage is None:
                self._predicted[now] = simulate(local, hardware).step_us
            else:
                self._predicted[now] = sum(stage_us(node, hardware) for node in local.graph.nodes)
        return self._predicted[now]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the schedule whose turn it is."""
        self._become(self.running.number)
        run = self.schedules[self.number][2]
        begin = time.perf_counter()
        out = run(inputs)
        seconds, self.calls = time.perf_counter() - begin, self.calls + 1
        self.running.took(self, seconds)
        if self.running.chosen is not None:
            self._become(self.running.chosen)
            self.program.run = self.schedules[self.number][2]
        return out

    def _become(self, number: int) -> None:
        if number != self.number:
            self.number = number
            self.program.take(*self.schedules[number][:2])
