"""The rule language: one line of named factors says which dims of an op's tensors are cut together.

"m k, k n -> m n"                                  a factor that is missing in an output is summed there
"..., ... -> ..."                                  leading dims, aligned from the right, that broadcast
"... d!, d!, d! -> ... d!, ... 1, ... 1"           `!`: this dim stays whole; `1`: a dim of size one
"... x[dim]! -> ... x[dim]!"                       the dims that the argument `dim` names, among those of `...`
"(a b) c -> a b c"                                 a merged dim: only its outer factor cuts it, and evenly
"[...], [...], () -> [...]"                        lists, entry by entry; what is not in a list is shared by all
"n c, * -> (), *"                                  `()`: a scalar; `*`: any tensor, whole, its values not looked at
"reduction=0: ...+ -> ... | ...+ -> ()"            cases, tried in order; `+`: every further tensor is alike
"{m n}, m k!, k! n -> m n"                         braces: the last of these dims, some of size one
"... a! b! -> ..., ... c d*"                       `*` after dims: a tensor that may be left out

docs/rules.md has the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NoReturn, cast

from ..errors import RuleError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TOKEN = re.compile(rf"\s*(->|(?:{_NAME})?\.\.\.|(?:{_NAME}|1)(?:\[#?{_NAME}\])?|\d+|[()\[\]{{}}!?,*|+:=])")
_DIM = re.compile(rf"(?:({_NAME})|1)(?:\[(#?{_NAME})\])?")
_GRAMMAR = "dims as name, name[argument], (a b), ..., name... or 1, each with an optional '!' or '?'; or (), *, [dims]"
_END = "the end"
REDUCTIONS = ("sum", "max", "min", "avg")


def base(factor: str) -> str:
    """The name that a rule gives a factor: `...` for `.2`, `x` for `x.1`, one of several dims of that name."""
    return factor.partition(".")[0] or "..." if "." in factor else factor


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor: the factors merged in it, outermost first; none for a dim of size one.

    `rest` is any number of dims: `...`, or `name...`. `argument` names the dims that stand here, or, as `#argument`,
    has an entry for each. A `loose` factor stays whole where its size is not the same everywhere.
    """

    factors: tuple[str, ...]
    whole: bool = False
    rest: bool = False
    argument: str = ""
    loose: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its factors as a rule names them."""
        return self.factors or (("...",) if self.rest else ())

    def __str__(self) -> str:
        name = " ".join(self.factors) + ("..." if self.rest else "") or "1"
        name += f"[{self.argument}]" if self.argument else ""
        return (f"({name})" if len(self.factors) > 1 else name) + ("!" if self.whole else "?" if self.loose else "")


@dataclass(frozen=True)
class Term:
    """One tensor of a rule, or every tensor of a list. `opaque` tensors are whole and never looked at.

    `repeats`: every further tensor is alike. `broadcasts`: the tensor has the last of these dims, some of size one.
    `optional`: opaque where the tensor has other dims, as one that the op was not given or leaves empty.
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
    """What an argument must be for a case of a rule to hold: a number, or true where there is no number."""

    argument: str
    value: int | None = None

    def __str__(self) -> str:
        return self.argument + ("" if self.value is None else f"={self.value}")


@dataclass(frozen=True)
class RuleText:
    """One case of a parsed rule.

    Invariants: a factor stands at most once in a term; what is whole in one term is whole in all; `...` at most once
    in a term. `linear` lists sets of inputs: the op is linear in each set taken together; `moves` those whose values
    it only moves. `reduces` names what a factor missing in an output leaves there; sums by default; '' where every
    rank makes the same.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    linear: tuple[frozenset[int], ...] = ()
    reduces: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    moves: tuple[frozenset[int], ...] = ()
    when: When | None = None

    @property
    def whole(self) -> frozenset[str]:
        """Factors that must not be cut."""
        return frozenset(f for d in self._dims if d.whole for f in d.names)

    @property
    def loose(self) -> frozenset[str]:
        """Factors that must not be cut where their size is not the same everywhere."""
        return frozenset(f for d in self._dims if d.loose for f in d.names)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor in order of appearance; `...` stands for all it matches."""
        return tuple(dict.fromkeys(f for d in self._dims for f in d.names))

    @property
    def arguments(self) -> frozenset[str]:
        """Arguments of the op that say which dims a term means."""
        found = {d.argument.removeprefix("#") for d in self._dims if d.argument}
        return frozenset(found | {"keepdim"}) if found else frozenset()

    @property
    def _dims(self) -> Iterator[Dim]:
        return (d for t in (*self.inputs, *self.outputs) for d in t.dims)

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}".strip()
        return text if self.when is None else f"{self.when}: {text}"


Options = tuple[tuple[str, str], ...]


def parse(text: str, linear: str = "", reduces: Options = (), moves: str = "") -> RuleText:
    """Read a rule that has one case. `linear`: `"0 | 1"` is linear in each of two inputs, `"0+1"` in both together.

    Raises:
        RuleError: the text breaks the grammar or an invariant; says where.
    """
    (rule,) = cases(text, linear, reduces, moves)
    return rule


