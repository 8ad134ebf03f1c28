"""The problem that is solved: choices with options, values that pass between them, what all of it adds up to.

Nothing here knows a graph or a solver: a problem can be handed to HiGHS (`highs.py`) or tried out option by option
(`evaluate`), which is how the one is checked against the other.

A step takes the sum over its phases (forward, backward, update) of the longest of three: what a rank computes and waits
for, what the axis that is solved for carries, and what the data-parallel axes carry meanwhile. All three add up over
choices. Of what could be hidden behind computing, a part (`EXPOSED`) counts as waited for: how much really is depends
on the order, which is not part of the problem. A little of all three (`BESIDE`) is added, so that of plans whose
longest are as long, the one that does less wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...layout import AxisState
from ...tuning import TUNING

PHASES = ("forward", "backward", "update")
EXPOSED = TUNING.exposed_share
BESIDE = TUNING.sum_of_streams_share
Phases = tuple[float, float, float]
_NONE: Phases = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Load:
    """What one thing adds to a step of one rank. Microseconds by phase: that it computes, that its axis blocks it
    (`waits`), and carries beside computing (`beside`), and that data-parallel axes do (`stored`). Bytes: that it keeps
    all the time (`rest`), from the forward to the backward (`kept`), and from the backward to the update (`made`).
    """

    computes: Phases = _NONE
    waits: Phases = _NONE
    beside: Phases = _NONE
    stored: Phases = _NONE
    rest: float = 0.0
    kept: float = 0.0
    made: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(
            _sum(self.computes, other.computes), _sum(self.waits, other.waits), _sum(self.beside, other.beside),
            _sum(self.stored, other.stored), self.rest + other.rest, self.kept + other.kept, self.made + other.made,
        )  # fmt: skip

    def __mul__(self, times: float) -> Load:
        return Load(
            _times(self.computes, times), _times(self.waits, times), _times(self.beside, times),
            _times(self.stored, times), self.rest * times, self.kept * times, self.made * times,
        )  # fmt: skip

    @property
    def is_nothing(self) -> bool:
        """True where it adds nothing."""
        return not any((*self.computes, *self.waits, *self.beside, *self.stored, self.rest, self.kept, self.made))

    def streams(self, phase: int, exposed: float) -> tuple[float, float, float]:
        """Microseconds of the three streams in one phase."""
        hidden = self.beside[phase] + self.stored[phase]
        return (
            self.computes[phase] + self.waits[phase] + exposed * hidden,
            self.waits[phase] + self.beside[phase],
            self.stored[phase],
        )

    def step_us(self, exposed: float = EXPOSED) -> float:
        """Microseconds of a step that has this load."""
        streams = [self.streams(phase, exposed) for phase in range(len(PHASES))]
        return sum(max(three) + BESIDE * sum(three) for three in streams)

    @property
    def peak_bytes(self) -> float:
        """What is held at most: at the end of the forward, or before the update."""
        return self.rest + max(self.kept, self.made)


NOTHING = Load()


@dataclass(frozen=True)
class Option:
    """One way of a choice: the state of each value that it gives, by output, that it takes, by need, and its load."""

    name: str
    gives: Mapping[int, AxisState]
    takes: Mapping[int, AxisState]
    load: Load = NOTHING


@dataclass(frozen=True)
class Choice:
    """One of `options` is taken, by all `count` ops (or parameters) that are alike."""

    name: str
    options: tuple[Option, ...]
    count: int = 1


@dataclass(frozen=True)
class Need:
    """Choice `taker` takes a value as its options say at place `at`; `later`: in the backward."""

    taker: int
    at: int
    later: bool = False


@dataclass(frozen=True)
class Value:
    """Output `output` of choice `maker`, read by `needs`; `moves` says what bringing it from one state to another adds,
    for each of `count` such values, once for all that need it alike. A pair that is not named cannot be.

    `kept` is what a state holds from the forward, where some need is `later`: of values that share memory (`memory` is
    the same number) the largest counts. `size` is that of the whole, in bytes.
    """

    maker: int
    output: int
    needs: tuple[Need, ...]
    moves: Mapping[tuple[AxisState, AxisState], Load]
    count: int = 1
    kept: Mapping[AxisState, float] = field(default_factory=dict[AxisState, float])
    memory: int = -1
    size: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Choices, values, and bytes that must not be passed; `fixed` is the load that nothing changes, `exposed` the part
    of hidden communication that is waited for.
    """

    choices: tuple[Choice, ...]
    values: tuple[Value, ...]
    budget_bytes: float | None = None
    fixed: Load = NOTHING
    exposed: float = EXPOSED


def evaluate(problem: Problem, picked: Sequence[int]) -> Load | None:
    """What an assignment of an option to each choice adds up to; None where a value cannot be what is needed."""
    total = problem.fixed
    options = [choice.options[i] for choice, i in zip(problem.choices, picked, strict=True)]
    for choice, option in zip(problem.choices, options, strict=True):
        total += option.load * choice.count
    held: dict[int, float] = {}
    for value in problem.values:
        given = options[value.maker].gives[value.output]
        wanted = {options[need.taker].takes[need.at] for need in value.needs}
        for state in wanted:
            move = value.moves.get((given, state))
            if move is None:
                return None
            total += move * value.count
        later = {options[need.taker].takes[need.at] for need in value.needs if need.later}
        kept = sum(value.kept.get(state, 0.0) for state in later) * value.count
        held[value.memory] = max(held.get(value.memory, 0.0), kept)
    return total + Load(kept=sum(held.values()))


def fits(problem: Problem, load: Load) -> bool:
    """True where `load` is within the problem's bytes."""
    return problem.budget_bytes is None or load.peak_bytes <= problem.budget_bytes * (1 + 1e-9)


def _sum(one: Phases, other: Phases) -> Phases:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _times(one: Phases, times: float) -> Phases:
    return one[0] * times, one[1] * times, one[2] * times
