"""The layout problem of a step: choices with options, values that pass between choices, and the load of an assignment.

This module knows neither graphs nor solvers. `formulation` states the problem as an integer program; `evaluate` adds up
one assignment without a solver, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add

from ...layout import AxisState
from ...plan.data_parallel import StorageOption
from ...tuning import TUNING

PHASES = ("forward", "backward", "update")
EXPOSED = TUNING.exposed_share
"""The part of overlapped communication that counts as exposed: the order of ops, which decides it, is not modelled."""
BESIDE = TUNING.sum_of_streams_share
"""The weight of each stream in the objective, so that of two plans with equal longest streams the lighter one wins."""
Phases = tuple[float, ...]
_NONE: Phases = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepLoad:
    """Microseconds by phase, and bytes, that one decision adds to a step of one rank.

    The solved axis communicates while the rank waits (`waits`) or computes (`beside`), the data-parallel axes for
    `stored`. Bytes are held during the whole step (`rest`), from the forward to the backward (`saved`), or from the
    backward to the update (`grad`).
    """

    computes: Phases = _NONE
    waits: Phases = _NONE
    beside: Phases = _NONE
    stored: Phases = _NONE
    rest: float = 0.0
    saved: float = 0.0
    grad: float = 0.0

    @property
    def _us(self) -> tuple[Phases, ...]:
        return self.computes, self.waits, self.beside, self.stored

    def __add__(self, other: StepLoad) -> StepLoad:
        us = (tuple(map(add, a, b)) for a, b in zip(self._us, other._us, strict=True))
        return StepLoad(*us, rest=self.rest + other.rest, saved=self.saved + other.saved, grad=self.grad + other.grad)

    def __mul__(self, times: float) -> StepLoad:
        us = (tuple(phase_us * times for phase_us in phases) for phases in self._us)
        return StepLoad(*us, rest=self.rest * times, saved=self.saved * times, grad=self.grad * times)

    @property
    def is_nothing(self) -> bool:
        """True where it adds nothing."""
        return not any((*chain(*self._us), self.rest, self.saved, self.grad))

    def streams(self, phase: int) -> tuple[float, float, float]:
        """Microseconds of the three streams in one phase: compute, the solved axis, the data-parallel axes."""
        waits, beside, stored = self.waits[phase], self.beside[phase], self.stored[phase]
        return self.computes[phase] + waits + EXPOSED * (beside + stored), waits + beside, stored

    @property
    def step_us(self) -> float:
        """The objective: microseconds of a step with this load."""
        return sum(max(three) + BESIDE * sum(three) for three in map(self.streams, range(len(PHASES))))

    @property
    def peak_bytes(self) -> float:
        """Peak bytes: at the end of the forward, or before the update."""
        return self.rest + max(self.saved, self.grad)


NOTHING = StepLoad()


@dataclass(frozen=True)
class Option:
    """One option of a choice: the state of each output, by number, and of each operand, by place, and its load.

    `strategies` names the op strategy, `reduced` is true where a partial result is reduced at once. A parameter has
    the option `storage` over the data-parallel axes.
    """

    gives: Mapping[int, AxisState]
    takes: Mapping[int, AxisState]
    load: StepLoad = NOTHING
    strategy: str = ""
    reduced: bool = False
    storage: StorageOption | None = None


@dataclass(frozen=True)
class OneOf:
    """A choice: exactly one of `options`, for all `count` equal ops or parameters."""

    name: str
    options: tuple[Option, ...]
    count: int = 1


@dataclass(frozen=True)
class Need:
    """Choice `taker` reads a value at operand place `at`; `later`: in the backward."""

    taker: int
    at: int
    later: bool = False


@dataclass(frozen=True)
class ValueEdge:
    """Output `output` of choice `maker`, read by `needs`.

    `moves`: the load of resharding it from one state to another, once for all needs of one state; missing pairs are
    infeasible. `count`: how many equal values there are. `saved`: bytes that the forward holds for the backward in a
    state, where some need is `later`. Of values with the same `memory` only the largest counts. `size`: global bytes.
    """

    maker: int
    output: int
    needs: tuple[Need, ...]
    moves: Mapping[tuple[AxisState, AxisState], StepLoad]
    count: int = 1
    saved: Mapping[AxisState, float] = field(default_factory=dict[AxisState, float])
    memory: int = -1
    size: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Choices, values and a budget; `fixed` is the load that no choice changes."""

    choices: tuple[OneOf, ...]
    values: tuple[ValueEdge, ...]
    budget_bytes: float | None = None
    fixed: StepLoad = NOTHING


def evaluate(problem: Problem, picked: Sequence[int]) -> StepLoad | None:
    """The load of an assignment of one option to each choice; None where it is infeasible."""
    total = problem.fixed
    options = [choice.options[i] for choice, i in zip(problem.choices, picked, strict=True)]
    for choice, option in zip(problem.choices, options, strict=True):
        total += option.load * choice.count
    saved_bytes: dict[int, float] = {}
    for value in problem.values:
        maker_state = options[value.maker].gives[value.output]
        for state in dict.fromkeys(options[need.taker].takes[need.at] for need in value.needs):
            move = value.moves.get((maker_state, state))
            if move is None:
                return None
            total += move * value.count
        later = dict.fromkeys(options[need.taker].takes[need.at] for need in value.needs if need.later)
        saved = sum(value.saved.get(state, 0.0) for state in later) * value.count
        saved_bytes[value.memory] = max(saved_bytes.get(value.memory, 0.0), saved)
    return total + StepLoad(saved=sum(saved_bytes.values()))


def fits(problem: Problem, load: StepLoad) -> bool:
    """True where `load` is within the budget."""
    return problem.budget_bytes is None or load.peak_bytes <= problem.budget_bytes * (1 + 1e-9)
