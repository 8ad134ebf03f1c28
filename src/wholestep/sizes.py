"""Numbers that follow from sizes of the batch: an int with the expression that computes it.

A step that is captured with symbols has such numbers where a step captured for one batch has plain ones. Planning,
partitioning and passes compute with them as with any int. What they add, multiply and divide keeps its expression, and
what they compare is noted: a program made with them holds for all sizes for which each comparison ends alike.
Prices (bytes, microseconds) are plain numbers: they choose among programs that are all right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, cast

_GROWS = re.compile(r"[\w\s()+*]+ (<|>|<=|>=) \d+\)*")  # not in itself: its left side grows with each symbol


def quotient(number: float, other: float) -> float:
    """A quotient as C++ computes it: infinite by 0."""
    return number / other if other else number * math.inf


_NAMES: Final[dict[str, Any]] = {
    "min": min, "max": max, "abs": abs, "int": int, "float": float, "math": math, "quotient": quotient,
}  # fmt: skip


@dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes under which a program is right; `where` is the user's line that asked, or what did."""

    text: str
    where: str


@dataclass
class SizeGuards:
    """The symbols of one capture, and what was compared of them. A symbol stands for the size of `dims[symbol]`: a dim
    of a tensor of the batch, by name of the tensor. `hints` are the sizes of the capture, `symbols` those of the trace,
    and `now` the sizes of the call that runs, in the order of `dims`. `counted`: numbers of rows that the step counts
    while it runs, and the most of each; their hints are primes above that, which are equal to no other size. `say` gets
    what a program does for some sizes. `busy` surrounds what takes long in the middle of a call, so that other ranks
    wait for it.
    """

    dims: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    hints: dict[str, int] = field(default_factory=dict[str, int])
    noted: dict[str, None] = field(default_factory=dict[str, None])
    symbols: Any = None
    now: tuple[int, ...] = ()
    counted: dict[str, int] = field(default_factory=dict[str, int])
    say: Callable[[str], object] = str
    busy: Callable[[], AbstractContextManager[object]] = nullcontext
    _apart: dict[int, tuple[Any, dict[Any, Any]]] = field(default_factory=dict[int, tuple[Any, dict[Any, Any]]])

    def by_name(self) -> dict[str, tuple[int, ...]]:
        """The dims of each tensor that symbols stand for."""
        names = dict.fromkeys(name for name, _ in self.dims.values())
        return {name: tuple(dim for other, dim in self.dims.values() if other == name) for name in names}

    def own(self, cache: dict[Any, Any]) -> dict[Any, Any]:
        """What takes the place of a cache of results for results that these numbers led to: computing them has noted
        guards here, and would note them nowhere for another capture whose numbers look the same.
        """
        return self._apart.setdefault(id(cache), (cache, {}))[1]

    def note(self, text: str, outcome: bool) -> None:
        """Two numbers were compared."""
        self.noted[text if outcome else f"not ({text})"] = None

    def not_for_all(self) -> str:
        """What was found of numbers of rows that the step counts, and does not hold for all of them; "" without it.

        What differs is treated as if it could: that is right where it is the same. No dim of such rows is cut, so 0 and
        1 row need nothing else than several.
        """
        for text in self.noted:
            symbols = {*re.findall(r"\w+", text)} & self.counted.keys()
            differ = " == " in text if text.startswith("not (") else " != " in text
            if not symbols or differ:
                continue
            holds, most = evaluator([text], [*symbols]), [self.counted[symbol] for symbol in symbols]
            grows = _GROWS.fullmatch(text) is not None  # true at both ends, it is true between them
            rows: Iterable[Sequence[int]] = ([2] * len(most), most) if grows else ([n] for n in range(2, most[0] + 1))
            if (len(most) > 1 and not grows) or not all(holds(*numbers)[0] for numbers in rows):
                return text
        return ""

    def shown(self, text: str) -> str:
        """An expression with dims of arguments in place of symbols: `tokens.shape[1] > 8`."""
        for symbol in sorted(self.dims, key=len, reverse=True):
            name, dim = self.dims[symbol]
            text = text.replace(symbol, f"{name}.shape[{dim}]")
        return text

    def shown_now(self) -> str:
        """The sizes of the call that runs: `tokens.shape[0] = 4, tokens.shape[1] = 8`."""
        return ", ".join(f"{self.shown(symbol)} = {n}" for symbol, n in zip(self.dims, self.now, strict=True))


