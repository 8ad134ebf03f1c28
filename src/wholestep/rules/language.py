"""The rule language: one line of named factors for the dims of an op's tensors that are sharded together.

"m k, k n -> m n"                                  a factor that is missing in an output is summed there
"..., ... -> ..."                                  leading dims, aligned from the right, that broadcast
"... d!, d!, d! -> ... d!, ... 1, ... 1"           `!`: this dim stays whole; `1`: a dim of size one
"... x[dim]! -> ... x[dim]!"                       the dims in the argument `dim`, among those of `...`
"(a b) c -> a b c"                                 a merged dim: only its outer factor shards it, evenly
"[...], [...], () -> [...]"                        lists, entry by entry; other tensors are shared by all entries
"n c, * -> (), *"                                  `()`: a scalar; `*`: any tensor, whole
"reduction=0: ...+ -> ... | ...+ -> ()"            cases, tried in order; `+`: the term of all further tensors
"{m n}, m k!, k! n -> m n"                         braces: a tensor that broadcasts to these dims
"... a! b! -> ..., ... c d*"                       `*` after dims: an optional tensor

docs/rules.md has the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NoReturn, cast

from ..errors import RuleError, shown

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TOKEN = re.compile(rf"\s*(->|(?:{_NAME})?\.\.\.|(?:{_NAME}|1)(?:\[#?{_NAME}\])?|\d+|[()\[\]{{}}!?,*|+:=])")
_DIM = re.compile(rf"(?:({_NAME})|1)(?:\[(#?{_NAME})\])?")
_GRAMMAR = "dims as name, name[argument], (a b), ..., name... or 1, each with an optional '!' or '?'; or (), *, [dims]"
_NUMBER = re.compile(r"[0-9]{1,9}")
_END = "the end"
MOST_CHARACTERS = 4000
_SHOWN = 200  # characters around the one that an error points to
REDUCTIONS = ("sum", "max", "min", "avg")


def base(factor: str) -> str:
    """The name of a factor in the rule: `...` for `.2`, `x` for `x.1`, one of several dims with that name."""
    return factor.partition(".")[0] or "..." if "." in factor else factor


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor: its merged factors, outermost first; none for a dim of size one.

    `rest`: any number of dims, `...` or `name...`. `argument`: the argument that lists these dims, or, as `#argument`,
    has an entry for each. A `loose` factor stays whole unless it has the same size in all tensors.
    """

    factors: tuple[str, ...]
    unsharded: bool = False
    rest: bool = False
    argument: str = ""
    loose: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its factors as in the rule."""
        return self.factors or (("...",) if self.rest else ())

    def __str__(self) -> str:
        name = " ".join(self.factors) + ("..." if self.rest else "") or "1"
        name += f"[{self.argument}]" if self.argument else ""
        return (f"({name})" if len(self.factors) > 1 else name) + ("!" if self.unsharded else "?" if self.loose else "")


@dataclass(frozen=True)
class Term:
    """One tensor of a rule, or all tensors of a list. An `opaque` tensor stays whole, whatever its dims.

    `repeats`: the term of all further tensors. `broadcasts`: the tensor has the last of these dims, some of size one.
    `optional`: opaque if the tensor has other dims, such as a missing operand or an empty result.
    """

    dims: tuple[Dim, ...] = ()
    is_list: bool = False
    opaque: bool = False
    repeats: bool = False
    broadcasts: bool = False
    optional: bool = False

    def __str__(self) -> str:
        text = "*" if self.opaque else " ".join(map(str, self.dims)) or "()"
        text = f"[{text}]" if self.is_list else f"{{{text}}}" if self.broadcasts else text
        return text + "*" * self.optional + "+" * self.repeats


@dataclass(frozen=True)
class When:
    """The condition of a case: an argument equals a number, or is true if no number is given."""

    argument: str
    value: int | None = None

    def __str__(self) -> str:
        return self.argument + ("" if self.value is None else f"={self.value}")


@dataclass(frozen=True)
class RuleText:
    """One case of a parsed rule.

    `linear`: sets of inputs; the op is linear in each set taken together. `moves`: sets of inputs whose values the op
    only moves. `reduces`: by factor, how an output that lacks it is partial; sums by default; '' if all ranks compute
    the same.
    Invariants: a factor stands at most once in a term; a factor whole in one term is whole in all; `...` at most once
    in a term.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    linear: tuple[frozenset[int], ...] = ()
    reduces: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    moves: tuple[frozenset[int], ...] = ()
    when: When | None = None

    @property
    def unsharded(self) -> frozenset[str]:
        """Factors that cannot be sharded."""
        return frozenset(f for d in self._dims if d.unsharded for f in d.names)

    @property
    def loose(self) -> frozenset[str]:
        """Factors that can be sharded only if they have the same size in all tensors."""
        return frozenset(f for d in self._dims if d.loose for f in d.names)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor in order of appearance; `...` counts as one."""
        return tuple(dict.fromkeys(f for d in self._dims for f in d.names))

    @property
    def arguments(self) -> frozenset[str]:
        """Arguments of the op on which the dims of a term depend."""
        names = {d.argument.removeprefix("#") for d in self._dims if d.argument}
        return frozenset(names | {"keepdim"}) if names else frozenset()

    @property
    def _dims(self) -> Iterator[Dim]:
        return (d for t in (*self.inputs, *self.outputs) for d in t.dims)

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}".strip()
        return text if self.when is None else f"{self.when}: {text}"


Options = tuple[tuple[str, str], ...]


@lru_cache(maxsize=8192)
def cases(text: str, linear: str = "", reduces: Options = (), moves: str = "") -> tuple[RuleText, ...]:
    """Parse a rule: each of its cases, in order. `linear`: `"0 | 1"` is linear in each of two inputs, `"0+1"` in both.

    A RuleError has the position in the text.
    """
    parsed = tuple(_Reader(text).cases())
    factors = {f for case in parsed for f in case.factors}
    bad = [f for f, op in reduces if f not in factors or (op and op not in REDUCTIONS)]
    if bad:
        needed = f"factors of the rule, by {', '.join(REDUCTIONS)}"
        raise RuleError(f"rule {shown(text)}: reduces={shown(dict(reduces))}", needed, "correct it")
    return tuple(
        replace(
            case,
            linear=tuple(_sets("linear", linear, case, text)),
            moves=tuple(_sets("moves", moves, case, text)),
            reduces={f: op for f, op in reduces if f in case.factors},
        )
        for case in parsed
    )


def _sets(option: str, value: str, case: RuleText, text: str) -> Iterator[frozenset[int]]:
    """Sets of inputs, as in `0 | 1+2`."""
    for part in filter(None, (p.strip() for p in value.split("|"))):
        numbers = [number.strip() for number in part.split("+")]
        if not all(map(_NUMBER.fullmatch, numbers)):
            needed = "input numbers, as in '0 | 1' or '0+1'"
            raise RuleError(f"rule {shown(text)}: {option}={shown(value)}", needed, "correct it")
        inputs = frozenset(map(int, numbers))
        if max(inputs) >= len(case.inputs) and not (case.inputs and case.inputs[-1].repeats):
            needed = f"inputs 0 to {len(case.inputs) - 1}"
            raise RuleError(f"rule {shown(text)}: {option} in input {max(inputs)}", needed, f"correct {option}=")
        yield inputs


class _Reader:
    """Parses the text of a rule from left to right."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            needed = f"at most {MOST_CHARACTERS}"
            raise RuleError(f"rule {shown(text)} has {len(text)} characters", needed, "write a function of the shapes")
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, int]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if not match:
                at += len(text[at:]) - len(text[at:].lstrip())
                self._refuse(f"cannot read {text[at]!r}", at)
            self.tokens.append((match[1], match.start(1)))
            at = match.end()
        self.tokens.append((_END, end))

    def cases(self) -> Iterator[RuleText]:
        """All cases of the text."""
        if "->" not in (token for token, _ in self.tokens):
            self._refuse("no '->'", len(self.text), "inputs -> outputs, as in 'm k, k n -> m n'", "add the outputs")
        while True:
            when = self._when()
            inputs = tuple(self._terms("->"))
            self._take("->")
            yield RuleText(inputs, tuple(self._terms("|", _END)), when=when)
            if self._take("|", _END) == _END:
                return

    def _when(self) -> When | None:
        ahead = [token for token, _ in self.tokens[self.at : self.at + 4]]
        if ":" not in ahead:
            return None
        start, argument = self.tokens[self.at][1], self._take()
        value = self._take() if self._skip("=") else None
        if not argument.isidentifier() or not (value is None or _NUMBER.fullmatch(value)):
            self._refuse("a condition is 'argument:' or 'argument=number:'", start)
        self._take(":")
        return When(argument, None if value is None else int(value))

    def _terms(self, *ends: str) -> Iterator[Term]:
        if self._next in ends:
            return
        while True:
            yield self._term(ends)
            if not self._skip(","):
                return

    def _term(self, ends: Sequence[str]) -> Term:
        start = self.tokens[self.at][1]
        if self._next in (",", *ends):
            self._refuse("an empty term", start, next_step="write () for a scalar")
        close = {"[": "]", "{": "}"}.get(self._next, "")
        if close:
            self._take()
        term = Term(is_list=close == "]", broadcasts=close == "}")
        if self._skip("*"):
            term = replace(term, opaque=True)
        elif not self._scalar():
            stops = (",", "*", "+", "->", "|", _END, *([close] if close else []))
            term = replace(term, dims=tuple(self._dims(stops)))
        if close:
            self._take(close)
        names = [f for d in term.dims for f in d.names]
        twice = [n for n in names if names.count(n) > 1]
        if twice:
            needed, fix = "each factor at most once in a term", "give the second dim another name, mark both '!'"
            self._refuse(f"{twice[0]!r} stands twice in '{term}'", start, needed, fix)
        rests = sum(d.rest for d in term.dims)
        if rests > 1 or any(d.argument and d.argument[0] != "#" and not rests for d in term.dims):
            needed = "at most one '...', and one in a term with name[argument]"
            self._refuse(f"'{term}' has {rests} '...'", start, needed)
        return replace(term, optional=self._skip("*"), repeats=self._skip("+"))

    def _scalar(self) -> bool:
        if self._next == "]":  # an empty list is one of scalars
            return True
        if self._next == "(" and self.tokens[self.at + 1][0] == ")":
            self.at += 2
            return True
        return False

    def _dims(self, stops: Sequence[str]) -> Iterator[Dim]:
        while self._next not in stops:
            token, start = self.tokens[self.at]
            self.at += 1
            named = _DIM.fullmatch(token)
            if token == "(":
                dim = Dim(tuple(self._merged(start)))
            elif token.endswith("..."):
                dim = Dim((token[:-3],) if token != "..." else (), rest=True)
            elif named:
                dim = Dim((named[1],) if named[1] else (), argument=named[2] or "")
            else:
                self._refuse(f"{token!r} stands alone", start)
            yield replace(dim, unsharded=self._skip("!"), loose=self._skip("?"))

    def _merged(self, start: int) -> Iterator[str]:
        while self._next != ")":
            if not self._next.isidentifier():
                self._refuse("a merged dim is '(a b)'", start)
            yield self._take()
        self._take(")")

    @property
    def _next(self) -> str:
        return self.tokens[self.at][0]

    def _skip(self, token: str) -> bool:
        is_next = self._next == token
        self.at += is_next
        return is_next

    def _take(self, *expected: str) -> str:
        token, start = self.tokens[self.at]
        if expected and token not in expected:
            self._refuse(
                f"{token!r} where {' or '.join(map(repr, expected))} belongs".replace(f"'{_END}'", _END), start
            )
        self.at += 1
        return token

    def _refuse(self, what: str, at: int, needed: str = _GRAMMAR, next_step: str = "correct the rule") -> NoReturn:
        first = max(0, at - _SHOWN)
        text = self.text[first : at + _SHOWN]
        raise RuleError(f"rule: {what}\n    {text}\n    {' ' * (at - first)}^", needed, next_step)


