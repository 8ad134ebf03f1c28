"""Python numbers that a step changes: each call computes them on the host, with Python arithmetic.

During a trace such a number is a 0-dim fake tensor. Arithmetic between these numbers and constants is recorded and
repeated before each call; a number that is used with a tensor becomes an input of the graph. A branch on it is guarded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, cast

import numpy as np
import torch

from .. import _torch
from ..errors import CaptureError
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta
from .locations import Location
from .state import put_back

_DTYPES: dict[Any, torch.dtype] = {
    float: torch.float64, np.float64: torch.float64, int: torch.int64, bool: torch.bool, np.bool_: torch.bool,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "multiply": operator.mul, "subtract": operator.sub,
    "div": operator.truediv, "truediv": operator.truediv, "true_divide": operator.truediv, "divide": operator.truediv,
    "floordiv": operator.floordiv, "floor_divide": operator.floordiv, "mod": operator.mod, "remainder": operator.mod,
    "pow": operator.pow, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_BINARY.update({f"r{name}": lambda a, b, function=function: function(b, a) for name, function in _BINARY.items()})
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "item": lambda x: x, "clone": lambda x: x, "detach": lambda x: x, "double": float,
}  # fmt: skip
AS_TENSOR = (torch.tensor, torch.as_tensor)


@dataclass(frozen=True)
class At:
    """The result of instruction `index`, as an argument."""

    index: int


@dataclass(frozen=True)
class TracedChoice:
    """A branch resolved during the trace: the truth of result `index` must be `expected` in each call.

    A `late` decision depends on an effect, such as a scheduler's step.
    """

    index: int
    expected: bool
    where: str
    late: bool = False


@dataclass(frozen=True)
class HostProgram:
    """The host computation before each call: the `needed` instructions, in order.

    An `At` among the arguments of an instruction refers to an earlier result. `inputs` maps inputs of the graph to the
    instruction that computes each. `changed` are the dicts that effects modify.
    """

    instructions: tuple[partial[Any], ...] = ()
    needed: tuple[int, ...] = ()
    inputs: Mapping[str, int] = field(default_factory=dict[str, int])
    decisions: tuple[TracedChoice, ...] = ()
    changed: tuple[dict[Any, Any], ...] = ()

    def run(self) -> list[Any]:
        """Return the result of each instruction, in order; None for instructions that are not needed."""
        results = dict[int, Any]()
        for index in self.needed:
            self._value(index, results)
        return [results.get(index) for index in range(len(self.instructions))]

    def decided_otherwise(self) -> str:
        """Return the source line of the first branch that would differ now, or "". Has no side effect."""
        results = dict[int, Any]()
        if any(d.late for d in self.decisions):
            with preserved(self.changed):
                results = dict(enumerate(self.run()))
        return next((d.where for d in self.decisions if bool(self._value(d.index, results)) is not d.expected), "")

    def saved(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """What effects modify, and its items now."""
        return [(items, {k: _copied(v) for k, v in items.items()}) for items in self.changed]

    def _value(self, index: int, results: dict[int, Any]) -> Any:
        """Return the result of an instruction; `made` holds the results so far."""
        if index not in results:
            line = self.instructions[index]
            results[index] = line.func(*[self._value(a.index, results) if type(a) is At else a for a in line.args])
        return results[index]


@contextmanager
def preserved(dicts: Sequence[dict[Any, Any]]) -> Generator[None]:
    """Restore the items of the given dicts, and lists and 0-dim tensors among these, after this context."""
    with _torch.undone():
        for items in dicts:
            _torch.undo(put_back, items, {k: _copied(v) for k, v in items.items()})
        yield


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.clone()
    return list(cast(list[Any], value)) if type(value) is list else value


@dataclass
class _Number:
    index: int
    now: Any
    late: bool
    fake: torch.Tensor
    name: str
    path: str


class Numbers:
    """The numbers of one trace."""

    def __init__(self, mode: Any, first: int, add_input: Callable[[int, Input, torch.Tensor], None]) -> None:
        self._mode, self._first, self._add_input = mode, first, add_input
        self._lines: list[partial[Any]] = []
        self._by_id: dict[int, _Number] = {}
        self._options: dict[int, _Number] = {}
        self._decisions: list[TracedChoice] = []
        self._effects: set[int] = set()
        self._casts: dict[int, torch.Tensor] = {}
        self._changed: list[dict[Any, Any]] = []
        self._tensors, self._last = set[int](), cast(Any, None)

    def __contains__(self, value: object) -> bool:
        return _torch.identity(value) in self._by_id

    def __bool__(self) -> bool:
        return bool(self._by_id or self._options)

    def stands_for_one(self, tensor: torch.Tensor) -> bool:
        """Return whether uncompiled code has a Python number for `tensor`, which is a number or the cast of one."""
        return self._of(tensor) is not None or _torch.identity(tensor) in self._casts

    def among(self, values: Sequence[Any]) -> bool:
        """Return whether a number is among these values, or inside a list or an index among them."""
        for value in values if self else ():
            if _torch.is_fake(value):
                if self._of(value):
                    return True
            elif isinstance(value, (list, tuple, slice)) and self.among(parts_of(value)):
                return True
        return False

    def read(self, place: Location, now: Any, late: bool = False) -> torch.Tensor:
        """Record a read of `place` and return its number; `late` if an effect changes it before."""
        return self._made(partial(place.get), now, late, place.path, place.path)

    def plain(self, value: Any) -> Any:
        """Return the value of a number in the captured call; any other value unchanged."""
        number = self._of(value)
        return number.now if number else value

    def of_math(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a function of `math`."""
        number = self.call(original, args) if self and not kwargs else NotImplemented
        return original(*args, **kwargs) if number is NotImplemented else number

    def as_float(self, value: Any) -> Any:
        """In place of `float` of torch's own code."""
        return value if value in self else float(value)

    def count(self) -> int:
        """How much is recorded of numbers."""
        return len(self._lines) + len(self._decisions) + len(self._casts) + len(self._by_id)

    def _of(self, value: Any) -> _Number | None:
        key = _torch.identity(value)
        return self._by_id.get(key) or self._options.get(key)

    def option(self, fake: torch.Tensor, place: Location, value: Any, now: float) -> None:
        """Register a hyper's input; the host reads it at `place` if the step returns it or passes it to a callback."""
        if isinstance(value, torch.Tensor):
            self._tensors.add(_torch.identity(fake))
        self._options[_torch.identity(fake)] = _Number(len(self._lines), now, False, fake, place.path, place.path)
        self._lines.append(partial(place.get))

    def effect(self, changed: Sequence[dict[Any, Any]], fn: Callable[..., Any], *args: Any) -> None:
        """Record a host call with an effect on the dicts `changed`; arguments may be numbers."""
        self._changed += [c for c in changed if all(c is not other for other in self._changed)]
        self._effects.add(len(self._lines))
        self._lines.append(partial(fn, *map(self.argument, args)))

    def argument(self, value: Any) -> Any:
        """Return a value as an instruction's argument."""
        index = self.index_of(value)
        return value if index is None else At(index)

    def taken(self, getter: Callable[[], Any]) -> At:
        """Record what `read` returns in each call, which is no number."""
        self._lines.append(partial(getter))
        return At(len(self._lines) - 1)

    def index_of(self, value: Any) -> int | None:
        """Return the instruction that computes a number; None for any other value."""
        number = self._of(value)
        return number.index if number else None

    def call(self, fn: Callable[..., Any], args: Sequence[Any], of_torch: bool = False) -> Any:
        """Record `fn(*args)` as a new number; NotImplemented if an argument is neither a number nor a constant.

        `of_torch`: torch.optim makes the call; it stays in the graph if only hypers are involved.
        """
        numbers = [self._of(a) for a in args]
        carried = any(_torch.identity(a) in self._by_id for a in args)
        if not (carried or (any(numbers) and not of_torch)) or not all(
            n or isinstance(a, (int, float)) for n, a in zip(numbers, args, strict=True)
        ):
            return NotImplemented
        late = any(n is not None and n.late for n in numbers)
        now = fn(*[n.now if n else a for n, a in zip(numbers, args, strict=True)])
        if type(now) not in _DTYPES:
            return NotImplemented
        path = next(n.path for n in numbers if n)
        line = partial(fn, *map(self.argument, args))
        return self._made(line, now, late, f"number.{len(self._lines)}", path)

    def _made(self, line: partial[Any], now: Any, late: bool, name: str, path: str) -> torch.Tensor:
        dtype = _DTYPES[type(now)]
        position = self._first + len(self._by_id)
        fake, self._last = _torch.new_input(self._mode, dtype, position, self._last)
        names = {n.name for n in self._by_id.values()} if name == path else set[str]()
        name = name if name not in names else f"{name}@{len(self._lines)}"
        self._by_id[_torch.identity(fake)] = _Number(len(self._lines), now, late, fake, name, path)
        self._lines.append(line)
        self._add_input(position, Input(name, Role.HYPER, TensorMeta((), (), dtype, "cpu")), fake)
        return fake

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, of_torch: bool) -> Any:
        """Record a torch function on numbers as Python arithmetic; NotImplemented if a tensor is involved."""
        name = getattr(func, "__name__", "").strip("_")
        first = self._of(args[0]) if args else None
        if name == "bool" and first:  # the truth of a number in the captured call, which is guarded
            self._decisions.append(TracedChoice(first.index, bool(first.now), where, first.late))
            return bool(first.now)
        if first and _torch.identity(args[0]) in self._tensors and _is_of_tensor(func):
            return NotImplemented
        if name in ("getitem", "setitem"):
            for number in (v for v in parts_of(args[1], (tuple,)) if v in self):
                self.refuse_read(number, "use as an index", where)
        if kwargs:
            return NotImplemented
        if len(args) == 2:
            plain = _BINARY.get(name) or _BINARY.get(name.removeprefix("i"))
            if plain:
                return self.call(plain, args, of_torch)
        if len(args) == 1 and name in _UNARY:
            return self.call(_UNARY[name], args, of_torch)
        return NotImplemented

    def refuse_read(self, value: Any, how: str, where: str) -> None:
        """Raise CaptureError if the step reads a recorded number as a Python value."""
        number = self._by_id.get(_torch.identity(value))
        if number:
            error = CaptureError(
                f"the step reads {number.path}, a number that changes between calls, with {how}",
                "arithmetic, comparisons and functions of `math` on changing numbers, which each call repeats",
                f"compute with it as it is, return it, or pass it to ws.callback; or pass {number.path} "
                "to the step as an argument, which costs a capture for each of its values",
                where,
            )
            error.place = number.path
            raise error

    def operands(self, func: Any, args: Any) -> Any:
        """Return `args` of a tensor operation with numbers cast as type promotion treats Python numbers."""
        tensors = [v for v in parts_of(args) if isinstance(v, torch.Tensor)]
        plain_tensors = [t for t in tensors if _torch.identity(t) not in self._by_id]
        if len(plain_tensors) == len(tensors):
            return args
        name = getattr(func, "__name__", "").strip("_")
        floats = {t.dtype for t in plain_tensors if t.is_floating_point()}
        sized = any(t.dim() and t.is_floating_point() for t in plain_tensors)
        if len(floats) == 1 and (not sized or name == "lerp"):
            return self._converted(args, {True: next(iter(floats))})
        if plain_tensors and not floats and all(not t.is_complex() for t in plain_tensors):
            kinds = {t.dtype for t in plain_tensors if t.dtype is not torch.bool}
            return self._converted(
                args, {True: torch.get_default_dtype(), **({False: kinds.pop()} if len(kinds) == 1 else {})}
            )
        return args

    def stacked(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """`torch.tensor` of a number, or of a list with numbers and 0-dim tensors of the trace; else NotImplemented."""
        listed = func in AS_TENSOR and args and (isinstance(args[0], (list, tuple)) or self._of(args[0]))
        if not listed:
            return NotImplemented
        parts = parts_of(args[0])
        traced = [v for v in parts if isinstance(v, torch.Tensor) and _torch.is_fake(v)]
        kinds = {**_DTYPES, float: torch.get_default_dtype()}
        dtypes = [v.dtype if torch.is_tensor(v) else kinds.get(v.__class__) for v in map(self.plain, parts)]
        if not traced or any(t.dim() for t in traced) or None in dtypes or named.keys() - {"dtype", "device"}:
            return NotImplemented
        dtype = named.get("dtype") or reduce(torch.promote_types, cast("list[torch.dtype]", dtypes))
        device = named.get("device") or torch.get_default_device()

        def made(value: Any) -> torch.Tensor:
            if isinstance(value, (list, tuple)):
                return torch.stack([made(item) for item in cast(Sequence[Any], value)])
            return torch.as_tensor(value, dtype=dtype, device=device).detach().clone()

        return made(args[0])

    def _converted(self, args: Any, kinds: Mapping[bool, torch.dtype]) -> Any:
        def convert(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and _torch.identity(value) in self._by_id:
                cast_one = value.to(kinds.get(value.is_floating_point(), value.dtype))
                self._casts[_torch.identity(cast_one)] = (
                    cast_one  # kept: the id of a tensor that is gone may be another's
                )
                return cast_one
            if type(value) in (list, tuple):
                return type(value)(convert(v) for v in cast(Sequence[Any], value))
            return value

        return tuple(convert(a) for a in args)

    def program(self, used: set[str], results: set[int]) -> HostProgram:
        """Return the host program for the inputs `used` and the instructions `wanted`, with all effects."""
        inputs = {n.name: n.index for n in self._by_id.values() if n.name in used}
        needed = {*inputs.values(), *results, *self._effects, *(d.index for d in self._decisions if d.late)}
        for index in range(len(self._lines) - 1, -1, -1):
            if index in needed:
                needed |= {a.index for a in self._lines[index].args if isinstance(a, At)}
        lines, order, decisions = tuple(self._lines), tuple(sorted(needed)), tuple(self._decisions)
        return HostProgram(lines, order, inputs, decisions, tuple(self._changed))


def _is_of_tensor(func: Any) -> bool:
    """Return whether a function changes a tensor in place, or gives one that may be changed."""
    name: str = getattr(func, "__name__", "")
    return name in ("clone", "detach") or (name.endswith("_") and not name.endswith("__"))


def parts_of(value: Any, opened: tuple[type, ...] = (list, tuple)) -> list[Any]:
    """Return the values inside nested slices and sequences of the `opened` types."""
    if isinstance(value, slice):
        bounds = cast(Any, value)
        return [bounds.start, bounds.stop, bounds.step]
    return [v for part in value for v in parts_of(part, opened)] if isinstance(value, opened) else [value]