def _text(value: object) -> str:
    return value.text if isinstance(value, SizeInt) else repr(value)


_Method = Callable[["SizeInt", object], Any]


def _arithmetic(symbol: str, apply: Callable[[int, int], int]) -> tuple[_Method, _Method]:
    """An operator and its reflected form, which keep the expression."""

    def run(self: SizeInt, left: object, right: object) -> Any:
        if not isinstance(left, int) or not isinstance(right, int):
            return NotImplemented
        value = apply(int(left), int(right))
        return SizeInt(value, f"({_text(left)} {symbol} {_text(right)})", self.guards)

    return lambda self, other: run(self, self, other), lambda self, other: run(self, other, self)


def _comparison(symbol: str, apply: Callable[[float, float], bool]) -> Any:
    def run(self: SizeInt, other: object) -> bool:
        if not isinstance(other, (int, float)):
            return NotImplemented
        is_size = type(other) is int and counted_in(self) and "%" not in self.text
        if is_size and (answer := for_several(apply, int(other))) is not None:
            return answer
        outcome = apply(int(self), other if isinstance(other, float) else int(other))
        if _text(other) != self.text:
            self.guards.note(f"{self.text} {symbol} {_text(other)}", outcome)
        return outcome

    return run


def for_several(compare: Callable[[int, int], Any], limit: int) -> bool | None:
    """What a comparison of a size with a number is for all sizes but 0 and 1, if that is the same: no dim of rows that
    a step counts is cut, so that few rows need nothing else than several. A remainder is no size.
    """
    answers = {bool(compare(n, limit)) for n in (2, max(2, limit), max(2, limit) + 1)}
    return answers.pop() if len(answers) == 1 else None


class UnitInt(int):
    """The size of a dim that merges an outer dim with others: it is cut between units of so many places alone, so that
    its pieces are those of the outer dim. As a number it is any other int, and what is computed with it is plain.

    A `SizeInt` is one, so that Python asks the `SizeInt` first where the two are computed with or compared.
    """

    unit: int | None = None

    @staticmethod
    def of(value: int, unit: int) -> UnitInt:
        """A size, and the places of one unit."""
        size = UnitInt(value)
        size.unit = unit
        return size