def spread(term: Term, shape: Sequence[int], arguments: Mapping[str, object]) -> list[Dim] | None:
    """A dim of `term` for each dim of `shape`; None if it does not fit. `arguments`: values of `RuleText.arguments`.

    Dims of `...` are named `.1`, `.2` from the right; dims of `s...`, or of an `s` for several dims, `s.1`.
    """
    dims = [dim for d in term.dims for dim in _counted(d, arguments)]
    if term.broadcasts:
        near = dims[len(dims) - len(shape) :]
        return [Dim(()) if n == 1 else d for d, n in zip(near, shape, strict=True)] if len(shape) <= len(dims) else None
    rest = next((d for d in dims if d.rest), None)
    if rest is None:
        return dims if len(dims) == len(shape) else None
    free = len(shape) - sum(not (d.rest or d.argument) for d in dims)
    if free < 0:
        return None
    places = dict(_placed([d for d in dims if d.argument], free, arguments))
    names = [f"{''.join(rest.factors)}.{k}" for k in range(free - len(places), 0, -1)]
    rest_dims = iter([replace(rest, factors=(name,), rest=False) for name in names])
    block = [places[i] if i in places else next(rest_dims) for i in range(free)]
    first = dims.index(rest)
    return [*(d for d in dims[:first] if not d.argument), *block, *(d for d in dims[first + 1 :] if not d.argument)]


def _counted(dim: Dim, arguments: Mapping[str, object]) -> Iterable[Dim]:
    """`x[#sizes]`: a dim for each entry of an argument."""
    if not dim.argument.startswith("#"):
        return [dim]
    count = len(_listed(arguments[dim.argument[1:]]))
    return [replace(dim, factors=_one_of(dim, k, count), argument="") for k in range(count)]


def _placed(dims: Iterable[Dim], free: int, arguments: Mapping[str, object]) -> Iterator[tuple[int, Dim]]:
    """Positions among `free` dims that arguments list; None and an empty list mean all. Dims `1` only with keepdim."""
    for dim in dims:
        if not dim.factors and not arguments["keepdim"]:
            continue
        places = [p % free for p in _listed(arguments[dim.argument])] if free else []
        places = list(dict.fromkeys(places)) or list(range(free))
        for k, place in enumerate(places):
            yield place, replace(dim, factors=_one_of(dim, k, len(places)), argument="")


def _one_of(dim: Dim, number: int, count: int) -> tuple[str, ...]:
    return dim.factors if count == 1 else tuple(f"{f}.{number}" for f in dim.factors)


def _listed(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [] if value is None else list(cast(Sequence[int], value))
