"""The rule language: one line of named factors says which dims of an op's tensors are cut together.

"m k, k n -> m n"                                  a factor that is missing in an output is summed there
"..., ... -> ..."                                  leading dims, aligned from the right, that broadcast
"... d!, d!, d! -> ... d!, ... 1, ... 1"           `!`: this dim stays whole; `1`: a dim of size one
"(a b) c -> a b c"                                 a merged dim: only its outer factor cuts it, and evenly
"[...], [...], () -> [...]"                        lists, entry by entry; what is not in a list is shared by all
"n c, * -> (), *"                                  `()`: a scalar; `*`: any tensor, whole, its values not looked at
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import RuleError

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_][A-Za-z0-9_]*|[()\[\]!,*|+1]|->)")
REDUCTIONS = ("sum", "max", "min", "avg")


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor: the factors merged in it, outermost first; none for a dim of size one."""

    factors: tuple[str, ...]
    whole: bool = False
    rest: bool = False
    """True for `...`: any number of leading dims."""

    def __str__(self) -> str:
        name = "..." if self.rest else "1" if not self.factors else " ".join(self.factors)
        return (f"({name})" if len(self.factors) > 1 else name) + ("!" if self.whole else "")


@dataclass(frozen=True)
class Term:
    """One tensor of a rule, or every tensor of a list. `opaque` tensors are whole and never looked at."""

    dims: tuple[Dim, ...] = ()
    is_list: bool = False
    opaque: bool = False

    def __str__(self) -> str:
        text = "*" if self.opaque else " ".join(map(str, self.dims)) or "()"
        return f"[{text}]" if self.is_list else text


@dataclass(frozen=True)
class RuleText:
    """A parsed rule.

    Invariants: a factor stands at most once in a term; what is whole in one term is whole in all; `...` at most once
    in a term. `linear` lists sets of inputs: the op is linear in each set taken together. `reduces` names what a
    factor missing in an output leaves there; sums by default; '' where every rank makes the same.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    linear: tuple[frozenset[int], ...] = ()
    reduces: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def whole(self) -> frozenset[str]:
        """Factors that must not be cut."""
        return frozenset(f for t in (*self.inputs, *self.outputs) for d in t.dims if d.whole for f in _names(d))

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor in order of appearance; `...` stands for all it matches."""
        found = [f for t in (*self.inputs, *self.outputs) for d in t.dims for f in _names(d)]
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return text.strip()


def _names(dim: Dim) -> tuple[str, ...]:
    return ("...",) if dim.rest else dim.factors


@lru_cache(maxsize=8192)
def parse(text: str, linear: str = "", reduces: tuple[tuple[str, str], ...] = ()) -> RuleText:
    """Read a rule. `linear`: `"0 | 1"` is linear in each of two inputs, `"0+1"` in both together.

    Raises:
        RuleError: the text breaks the grammar or an invariant; says where.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", "inputs -> outputs, as in 'm k, k n -> m n'", "add the outputs")
    rule = RuleText(tuple(_terms(left, text)), tuple(_terms(right, text)), tuple(_linear(linear, text)), dict(reduces))
    _check(rule, text)
    return rule


def _terms(part: str, text: str) -> Iterator[Term]:
    tokens: list[str] = []
    at = 0
    while at < len(part.rstrip()):
        found = _TOKEN.match(part, at)
        if not found:
            raise RuleError(f"rule {text!r}: cannot read {part[at:].strip()!r}", _GRAMMAR, "correct the rule")
        tokens.append(found[1])
        at = found.end()
    term: list[str] = []
    for token in [*tokens, ","] if tokens else []:
        if token != ",":
            term.append(token)
            continue
        yield _term(term, text)
        term = []


_GRAMMAR = "dims as names, (a b), ..., 1, each with an optional '!'; or (), *, [dims]"


def _term(tokens: list[str], text: str) -> Term:
    is_list = bool(tokens) and tokens[0] == "["
    if is_list:
        if tokens[-1] != "]":
            raise RuleError(f"rule {text!r}: a list without ']'", _GRAMMAR, "close it")
        tokens = tokens[1:-1]
    if tokens == ["*"]:
        return Term((), is_list, opaque=True)
    if not tokens or tokens == ["(", ")"]:
        if not tokens and not is_list:
            raise RuleError(f"rule {text!r}: an empty term", _GRAMMAR, "write () for a scalar")
        return Term((), is_list)
    return Term(tuple(_dims(tokens, text)), is_list)


def _dims(tokens: list[str], text: str) -> Iterator[Dim]:
    at = 0
    while at < len(tokens):
        token = tokens[at]
        names: tuple[str, ...] = (token,)
        if token == "(":
            end = tokens.index(")", at) if ")" in tokens[at:] else -1
            names = tuple(tokens[at + 1 : end]) if end > 0 else ()
            if not names or not all(n.isidentifier() for n in names):
                raise RuleError(f"rule {text!r}: a merged dim is '(a b)'", _GRAMMAR, "correct the rule")
            at = end
        elif token in "!)][*|+":
            raise RuleError(f"rule {text!r}: {token!r} stands alone", _GRAMMAR, "correct the rule")
        whole = at + 1 < len(tokens) and tokens[at + 1] == "!"
        yield Dim(() if token in ("1", "...") else names, whole, token == "...")
        at += 2 if whole else 1


def _linear(linear: str, text: str) -> Iterator[frozenset[int]]:
    for part in filter(None, (p.strip() for p in linear.split("|"))):
        try:
            yield frozenset(int(i) for i in part.split("+"))
        except ValueError as error:
            raise RuleError(
                f"rule {text!r}: linear={linear!r}", "input numbers, as in '0 | 1' or '0+1'", "correct it"
            ) from error


def _check(rule: RuleText, text: str) -> None:
    for term in (*rule.inputs, *rule.outputs):
        names = [f for d in term.dims for f in _names(d)]
        twice = [n for n in names if names.count(n) > 1]
        if twice:
            raise RuleError(
                f"rule {text!r}: {twice[0]!r} stands twice in '{term}'",
                "each factor at most once in a term",
                "give the second dim a name of its own and mark both '!'",
            )
    unknown = [f for f in rule.reduces if f not in rule.factors]
    bad = [op for op in rule.reduces.values() if op and op not in REDUCTIONS]
    if unknown or bad:
        raise RuleError(
            f"rule {text!r}: reduces={dict(rule.reduces)}",
            f"factors of the rule, by {', '.join(REDUCTIONS)}",
            "correct it",
        )
    high = [i for group in rule.linear for i in group if i >= len(rule.inputs)]
    if high:
        raise RuleError(
            f"rule {text!r}: linear in input {high[0]}", f"inputs 0 to {len(rule.inputs) - 1}", "correct linear="
        )