@lru_cache(maxsize=8192)
def cases(text: str, linear: str = "", reduces: Options = (), moves: str = "") -> tuple[RuleText, ...]:
    """Read a rule: each of its cases, in order.

    Raises:
        RuleError: the text breaks the grammar or an invariant; says where.
    """
    found = tuple(_Reader(text).cases())
    known = {f for case in found for f in case.factors}
    bad = [f for f, op in reduces if f not in known or (op and op not in REDUCTIONS)]
    if bad:
        needed = f"factors of the rule, by {', '.join(REDUCTIONS)}"
        raise RuleError(f"rule {text!r}: reduces={dict(reduces)}", needed, "correct it")
    return tuple(
        replace(
            case,
            linear=tuple(_sets("linear", linear, case, text)),
            moves=tuple(_sets("moves", moves, case, text)),
            reduces={f: op for f, op in reduces if f in case.factors},
        )
        for case in found
    )


def _sets(option: str, said: str, case: RuleText, text: str) -> Iterator[frozenset[int]]:
    """Sets of inputs, as in `0 | 1+2`."""
    for part in filter(None, (p.strip() for p in said.split("|"))):
        try:
            found = frozenset(int(i) for i in part.split("+"))
        except ValueError as error:
            needed = "input numbers, as in '0 | 1' or '0+1'"
            raise RuleError(f"rule {text!r}: {option}={said!r}", needed, "correct it") from error
        if max(found) >= len(case.inputs) and not (case.inputs and case.inputs[-1].repeats):
            needed = f"inputs 0 to {len(case.inputs) - 1}"
            raise RuleError(f"rule {text!r}: {option} in input {max(found)}", needed, f"correct {option}=")
        yield found


class _Reader:
    """Reads the text of a rule from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, int]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if not found:
                at += len(text[at:]) - len(text[at:].lstrip())
                self._refuse(f"cannot read {text[at]!r}", at)
            self.tokens.append((found[1], found.start(1)))
            at = found.end()
        self.tokens.append((_END, len(text.rstrip())))

    def cases(self) -> Iterator[RuleText]:
        """All of the text."""
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
        argument = self._take()
        value = int(self._take()) if self._skip("=") else None
        self._take(":")
        return When(argument, value)

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
            needed, mend = "each factor at most once in a term", "give the second dim a name of its own, mark both '!'"
            self._refuse(f"{twice[0]!r} stands twice in '{term}'", start, needed, mend)
        rests = sum(d.rest for d in term.dims)
        if rests > 1 or any(d.argument and d.argument[0] != "#" and not rests for d in term.dims):
            needed = "one '...' at most, and one beside a dim that an argument names"
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
            yield replace(dim, whole=self._skip("!"), loose=self._skip("?"))

    def _merged(self, start: int) -> Iterator[str]:
        count = 0
        while self._next != ")":
            if not self._next.isidentifier():
                self._refuse("a merged dim is '(a b)'", start)
            yield self._take()
            count += 1
        self._take(")")

    @property
    def _next(self) -> str:
        return self.tokens[self.at][0]

    def _skip(self, token: str) -> bool:
        found = self._next == token
        self.at += found
        return found

    def _take(self, *expected: str) -> str:
        token, start = self.tokens[self.at]
        if expected and token not in expected:
            self._refuse(
                f"{token!r} where {' or '.join(map(repr, expected))} belongs".replace(f"'{_END}'", _END), start
            )
        self.at += 1
        return token

    def _refuse(self, what: str, at: int, needed: str = _GRAMMAR, next_step: str = "correct the rule") -> NoReturn:
        raise RuleError(f"rule: {what}\n    {self.text}\n    {' ' * at}^", needed, next_step)


def spread(term: Term, shape: Sequence[int], arguments: Mapping[str, object]) -> list[Dim] | None:
    """A dim of `term` for each dim of `shape`; None where it does not fit. `arguments` are those that the rule names.

    Dims of `...` are named `.1`, `.2` from the right, those of `s...` and of an `x` that stands for several `s.1`.
    """
    dims = [one for d in term.dims for one in _counted(d, arguments)]
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
    others = iter([replace(rest, factors=(name,), rest=False) for name in names])
    block = [places[i] if i in places else next(others) for i in range(free)]
    first = dims.index(rest)
    return [*(d for d in dims[:first] if not d.argument), *block, *(d for d in dims[first + 1 :] if not d.argument)]


def _counted(dim: Dim, arguments: Mapping[str, object]) -> Iterable[Dim]:
    """`x[#sizes]`: a dim for each entry of an argument."""
    if not dim.argument.startswith("#"):
        return [dim]
    count = len(_listed(arguments[dim.argument[1:]]))
    return [replace(dim, factors=_one_of(dim, k, count), argument="") for k in range(count)]


def _placed(dims: Iterable[Dim], free: int, arguments: Mapping[str, object]) -> Iterator[tuple[int, Dim]]:
    """Which of so many dims arguments name. None and an empty list name all of them; dims of size one, if kept."""
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
