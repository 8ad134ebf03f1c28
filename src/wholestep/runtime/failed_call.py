"""A call is a transaction: what one that raised has left, and whether ranks may go on after it.

State is as it was before the call, or as it is after it. Programs change state in place, so a call may also raise
between these. Its parameters are then marked: no step trains on with them, and no checkpoint takes them, until one is
loaded. Ranks that go on have to have raised in the same call, each with as many collectives begun: else the next
collective of one meets another one of the other.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from .. import _torch
from ..backend.reached import Reached, reached
from ..capture.state import StepState
from ..distributed.rendezvous import Rendezvous
from ..distributed.sections import show_ranks
from ..errors import RankMismatchError, StateError, WholestepError, first_line
from .program import Phase, Program

_signal = sys.modules["_signal"]  # `signal` without conversions to enums, 12 us a call
_TORN = "torn"  # note of a parameter: which call left it between two steps
BEFORE, AFTER = -1, -2  # in place of a number of collectives: all ranks are before, or after, those of a program


@dataclass(frozen=True)
class FailedCall:
    """A call of a step that raised: its number, what it raised, and how far it had come."""

    name: str
    number: int
    text: str
    reached: Reached

    @staticmethod
    def of(name: str, number: int, error: BaseException, program: Program | None) -> FailedCall:
        """What `error` left of a call, whose program may be unknown. Marks torn state, takes away what no call made."""
        text = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
        failed = FailedCall(name, number, text, _reached(error, program))
        if program is not None and failed.reached.changed:
            mark_torn(program.capture.state, f"call {number} of {name} raised {text}")
        elif program is not None:
            program.primed.take_away()
        return failed

    @property
    def is_done(self) -> bool:
        """Whether the call had done all of its work before it raised, as where a callback raises: ranks can go on."""
        return self.reached.begun == AFTER

    def agree(self, programs: Sequence[Program], ranks: Rendezvous, label: str) -> None:
        """Go on after this call (collective, where the programs of the step are).

        Raises StateError, as long as no checkpoint was loaded, or RankMismatchError: this step cannot go on.
        """
        refuse_torn(params_of(programs[-1].capture.state))
        if ranks.size == 1 or not any(program.meets for program in programs):
            return
        what = f"the question of whether call {self.number} of {self.name} raised on all ranks, as here {self.text}"
        here = self.number, self.reached.begun, self.text
        rows: list[tuple[int, int | None, str]] = ranks.gather(label, here, what, tuple[int, int | None, str])
        if self.reached.begun is not None and all(row[:2] == rows[0][:2] for row in rows):
            return
        parts = [f"{show_ranks([rank])} in call {row[0]} ({row[2]})" for rank, row in enumerate(rows)]
        raise RankMismatchError(
            f"ranks left a call of {self.name} at different points: {', '.join(parts[:4])}",
            "ranks that have begun as many collectives: each would take those of another call for its own",
            "end the job, and start it again from its last checkpoint; look for what is wrong with a batch before the "
            "call, on every rank",
        )


def _reached(error: BaseException, program: Program | None) -> Reached:
    phase = Phase.BEFORE if program is None else program.phase
    if phase is Phase.BEFORE:
        return Reached(False, BEFORE)
    if phase is Phase.RUNS:
        return reached(error)
    is_whole = phase is Phase.AFTER or (phase is Phase.ACTS and isinstance(error, Exception))
    deliberate = isinstance(error, WholestepError) or phase is Phase.ACTS
    return Reached(not is_whole, AFTER if deliberate and is_whole else None)


def params_of(state: StepState) -> Iterator[Tensor]:
    """The parameters of a state."""
    return (param.tensor for param in state.params.values())


def mark_torn(state: StepState, cause: str) -> None:
    """`cause` has left this state between two steps."""
    for param in params_of(state):
        _torch.notes_of(param)[_TORN] = f"{cause}, after it had begun to change parameters and optimizer state"


def refuse_torn(params: Iterable[Tensor]) -> None:
    """Raise StateError if a call that raised has left these parameters between two steps."""
    marks = (_torch.notes_of(param).get(_TORN) for param in params)
    if mark := next(filter(None, marks), None):
        needed = "state as it was before a call, or as it is after it"
        raise StateError(mark, needed, "load a checkpoint with wholestep.load, or start again from one")


def restored(state: StepState) -> None:
    """All of this state was loaded: it is that of one step again."""
    for param in params_of(state):
        _torch.notes_of(param).pop(_TORN, None)


class uninterrupted:  # used like a function
    """Inside this context, Ctrl-C waits for its end; a second one does not wait."""

    _handler: Any = None
    _came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other one handles signals
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._handler(number, frame)
        self._came = number, frame
