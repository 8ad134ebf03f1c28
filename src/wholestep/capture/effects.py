"""Host effects of a step: assignments, callbacks and host arithmetic that each call repeats, as immutable values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CaptureError
from .assumptions import Assumption
from .call_structure import Structure, put_together
from .host_numbers import At, HostProgram
from .locations import Arguments, GroupLocation, Location, shown

CALLBACK = "`wholestep.callback(fn, *values)`, which calls fn with the values of each step"


@dataclass(frozen=True)
class Promoted:
    """Paths of Python values that are state of the step: `numbers` are updated on the host, `tensors` in the graph."""

    numbers: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()

    def __or__(self, other: Promoted) -> Promoted:
        return Promoted(self.numbers | other.numbers, self.tensors | other.tensors)

    def __le__(self, other: Promoted) -> bool:
        return self.numbers <= other.numbers and self.tensors <= other.tensors

    def __bool__(self) -> bool:
        return bool(self.numbers or self.tensors)


@dataclass(frozen=True)
class Extra:
    """A leaf: extra result `index` of the graph, which the host needs and the step does not return."""

    index: int


@dataclass(frozen=True)
class Made:
    """A value that each call builds; its leaves are plain values, host numbers (`At`) or graph results (`Extra`)."""

    structure: Structure
    leaves: tuple[Any, ...]

    def value(self, numbers: Sequence[Any], extra: Sequence[Any]) -> Any:
        """Build the value for one call."""
        found = [numbers[v.index] if type(v) is At else extra[v.index] if type(v) is Extra else v for v in self.leaves]
        return put_together(self.structure, found)


@dataclass(frozen=True)
class Write:
    """An assignment at the end of a call; without `made`, the entry is deleted."""

    place: Location
    made: Made | None


@dataclass(frozen=True)
class Called:
    """A callback at the end of a call: `fn(*args, **kwargs)` of `made`."""

    fn: Callable[..., object]
    made: Made


@dataclass(frozen=True)
class Effects:
    """Host work of each call, and the Python values that it assumes unchanged (`expected`).

    `extra` is the number of graph results that only the host needs. `rebound` names tensors that a call replaces by
    new objects. `flags` are `(parameter, requires_grad)` pairs to set at the end. `arguments` holds the arguments of
    the current call, whose items a step may assign.
    """

    program: HostProgram = field(default_factory=HostProgram)
    writes: tuple[Write, ...] = ()
    calls: tuple[Called, ...] = ()
    expected: tuple[Assumption, ...] = ()
    extra: int = 0
    rebound: tuple[str, ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    carried: Promoted = Promoted()
    arguments: Arguments = field(default_factory=Arguments)

    def group_options(self) -> set[tuple[int, int, Any]]:
        """Options of parameter groups that a call updates, as (identity of the optimizer, group index, key)."""
        places = [*(w.place for w in self.writes), *(e.place for e in self.expected if e.kind == "type")]
        return {(id(p.optimizer), p.group, p.key) for p in places if isinstance(p, GroupLocation)}

    @property
    def acts(self) -> str:
        """The first host effect, for a message; empty if there is none."""
        first = next(iter(self.writes), None)
        if first is not None:
            return f"the step changes {first.place.path}"
        if self.calls:
            return "the step makes calls on the host"
        if self.rebound or self.flags:
            return f"the step changes {(*self.rebound, *(name for name, _ in self.flags))[0]}"
        return "the step does work on the host" if self.program.needed or self.program.decisions else ""


class RefusedError(CaptureError):
    """A change of the Python value at `path` that later calls cannot repeat."""

    def __init__(self, path: str, before: object, after: object, why: str, way_out: str) -> None:
        self.path = path
        super().__init__(f"the step changes {path}: {shown(before)} -> {shown(after)}; {why}", NEEDED, way_out)


NEEDED = "assignments of numbers, tensors and plain values, which each call repeats"
WAYS_OUT = f"return it from the step, or use {CALLBACK}"
