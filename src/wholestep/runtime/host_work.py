"""The host side of a call: guards on Python values, numbers that Python computes, assignments, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..capture.assumptions import Assumption
from ..capture.effects import Effects
from ..capture.locations import MISSING, Slots
from ..capture.state import StepState
from .condition import Condition


class HostWork:
    """The host side of one program."""

    def __init__(self, effects: Effects, state: StepState) -> None:
        self.effects, self._state = effects, state
        self._holds = _compiled(effects.expected)
        self.missed: Assumption | None = None

    def difference(self) -> str:
        """The first guarded Python value that is different now, as text; empty if there is none."""
        self.missed = None
        if not self._holds():
            self.missed = next((e for e in self.effects.expected if not e.holds), None)
            if self.missed is not None:
                return self.missed.difference
        where = self.effects.program.decided_otherwise() if self.effects.program.decisions else ""
        return f"the choice made at {where} is another one" if where else ""

    def finish(self, numbers: Sequence[Any], extra: Sequence[Any]) -> None:
        """Make the assignments of the step, then its callbacks, in order."""
        effects = self.effects
        for write in effects.writes:
            write.place.set(MISSING if write.made is None else write.made.value(numbers, extra))
        for name, flag in effects.flags:
            self._state.params[name].tensor.requires_grad_(flag)
        for called in effects.calls:
            args, kwargs = called.made.value(numbers, extra)
            called.fn(*args, **kwargs)


def _compiled(expected: Sequence[Assumption]) -> Callable[[], bool]:
    """One function that is true when all expected objects are in place; where it is false, each is looked at."""
    condition = Condition()
    for one in expected:
        holder, key, value = one.place.holder, one.place.key, one.value
        if one.kind in ("content", "tensor"):
            condition.add("{}.holds", one)
        elif one.kind == "size":
            condition.add("len({}) == {}", holder, value)
        elif one.kind == "type":
            condition.add("type({}[{}]) is {}", holder, key, value)
        elif value is MISSING and isinstance(holder, dict):
            condition.add("{} not in {}", key, holder)
        elif value is MISSING:
            condition.add("{}.holds", one)
        elif isinstance(holder, Slots) and key == "cell_contents":  # a closure variable
            condition.add("{}.cell_contents is {}", holder.owner, value)
        else:
            condition.add("{}[{}] is {}", holder, key, value)
    return condition.compiled()
