"""Binds a parsed rule to the shapes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NoReturn

from ..errors import RuleError
from ..graph.meta import TensorMeta
from ..sizes import whole
from .call import Call
from .language import Dim, RuleText, Term, base, spread
from .rule import ANY_PARTIAL, LINEAR, BoundRule, Group, PassThrough
from .rule import Term as BoundTerm


def choose(cases: Sequence[RuleText], call: Call) -> RuleText:
    """The first case whose condition is true and whose terms have as many dims as the tensors of the call."""
    if len(cases) == 1 and cases[0].when is None:
        return cases[0]
    for case in cases:
        if _holds(case, call) and _fits(case, call):
            return case
    shapes = ", ".join(str(list(m.shape)) for m in call.operands)
    problem = f"rule '{' | '.join(map(str, cases))}' does not fit {call.target}: it has no case for {shapes}"
    needed = "a case whose terms have the dims of the tensors"
    raise RuleError(problem, needed, "add one, or make the rule a function of the shapes")


def _holds(case: RuleText, call: Call) -> bool:
    if case.when is None:
        return True
    value = call.argument(case.when.argument)
    return bool(value) if case.when.value is None else value == case.when.value


def _fits(case: RuleText, call: Call) -> bool:
    pairs = [
        (t, call.operands[p]) for t, s in zip(inputs_of(case, call), call.slots, strict=False) for p in s.positions
    ]
    pairs += [pair for entry in range(entries_of(case, call)) for pair in _outputs(case, call, entry).values()]
    arguments = {name: call.argument(name) for name in case.arguments}
    return all(t.opaque or t.optional or spread(t, m.shape, arguments) is not None for t, m in pairs)


def inputs_of(rule: RuleText, call: Call) -> list[Term]:
    """A term for each tensor argument; a last term with `+` for all that follow."""
    return [*repeated(rule.inputs, len(call.slots))]


def repeated(terms: Sequence[Term], count: int) -> Iterator[Term]:
    """`terms`, padded to `count` with the last one if that has `+`."""
    yield from terms
    if terms and terms[-1].repeats:
        yield from [terms[-1]] * (count - len(terms))


def entries_of(rule: RuleText, call: Call) -> int:
    """Number of entries of the lists of the call; 1 without lists."""
    pairs = zip(rule.inputs, call.slots, strict=False)
    return max((len(slot.positions) for term, slot in pairs if term.is_list and slot.positions), default=1)


def apply(
    rule: RuleText, call: Call, sizes: Mapping[str, str], local: Mapping[str, Callable[..., Any]],
    by_shape: frozenset[int], filled: frozenset[str],
) -> BoundRule:  # fmt: skip
    """`rule` bound to `call`; a RuleError names the tensor whose shape it does not fit."""
    terms = inputs_of(rule, call)
    where = {i: s.positions for i, s in enumerate(call.slots) if s.positions and i < len(terms)}
    starts = any(source.startswith("start") for source in sizes.values())  # one place, from which a piece goes on
    unlike = frozenset(rule.factors if starts else {*local, *rule.unsharded})
    splits = "out0" in sizes.values()  # a rank says which dims its piece has, as a view does
    groups = tuple(_group(rule, call, where, entry, filled, unlike, splits) for entry in range(entries_of(rule, call)))
    shared = frozenset(p for i in by_shape if i in where for p in where[i])
    return BoundRule(groups, shared, sizes, local)


def _group(
    rule: RuleText, call: Call, where: Mapping[int, tuple[int, ...]], entry: int, filled: frozenset[str],
    unlike: frozenset[str], splits: bool,
) -> Group:  # fmt: skip
    """The group of entry `entry` of every list; of all tensors if there are no lists. `unlike`: factors whose places
    are not all treated alike, so that no blocks of them are sharded. `splits`: inner factors of merged dims may be.
    """
    terms, has_lists = inputs_of(rule, call), any(t.is_list for t in (*rule.inputs, *rule.outputs))
    inputs = {
        (p[entry] if t.is_list else p[0]): (t, i)
        for i, p in where.items()
        if (t := terms[i]).is_list or (not has_lists)
        if entry < len(p)
    }
    returned = _outputs(rule, call, entry)
    tensors = [(t, call.operands[p], f"input {i}") for p, (t, i) in inputs.items()]
    tensors += [(t, m, f"output {o}") for o, (t, m) in returned.items()]
    seen = _Sizes(rule, call)
    for term, tensor, name in tensors:
        seen.read(term, tensor, name)
    seen.solve()
    shown = {p: t for p, (t, _) in inputs.items() if not seen.is_opaque(t, call.shape(p))}
    operands = {p: seen.term(t, call.operands[p]) for p, t in shown.items()}
    outputs = {o: seen.term(t, m) for o, (t, m) in returned.items()}
    opaque = frozenset(o for o, (t, m) in returned.items() if seen.is_opaque(t, m.shape))
    factors = dict.fromkeys(f for term in operands.values() for f in term if f)
    lost = [f for f in factors if any(f not in term for o, term in outputs.items() if o not in opaque)]
    reduces = {f: op for f in lost if (op := rule.reduces.get(base(f), "sum"))}
    by_input = {i: p for p, (_, i) in inputs.items()}
    partial = tuple(
        PassThrough(passing, ops)
        for groups, ops in ((rule.linear, LINEAR), (rule.moves, ANY_PARTIAL))
        for group in groups
        if (passing := frozenset(by_input[i] for i in group if i in by_input)) and passing <= shown.keys()
    )
    nonempty = {f: seen.sizes[f] for f, op in reduces.items() if op in ("max", "min")}
    nonempty |= {f: n for f, n in call.sizes(operands).items() if f in filled or base(f) in filled}
    even = {f: seen.sizes[f] for f in seen.even}
    needed = [seen.factors_of(t, m) for o, (t, m) in returned.items() if o not in opaque]
    needed.append({f for p, t in shown.items() for f in seen.factors_of(t, call.operands[p])})
    unlike |= {f for f in seen.inner if not splits or any(f not in factors for factors in needed)}
    sizes = {f: whole(n) for f, n in seen.sizes.items() if not {f, base(f)} & unlike and n > 1}
    sides = ((0, p, t, call.operands[p]) for p, t in shown.items()), ((1, o, t, m) for o, (t, m) in returned.items())
    merged = {
        (side, at, dim): factors
        for side, at, term, tensor in chain(*sides)
        for dim, factors in seen.merged(term, tensor)
        if side == 0 or at not in opaque
        if all(f in sizes for f in factors)
    }
    return Group(operands, outputs, reduces, partial, even, nonempty, opaque, sizes=sizes, merged=merged)


def _outputs(rule: RuleText, call: Call, entry: int) -> dict[int, tuple[Term, TensorMeta]]:
    """Terms and metadata by position among the flat outputs; of a list, those of the entry."""
    out: dict[int, tuple[Term, TensorMeta]] = {}
    at, count = 0, entries_of(rule, call)
    for term in repeated(rule.outputs, len(call.outputs)):
        position = at + entry if term.is_list else at
        at += count if term.is_list else 1
        tensor = call.outputs[position] if position < len(call.outputs) else None
        if tensor is not None:
            out[position] = (term, tensor)
    return out


def _lead(dims: Iterable[Dim]) -> int:
    """Number of dims that `...` matched."""
    return sum(base(f) == "..." for d in dims for f in d.factors)


class _Sizes:
    """Sizes of factors. `stuck` ones cannot be sharded, but `inner` ones in blocks; `even` ones need equal parts."""

    def __init__(self, rule: RuleText, call: Call) -> None:
        self.rule, self.call = rule, call
        self.unsharded, self.loose = rule.unsharded, rule.loose
        self.arguments = {name: call.argument(name) for name in rule.arguments}
        self.sizes: dict[str, int] = {}
        self.lead = 0
        self.even: set[str] = set()
        self.stuck: set[str] = set()
        self.inner: set[str] = set()
        self._merged: list[tuple[Dim, int, str]] = []

    def read(self, term: Term, tensor: TensorMeta, name: str) -> None:
        if term.opaque or term.optional:
            return
        pairs = self._pairs(term, tensor.shape, name)
        self.lead = max(self.lead, _lead(dim for dim, _ in pairs))
        for dim, size in pairs:
            if len(dim.factors) == 1:
                self._set(dim.factors[0], size, name)
            elif dim.factors:
                self._merged.append((dim, size, name))

    def solve(self) -> None:
        """Find the one unknown size in each merged dim."""
        for dim, size, name in self._merged:
            missing = [f for f in dim.factors if f not in self.sizes]
            product = prod(self.sizes[f] for f in dim.factors if f in self.sizes)
            if len(missing) == 1 and product and size % product == 0:
                self.sizes[missing[0]] = size // product
            elif missing or product != size:
                self._refuse(f"{name}: a dim of {size} is not {dim} with {self.sizes}")
        for dim, _, _ in self._merged:
            outer, *inner = [f for f in dim.factors if self.sizes[f] != 1] or [""]
            self.inner |= set(inner) - self.stuck
            self.stuck |= set(inner)
            self.even |= {outer} if inner else set()

    def is_opaque(self, term: Term, shape: Sequence[int]) -> bool:
        """True for `*`, and for an optional term that does not fit the tensor."""
        if not term.optional:
            return term.opaque
        dims = spread(term, shape, self.arguments)
        if dims is None or (any(d.rest for d in term.dims) and _lead(dims) != self.lead):
            return True
        return any(self.sizes.get(f, n) != n for d, n in zip(dims, shape, strict=True) for f in d.factors)

    def term(self, term: Term, tensor: TensorMeta) -> BoundTerm:
        """The factor that may shard each dim."""
        if self.is_opaque(term, tensor.shape):
            return (None,) * len(tensor.shape)
        return tuple(self._free(dim, size) for dim, size in self._pairs(term, tensor.shape, ""))

    def factors_of(self, term: Term, tensor: TensorMeta) -> set[str]:
        """All factors of a tensor."""
        return {f for dim, _ in self._pairs(term, tensor.shape, "") for f in dim.factors}

    def merged(self, term: Term, tensor: TensorMeta) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Dims with their factors, outermost first, where one of these is merged behind another in some tensor."""
        pairs = [] if self.is_opaque(term, tensor.shape) else self._pairs(term, tensor.shape, "")
        for at, (dim, size) in enumerate(pairs):
            live = tuple(f for f in dim.factors if self.sizes.get(f, 1) > 1)
            if self.inner & {*live} and prod(self.sizes[f] for f in live) == size:
                yield at, live

    def _free(self, dim: Dim, size: int) -> str | None:
        merged = {f for other, _, _ in self._merged for f in other.factors}
        alone = len(dim.factors) == 1 and self.sizes.get(dim.factors[0]) == 1 == size and dim.factors[0] not in merged
        live = [f for f in dim.factors if alone or self.sizes.get(f, 1) > 1]
        if not live or live[0] in self.stuck or base(live[0]) in self.unsharded:
            return None
        return None if len(live) == 1 and self.sizes[live[0]] != size else live[0]

    def _pairs(self, term: Term, shape: Sequence[int], name: str) -> list[tuple[Dim, int]]:
        dims = spread(term, shape, self.arguments)
        if dims is None:
            self._refuse(f"{name} has shape {list(shape)}, the rule says '{term}'")
        return list(zip(dims, shape, strict=True))

    def _set(self, factor: str, size: int, name: str) -> None:
        have = self.sizes.get(factor, 1)
        if base(factor) in self.loose:
            self.stuck |= {factor} if self.sizes.setdefault(factor, size) != size else set()
            return
        if have not in (size, 1) and size != 1 and not (base(factor) == "..." and "..." in self.unsharded):
            self._refuse(f"{name}: factor {factor} is {size} here and {have} before")
        self.sizes[factor] = max(have, size) if size else 0

    def _refuse(self, problem: str) -> NoReturn:
        problem = f"rule '{self.rule}' does not fit {self.call.target}: {problem}"
        needed = "a rule whose terms have the dims of the tensors"
        raise RuleError(problem, needed, "correct the rule, or make it a function of the shapes")
