"""Host effects of a step: assignments, callbacks (`wholestep.callback`) and host arithmetic that each call repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import _torch
from ..errors import CaptureError
from .assumptions import Assumption
from .call_structure import Structure, put_together
from .host_numbers import At, HostProgram
from .locations import MISSING, GroupEntry, Location, is_number, shown
from .reachable import Container

CALLBACK = "`wholestep.callback(fn, *values)`, which calls fn with the values of each step"


@dataclass(frozen=True)
class Promoted:
    """Paths of Python values that are state of the step: `numbers` are updated on the host, `tensors` in the graph.
    `arrays` are arguments whose contents it reads, which are constants. Lines among `numbers` count rows of the batch.
    """

    numbers: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    arrays: frozenset[str] = frozenset()

    def __or__(self, other: Promoted) -> Promoted:
        return Promoted(self.numbers | other.numbers, self.tensors | other.tensors, self.arrays | other.arrays)

    def __le__(self, other: Promoted) -> bool:
        return self.numbers <= other.numbers and self.tensors <= other.tensors

    def __sub__(self, numbers: Set[str]) -> Promoted:
        return Promoted(self.numbers - numbers, self.tensors, self.arrays)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.tensors or self.arrays)


ANY_COUNT = "rows of the batch"
"""In place of a path among `Promoted.numbers`: the step counts rows that the batch alone determines, too."""
BATCH_COUNTS = Promoted(frozenset([ANY_COUNT]))


@dataclass(frozen=True)
class Extra:
    """A leaf: extra result `index`, which the host needs; or the state of an optimizer that the step makes, by name."""

    index: int | str


@dataclass(frozen=True)
class Recipe:
    """A value that each call builds; its leaves are plain values, host numbers (`At`) or graph results (`Extra`)."""

    structure: Structure
    leaves: tuple[Any, ...]

    def value(self, numbers: Sequence[Any], extra: Mapping[int | str, Any]) -> Any:
        """Build the value for one call."""
        values = [numbers[v.index] if type(v) is At else extra[v.index] if type(v) is Extra else v for v in self.leaves]
        return put_together(self.structure, values)


@dataclass(frozen=True)
class Write:
    """An assignment at the end of a call; without `recipe`, the entry is deleted.

    `adds`: eager would add to a gradient that is there before the call.
    """

    place: Location
    recipe: Recipe | None
    adds: bool = False


@dataclass(frozen=True)
class Called:
    """A callback at the end of a call: `fn(*args, **kwargs)` of `recipe`."""

    fn: Callable[..., object]
    recipe: Recipe


@dataclass(frozen=True)
class Effects:
    """Host work of each call, and the Python values that it assumes unchanged (`expected`).

    `extra` is the number of graph results that only the host needs. `rebound` names tensors that a call replaces by
    new objects. `flags` are `(parameter, requires_grad)` pairs to set at the end. `arguments` holds, by
    number, the objects of the current call whose items a step may assign. `unread` are paths of arguments that the step
    does not read. `open_arguments` holds, by number of the leaf, arguments of the current call whose values may be any.
    """

    program: HostProgram = field(default_factory=HostProgram)
    writes: tuple[Write, ...] = ()
    calls: tuple[Called, ...] = ()
    expected: tuple[Assumption, ...] = ()
    extra: int = 0
    rebound: tuple[str, ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    carried: Promoted = Promoted()
    arguments: dict[int, Any] = field(default_factory=dict[int, Any])
    unread: tuple[str, ...] = ()
    open_arguments: dict[int, Any] = field(default_factory=dict[int, Any])

    def is_unread(self, name: str) -> bool:
        """True for a leaf of the arguments, by name, that the step does not read."""
        return any(name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".", "[") for path in self.unread)

    def group_options(self) -> set[tuple[int, int, Any]]:
        """Options of parameter groups that a call updates, as (identity of the optimizer, group index, key)."""
        places = [*(w.place for w in self.writes), *(e.place for e in self.expected if e.kind in ("type", "tensor"))]
        options = [(place.holder, place.key) for place in places]
        return {(id(holder.optimizer), holder.group, key) for holder, key in options if isinstance(holder, GroupEntry)}

    def refuse_symbolic(self, results: Iterable[Any], counts: bool) -> None:
        """Raise SizesFixedError if Python would get a symbolic number: among the results, or by an effect."""
        values = [w.recipe for w in self.writes if w.recipe is not None] + [call.recipe for call in self.calls]
        host = [argument for line in self.program.instructions for argument in line.args]
        leaves = (*results, *host, *(leaf for value in values for leaf in value.leaves))
        if any(isinstance(leaf, _torch.SYMBOLIC) for leaf in leaves):
            if counts:
                problem = "the step gives a number of rows that it counts to Python: as a result, or as what it assigns"
                raise CaptureError(problem, "tensors, and numbers that are known before", "give `mask.sum()` instead")
            raise SizesFixedError("the step gives a size of the batch to Python: as a result, or as what it assigns")

    @property
    def acts(self) -> bool:
        """True if a call does more than compute tensors."""
        host = self.program.needed or self.program.decisions
        return bool(self.writes or self.calls or self.rebound or self.flags or host)


class SizesFixedError(CaptureError):
    """A step cannot be captured with symbols for the sizes of its batch; it is captured for each size."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text, "a step that computes alike for all sizes", "none: it is captured for each", where)