class SizeInt(UnitInt):
    """An int that follows from sizes: its value for the sizes of the capture, and `text`, an expression of symbols.

    Quotients and what math functions return are plain numbers.
    """

    text: str
    guards: SizeGuards

    def __new__(cls, value: int, text: str, guards: SizeGuards) -> SizeInt:
        """A number and how it is computed."""
        size = super().__new__(cls, value)
        size.text, size.guards = text, guards
        return size

    __hash__ = int.__hash__
    __add__, __radd__ = _arithmetic("+", lambda a, b: a + b)
    __sub__, __rsub__ = _arithmetic("-", lambda a, b: a - b)
    __mul__, __rmul__ = _arithmetic("*", lambda a, b: a * b)
    __floordiv__, __rfloordiv__ = _arithmetic("//", lambda a, b: a // b)
    __mod__, __rmod__ = _arithmetic("%", lambda a, b: a % b)
    __pow__, __rpow__ = _arithmetic("**", lambda a, b: a**b)  # pyright: ignore[reportAssignmentType]
    __eq__ = _comparison("==", lambda a, b: a == b)
    __ne__ = _comparison("!=", lambda a, b: a != b)
    __lt__ = _comparison("<", lambda a, b: a < b)
    __le__ = _comparison("<=", lambda a, b: a <= b)
    __gt__ = _comparison(">", lambda a, b: a > b)
    __ge__ = _comparison(">=", lambda a, b: a >= b)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> SizeInt:
        return SizeInt(-int(self), f"(-{self.text})", self.guards)

    def __pos__(self) -> SizeInt:
        return self

    def __abs__(self) -> SizeInt:
        return SizeInt(abs(int(self)), f"abs({self.text})", self.guards)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self


def unit_of(size: int) -> int | None:
    """The places between which a dim of this size is cut; None where it may be cut anywhere."""
    return None if type(size) is int else getattr(size, "unit", None)


def counted_in(value: Any) -> list[str]:
    """The symbols of rows that the step counts, in a number or in nested lists of numbers."""
    if isinstance(value, (list, tuple)):
        return [symbol for item in cast(Sequence[Any], value) for symbol in counted_in(item)]
    if not isinstance(value, (SizeInt, SizeFloat)) or not value.guards.counted:
        return []
    return [symbol for symbol in re.findall(r"\w+", value.text) if symbol in value.guards.counted]


def in_units(size: int, unit: int | None) -> int:
    """A size that is cut between units alone."""
    if unit is None:
        return size
    if isinstance(size, SizeInt):
        unit_size = SizeInt(int(size), size.text, size.guards)
        unit_size.unit = unit
        return unit_size
    return UnitInt.of(size, unit)


def whole(size: int) -> int:
    """A size that may be cut anywhere."""
    if unit_of(size) is None:
        return size
    return SizeInt(int(size), size.text, size.guards) if isinstance(size, SizeInt) else int(size)


class SizeFloat(float):
    """A float that follows from sizes, as an argument of a call; what is computed with it is a plain float."""

    text: str
    guards: SizeGuards

    def __new__(cls, value: float, text: str, guards: SizeGuards) -> SizeFloat:
        """A number and how it is computed."""
        number = super().__new__(cls, value)
        number.text, number.guards = text, guards
        return number


def least(a: int, b: int) -> int:
    """The smaller of two numbers; of sizes, it is for all sizes."""
    return _one_of("min", min, a, b)


def most(a: int, b: int) -> int:
    """The larger of two numbers; of sizes, it is for all sizes."""
    return _one_of("max", max, a, b)


def _one_of(name: str, choose: Callable[[int, int], int], a: int, b: int) -> int:
    for size in (a, b):
        if isinstance(size, SizeInt):
            return SizeInt(choose(int(a), int(b)), f"{name}({_text(a)}, {_text(b)})", size.guards)
    return choose(a, b)


def text_of(number: int) -> Hashable:
    """A number, or the expression of a size, as a key that compares no sizes."""
    return number.text if isinstance(number, SizeInt) else number


def equal(a: Sequence[int], b: Sequence[int]) -> bool:
    """True if sizes are equal, also of other batches, which is noted. For a caller who is right, if not best, when it
    takes equal sizes for different ones: sizes that are equal by chance, in this batch alone, are different.
    """
    if list(map(int, a)) != list(map(int, b)) or any(map(_by_chance, a, b)):
        return False
    return tuple(a) == tuple(b)


def _by_chance(a: int, b: int) -> bool:
    """True if two equal sizes differ in a batch of other sizes, where those that are equal now still are."""
    symbolic = a if isinstance(a, SizeInt) else b
    if not isinstance(symbolic, SizeInt) or _text(a) == _text(b):
        return False
    sizes = {symbol: 2 * size + 1 for symbol, size in symbolic.guards.hints.items()}
    return bool(evaluate(_text(a), sizes) != evaluate(_text(b), sizes))


def evaluator(texts: Sequence[str], symbols: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """A function from the sizes, in the order of `symbols`, to the values of expressions."""
    scope = dict(_NAMES)
    exec(f"def values({', '.join(symbols)}):\n return ({''.join(f'{text}, ' for text in texts)})", scope)
    return scope["values"]


def evaluate(text: str, sizes: Mapping[str, Any]) -> Any:
    """The value of one expression."""
    return eval(text, dict(_NAMES), dict(sizes))
