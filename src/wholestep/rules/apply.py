"""Applies a parsed rule to the shapes of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ..errors import RuleError
from ..graph.meta import TensorMeta
from .call import Call
from .language import Dim, RuleText, Term
from .rule import BoundRule, Group, PassThrough
from .rule import Term as BoundTerm


def apply(
    rule: RuleText,
    call: Call,
    sizes: Mapping[str, str] | None = None,
    local: Mapping[str, Callable[..., Any]] | None = None,
    by_shape: frozenset[int] = frozenset(),
) -> BoundRule:
    """What `rule` says about `call`.

    Raises:
        RuleError: the rule does not fit the shapes of the call; names the tensor.
    """
    where: dict[int, tuple[int, ...]] = {}
    for i, slot in enumerate(call.slots):
        if slot.positions and i < len(rule.inputs):
            where[i] = slot.positions
    count = max((len(p) for i, p in where.items() if rule.inputs[i].is_list), default=1)
    has_lists = any(t.is_list for t in (*rule.inputs, *rule.outputs))
    groups = tuple(_group(rule, call, where, i, count, has_lists) for i in range(count))
    shared = frozenset(p for i in by_shape if i in where for p in where[i])
    return BoundRule(groups, shared, sizes or {}, local or {})


def _group(
    rule: RuleText, call: Call, where: Mapping[int, tuple[int, ...]], entry: int, count: int, has_lists: bool
) -> Group:
    """Entry `entry` of every list, or everything where there are no lists."""
    given = {
        (p[entry] if t.is_list else p[0]): (t, i)
        for i, p in where.items()
        if (t := rule.inputs[i]).is_list or (not has_lists)
        if entry < len(p)
    }
    made = _outputs(rule, call, entry, count)
    tensors = [(t, call.operands[p], f"input {i}") for p, (t, i) in given.items()]
    tensors += [(t, m, f"output {o}") for o, (t, m) in made.items()]
    seen = _Sizes(rule, call)
    for term, found, name in tensors:
        seen.read(term, found, name)
    seen.settle()
    operands = {p: seen.term(t, call.operands[p]) for p, (t, _) in given.items() if not t.opaque}
    outputs = {o: seen.term(t, m) for o, (t, m) in made.items()}
    factors = dict.fromkeys(f for term in operands.values() for f in term if f)
    lost = [f for f in factors if any(f not in term for o, term in outputs.items() if not made[o][0].opaque)]
    leaves = {f: rule.reduces.get("..." if f.startswith(".") else f, "sum") for f in lost}
    reduces = {f: op for f, op in leaves.items() if op}
    by_input = {i: p for p, (_, i) in given.items()}
    partial = tuple(
        PassThrough(frozenset(by_input[i] for i in group if i in by_input))
        for group in rule.linear
        if any(i in by_input for i in group)
    )
    filled = {f: seen.sizes[f] for f, op in reduces.items() if op in ("max", "min")}
    even = {f: seen.sizes[f] for f in seen.even}
    opaque = frozenset(o for o, (t, _) in made.items() if t.opaque)
    return Group(operands, outputs, reduces, partial, even, filled, opaque)


def _outputs(rule: RuleText, call: Call, entry: int, count: int) -> dict[int, tuple[Term, TensorMeta]]:
    """Positions among the flat outputs; a list takes as many as there are entries."""
    out: dict[int, tuple[Term, TensorMeta]] = {}
    at = 0
    for term in rule.outputs:
        position = at + entry if term.is_list else at
        at += count if term.is_list else 1
        found = call.outputs[position] if position < len(call.outputs) else None
        if found is not None:
            out[position] = (term, found)
    return out


class _Sizes:
    """Sizes of factors, from every tensor that has them."""

    def __init__(self, rule: RuleText, call: Call) -> None:
        self.rule, self.call = rule, call
        self.sizes: dict[str, int] = {}
        self.even: set[str] = set()
        self.stuck: set[str] = set()
        self._merged: list[tuple[Dim, int, str]] = []

    def read(self, term: Term, found: TensorMeta, name: str) -> None:
        if term.opaque:
            return
        for dim, size in self._pairs(term, found.shape, name):
            if len(dim.factors) == 1:
                self._set(dim.factors[0], size, name)
            elif dim.factors:
                self._merged.append((dim, size, name))

    def settle(self) -> None:
        """Find the one unknown size in each merged dim."""
        for dim, size, name in self._merged:
            missing = [f for f in dim.factors if f not in self.sizes]
            known = prod(self.sizes[f] for f in dim.factors if f in self.sizes)
            if len(missing) == 1 and known and size % known == 0:
                self.sizes[missing[0]] = size // known
            elif missing or known != size:
                self._refuse(f"{name}: a dim of {size} is not {dim} with {self.sizes}")
        for dim, _, _ in self._merged:
            outer, *inner = [f for f in dim.factors if self.sizes[f] != 1] or [""]
            self.stuck |= set(inner)
            self.even |= {outer} if inner else set()

    def term(self, term: Term, found: TensorMeta) -> BoundTerm:
        """The factor that may cut each dim."""
        if term.opaque:
            return (None,) * len(found.shape)
        return tuple(self._free(dim, size) for dim, size in self._pairs(term, found.shape, ""))

    def _free(self, dim: Dim, size: int) -> str | None:
        merged = {f for other, _, _ in self._merged for f in other.factors}
        alone = len(dim.factors) == 1 and self.sizes.get(dim.factors[0]) == 1 == size and dim.factors[0] not in merged
        live = [f for f in dim.factors if alone or self.sizes.get(f, 1) > 1]
        if not live or live[0] in self.stuck or live[0] in self.rule.whole or self._rest_is_whole(live[0]):
            return None
        return None if len(live) == 1 and self.sizes[live[0]] != size else live[0]

    def _rest_is_whole(self, factor: str) -> bool:
        return factor.startswith(".") and "..." in self.rule.whole

    def _pairs(self, term: Term, shape: Sequence[int], name: str) -> list[tuple[Dim, int]]:
        fixed = [d for d in term.dims if not d.rest]
        spread = any(d.rest for d in term.dims)
        extra = len(shape) - len(fixed)
        if extra < 0 or (extra and not spread):
            self._refuse(f"{name} has shape {list(shape)}, the rule says '{term}'")
        dims: list[Dim] = []
        for dim in term.dims:
            dims += [Dim((f".{extra - i}",), dim.whole) for i in range(extra)] if dim.rest else [dim]
        return list(zip(dims, shape, strict=True))

    def _set(self, factor: str, size: int, name: str) -> None:
        have = self.sizes.get(factor, 1)
        if have not in (size, 1) and size != 1:
            self._refuse(f"{name}: factor {factor} is {size} here and {have} before")
        self.sizes[factor] = max(have, size) if size else 0

    def _refuse(self, found: str) -> None:
        raise RuleError(
            f"rule '{self.rule}' does not fit {self.call.target}: {found}",
            "a rule whose terms have the dims of the tensors",
            "correct the rule, or make it a function of the shapes",
        )