class CountsRowsError(CaptureError):
    """A step counts rows while it runs, and is captured with symbols for their numbers."""


class RefusedError(CaptureError):
    """A change of the Python value at `path` that later calls cannot repeat."""

    def __init__(self, path: str, before: object, after: object, why: str, way_out: str) -> None:
        self.path = path
        super().__init__(f"the step changes {path}: {shown(before)} -> {shown(after)}; {why}", NEEDED, way_out)


NEEDED = "assignments of numbers, tensors and plain values, which each call repeats"
WAYS_OUT = f"return it from the step, or use {CALLBACK}"


@dataclass(frozen=True)
class Change:
    """An entry of a container that is another object after a step."""

    container: Container
    key: Any
    before: Any
    after: Any

    @property
    def resizes_list(self) -> bool:
        """True if a list has more items, or fewer."""
        return isinstance(self.container.holder, list) and MISSING in (self.before, self.after)

    @property
    def replaces_module(self) -> bool:
        """True if a module or a parameter is replaced."""
        before_is = isinstance(self.before, torch.nn.Module)
        return before_is or isinstance(self.after, (torch.nn.Module, torch.nn.Parameter))

    @property
    def can_stay(self) -> bool:
        """True if the entry can be set for good: all calls find it at this place."""
        container = self.container
        settable = container.opaque is None or isinstance(container.holder, (set, deque))
        of_calls = container.lookup is not None or container.style in ("modules", "tensor", "fake")
        return settable and not (of_calls or container.refused or self.replaces_module)


_NUMPY = "a graph has no inputs of numpy's number types"
REFUSED: tuple[tuple[Callable[[Change], bool], str, str], ...] = (
    (lambda c: not is_number(c.after) and isinstance(c.after, np.generic), _NUMPY, "convert it with float()"),
    (lambda c: c.container.opaque is not None, "it has no items that each call could assign", WAYS_OUT),
    (lambda c: c.resizes_list, "lists must keep their length", WAYS_OUT),
    (lambda c: isinstance(c.key, torch.Tensor), "a key that is a number of the step or a tensor", WAYS_OUT),
    (lambda c: c.replaces_module, "a step cannot replace modules and parameters", "replace it between calls"),
)
"""Changes that later calls cannot repeat: which, why, and what to do instead."""


Record = Callable[[Callable[..., object], tuple[Any, ...], dict[str, Any]], None]
_recording: ContextVar[Record | None] = ContextVar("_recording", default=None)


def callback(fn: Callable[..., object], *values: Any, **named: Any) -> None:
    """Call `fn(*values)` on the host in every step, with the real values of that step. Works in eager code too.

    A compiled step makes the calls after the step, in program order, and drops the return value of `fn`. Tensors are
    passed as device tensors without synchronization: `float(tensor)` or `print(tensor)` in `fn` waits for the device,
    `list.append` does not. Under `semantics="per_rank"` each rank passes its own values. Every rank calls `fn`; check
    `torch.distributed.get_rank()` to print on one rank only.

    Args:
        fn: any function: `print`, `losses.append`, `progress.update`, a logger's method.
        *values: tensors, numbers that the step changes, containers of them, or any other object, passed unchanged.
        **named: keyword arguments of `fn`, likewise.

    Example:
        >>> def train_step(model, optimizer, batch):
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     ws.callback(losses.append, loss.detach())
    """
    record = _recording.get()
    if record is None:
        fn(*values, **named)
    else:
        record(fn, values, named)


@contextmanager
def recorded(record: Record) -> Generator[None]:
    """Inside this context, `callback` passes its arguments to `record` instead of calling `fn`."""
    with _torch.undone():
        _torch.undo(_recording.set, _recording.get())
        _recording.set(record)
        yield
