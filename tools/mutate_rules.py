"""Mutates the sharding rules of wholestep: a good check fails on every mutation.

python -m tools.mutate_rules [OPS]      OPS is a glob, as in 'aten.sum*'

Prints what survives; exit status 1 if anything does. Ops are tried in a process that may crash: some write past their
tensors on wrong shapes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast
from unittest import mock

import torch

from tests.rule_samples import cases_of, runs_on_cpu, samples_of, table
from wholestep import _torch
from wholestep.errors import RuleError
from wholestep.graph.meta import TensorMeta
from wholestep.rules.apply import choose, entries_of, inputs_of, repeated
from wholestep.rules.call import Call
from wholestep.rules.language import Dim, RuleText, Term, base, cases, spread
from wholestep.rules.registry import Bind, bind_rule
from wholestep.rules.rule import BoundRule, Group
from wholestep.rules.testing.check import OpCase, Sample, ShardedFactor, check_pass, check_way, ways

_OTHER = {"sum": "avg", "max": "sum", "min": "max", "avg": "sum", "norm1": "max", "norm2": "sum"}
_PATIENCE_SECONDS = 30.0  # one try takes milliseconds

Samples = Callable[[Any], Sequence[Sample]]


@dataclass(frozen=True)
class Mutation:
    """A change of one rule, and whether the check failed on it.

    `verdict` is `caught` or `survived`; or, where the op allows more than its rule, which costs only communication:
    `could be cut` for a '!', `could stay partial` for a claim of linearity, `could do without` for local sizes.
    """

    op: str
    rule: str
    change: str
    caught: bool
    verdict: str


Reword = Callable[[Bind], Bind]
Rebind = Callable[[BoundRule], BoundRule]


@dataclass(frozen=True)
class _Mutant:
    """A rule changed in its text, or after it was bound."""

    change: str
    rule: str
    reword: Reword | None = None
    rebind: Rebind | None = None
    partial: bool = False
    careful: str = ""

    def bind(self, call: Call) -> BoundRule | None:
        bound = bind_reworded(call, self.reword)
        return self.rebind(bound) if self.rebind and bound else bound


def bind_reworded(call: Call, reword: Reword | None) -> BoundRule | None:
    """The rule of a call with its text changed."""
    with _reworded(reword) if reword else contextlib.nullcontext():
        return bind_rule(call)


@contextlib.contextmanager
def _reworded(reword: Reword) -> Generator[None]:
    """Changes the text of rules after the choice of a case."""
    plain = Bind.on

    def on(bind: Bind, call: Call) -> BoundRule:
        case = choose(bind.cases(), call)
        return plain(reword(replace(bind, text=str(replace(case, when=None)), reduces=case.reduces)), call)

    with mock.patch.object(Bind, "on", on):
        yield


Key = tuple[str, str]
"""Text of a rule, and the change."""


def mutate_op(
    cases: Sequence[OpCase], crashing: Collection[Key] = (), starts: Callable[[Key], None] = lambda key: None
) -> list[Mutation]:
    """Every mutation of the rule of one op that changes a claim about the samples in `cases`.

    Ops that trust their shapes may crash the process: `starts` is called before each try, and mutations in `crashing`
    count as caught.
    """
    found: dict[Key, Mutation] = {}
    for case in cases:
        words: list[Bind] = []
        try:
            bound = bind_reworded(case.call, lambda bind, seen=words: seen.append(bind) or bind)
        except RuleError:
            continue
        if bound is None:
            continue
        for mutant in _mutants(case.call, bound, words):
            key = (mutant.rule, mutant.change)
            if key in found and found[key].caught:
                continue
            if key not in crashing:
                starts(key)
            caught = key in crashing or _fails(case, bound, mutant)
            if caught is not None:
                verdict = "caught" if caught else mutant.careful or "survived"
                found[key] = Mutation(case.name, mutant.rule, mutant.change, caught, verdict)
    return list(found.values())


def _fails(case: OpCase, bound: BoundRule, mutant: _Mutant) -> bool | None:
    """True if the check of the changed rule fails; None if it claims nothing new about this sample."""
    try:
        changed = mutant.bind(case.call)
    except Exception:  # a rule that cannot be bound is caught before any check
        return True
    if changed is None or not any(w is not None and bool(w.any()) for w in case.expected):
        return None  # any rule holds for zeros
    if mutant.partial:
        old = {(g, through) for g, group in enumerate(bound.groups) for through in group.partial}
        new = [(g, t) for g, group in enumerate(changed.groups) for t in group.partial if (g, t) not in old]
        tried = [check_pass(case, changed.groups[g], t, op) for g, t in new for op in sorted(t.ops)]
        return None if case.random or all(t is None for t in tried) else any(tried)
    known = {_claim(case, bound, way) for way in ways(case, bound)}
    claims = (way for way in ways(case, changed) if len(way.mesh.axes) == 1)
    new = [way for way in claims if _claim(case, changed, way) not in known]
    claimed = [way for way in new if _is_cut(case, way)]
    return any(check_way(case, changed, way) for way in claimed) if claimed else None


def _is_cut(case: OpCase, way: ShardedFactor) -> bool:
    """False if all sharded dims have size one: one piece is the whole tensor, whichever dim it was."""
    shapes = [t.shape for t in case.tensors] + [w.shape if w is not None else torch.Size() for w in case.expected]
    pairs = zip((*way.takes, *way.gives), shapes, strict=True)
    return any(size > 1 for layout, shape in pairs for axes, size in zip(layout.dims, shape, strict=True) if axes)


def _claim(case: OpCase, bound: BoundRule, way: ShardedFactor) -> Any:
    """A key of a claim without the name of its factor, and without outputs that are all zeros."""
    sizes = tuple(sorted(bound.sizes.items()))
    gives = [g if w is not None and bool(w.any()) else None for w, g in zip(case.expected, way.gives, strict=True)]
    return way.mesh, way.takes, tuple(gives), sizes, bound.instead, way.factor in bound.local


# -- mutations --------------------------------------------------------------------------------
def _mutants(call: Call, bound: BoundRule, words: Sequence[Bind]) -> Iterator[_Mutant]:
    text = "; ".join(str(cases(w.text)[0]) for w in words) or _by_hand(bound)
    for w in words[:1]:
        rule, names = _expanded(w.cases()[0], call, bound)
        text = str(rule)
        for change, new, of_whole in [*_without_marks(rule), *_moved(rule)]:
            careful = "could be cut" if of_whole else ""
            yield _Mutant(change, text, reword=_with_text(new, names), careful=careful)
        for change, new in _reduced(rule):
            yield _Mutant(change, text, reword=_with_text(new, names))
        for change, new, is_split in _linear(rule):
            careful = "" if is_split else "could stay partial"
            yield _Mutant(change, text, reword=_with_text(new, names), partial=True, careful=careful)
    yield from _rebound(bound, text, by_hand=not words)


def _by_hand(bound: BoundRule) -> str:
    """Text of a rule that a function made without text."""

    def show(terms: Mapping[int, tuple[str | None, ...]]) -> str:
        return ", ".join(" ".join(f or "1" for f in term) or "()" for _, term in sorted(terms.items()))

    return "; ".join(f"{show(g.operands)} -> {show(g.outputs)}" for g in bound.groups)


def _with_text(rule: RuleText, names: Mapping[str, str]) -> Reword:
    def sets(found: Sequence[frozenset[int]]) -> str:
        return " | ".join("+".join(map(str, sorted(group))) for group in found)

    reduces = {f: op for f, op in rule.reduces.items() if f in rule.factors}

    def say(bind: Bind) -> Bind:
        filled = bind.filled | {name for name, f in names.items() if f in bind.filled or base(f) in bind.filled}
        return replace(
            bind, text=str(rule), linear=sets(rule.linear), moves=sets(rule.moves), reduces=reduces, filled=filled
        )

    return say


def _expanded(rule: RuleText, call: Call, bound: BoundRule) -> tuple[RuleText, dict[str, str]]:
    """The rule with a name for every dim, and the factor of each name; `rule` itself if entries of a list differ."""
    arguments = {name: call.argument(name) for name in rule.arguments}
    names: dict[str, str] = {}
    terms: list[Term] = []
    inputs, outputs = _given(rule, call, bound), _made(rule, call, bound)
    for term, found in (*inputs, *outputs):
        ways = [None if term.opaque else spread(term, m.shape, arguments) for m in found]
        if not ways or ways[0] is None:
            terms.append(replace(term, repeats=False))
            continue
        if any(way != ways[0] for way in ways):
            return rule, {}
        names |= {_plain(f): f for d in ways[0] for f in d.factors}
        dims = tuple(replace(d, factors=tuple(map(_plain, d.factors))) for d in ways[0])
        terms.append(Term(dims, term.is_list))
    reduces = {**rule.reduces, **{n: rule.reduces[base(f)] for n, f in names.items() if base(f) in rule.reduces}}
    count = len(inputs)
    return replace(rule, inputs=tuple(terms[:count]), outputs=tuple(terms[count:]), reduces=reduces), names


Terms = list[tuple[Term, list[TensorMeta]]]


def _given(rule: RuleText, call: Call, bound: BoundRule) -> Terms:
    """A term for each tensor argument, with its tensors; opaque for a missing optional one."""
    seen = {p for group in bound.groups for p in group.operands}
    places = [slot.positions for slot in call.slots]
    out: Terms = []
    for i, term in enumerate(inputs_of(rule, call)):
        tensors = places[i] if i < len(places) else ()
        lost = term.optional and not seen.issuperset(tensors)
        out.append((Term(opaque=True) if lost else term, [call.operands[p] for p in tensors]))
    return out


def _made(rule: RuleText, call: Call, bound: BoundRule) -> Terms:
    """A term for each output, with its tensors; opaque for a missing optional one."""
    unseen = {o for group in bound.groups for o in group.opaque}
    lists = entries_of(rule, call)
    at, out = 0, Terms()
    for term in repeated(rule.outputs, len(call.outputs)):
        tensors = range(at, min(at + (lists if term.is_list else 1), len(call.outputs)))
        lost = term.optional and not unseen.isdisjoint(tensors)
        out.append((Term(opaque=True) if lost else term, [m for o in tensors if (m := call.outputs[o]) is not None]))
        at += lists if term.is_list else 1
    return out


def _plain(factor: str) -> str:
    """A name that the language can parse: `e2` for `.2`, `x_1` for `x.1`."""
    return f"e{factor[1:]}" if factor.startswith(".") else factor.replace(".", "_")


def _terms(rule: RuleText) -> tuple[Term, ...]:
    return (*rule.inputs, *rule.outputs)


def _with(rule: RuleText, terms: Sequence[Term]) -> RuleText:
    count = len(rule.inputs)
    return replace(rule, inputs=tuple(terms[:count]), outputs=tuple(terms[count:]))


def _put(rule: RuleText, at: int, dims: Sequence[Dim]) -> RuleText:
    terms = list(_terms(rule))
    terms[at] = replace(terms[at], dims=tuple(dims))
    return _with(rule, terms)


def _without_marks(rule: RuleText) -> Iterator[tuple[str, RuleText, bool]]:
    """Each `!` (True) and `?` dropped, wherever its factor stands."""
    for factor in sorted(rule.unsharded):
        yield f"drop ! of {factor}", _each(rule, factor, unsharded=False), True
    for factor in sorted(rule.loose - rule.unsharded):
        yield f"drop ? of {factor}", _each(rule, factor, loose=False), False


def _each(rule: RuleText, factor: str, **change: bool) -> RuleText:
    terms = [
        replace(t, dims=tuple(replace(d, **change) if factor in d.names else d for d in t.dims)) for t in _terms(rule)
    ]
    return _with(rule, terms)


def _moved(rule: RuleText) -> Iterator[tuple[str, RuleText, bool]]:
    """Factors swapped, renamed in one term, or in another order in a merged dim; True if a dim marked `!` moves."""
    whole = rule.unsharded
    for at, term in enumerate(_terms(rule)):
        name = f"input {at}" if at < len(rule.inputs) else f"output {at - len(rule.inputs)}"
        for i, dim in enumerate(term.dims):
            free = [f for f in dim.factors if f not in whole]
            for j in range(i + 1, len(term.dims)):
                other = term.dims[j]
                if not (dim.rest or other.rest) and (free or any(f not in whole for f in other.factors)):
                    dims = list(term.dims)
                    dims[i], dims[j] = other, dim
                    yield f"swap {dim} and {other} in {name}", _put(rule, at, dims), dim.unsharded or other.unsharded
            for factor in free:
                renamed = replace(dim, factors=tuple("other" if f == factor else f for f in dim.factors))
                dims = [*term.dims[:i], renamed, *term.dims[i + 1 :]]
                yield f"rename {factor} in {name}", _put(rule, at, dims), False
            if len(free) > 1:
                dims = [*term.dims[:i], replace(dim, factors=dim.factors[::-1]), *term.dims[i + 1 :]]
                yield f"turn {dim} round in {name}", _put(rule, at, dims), dim.unsharded


def _reduced(rule: RuleText) -> Iterator[tuple[str, RuleText]]:
    """Another reduction, or none, for a factor that an output lacks."""
    for factor in rule.factors:
        missing = any(not t.opaque and not any(factor in d.names for d in t.dims) for t in rule.outputs)
        if missing and factor not in rule.unsharded:
            op = rule.reduces.get(factor, "sum")
            for other in dict.fromkeys(("", _OTHER.get(op, "sum"))):
                if other != op:
                    what = f"{other or 'the same on all ranks'} for {op or 'the same on all ranks'} of {factor}"
                    yield what, replace(rule, reduces={**rule.reduces, factor: other})


def _linear(rule: RuleText) -> Iterator[tuple[str, RuleText, bool]]:
    """Claims of linearity in other inputs; sets split (True) and joined."""
    known = set(rule.linear)
    every = [frozenset({i}) for i, t in enumerate(rule.inputs) if not t.opaque]
    singles = [single for single in every if single not in rule.moves]
    for single in singles:
        joint = [group for group in known if single < group]
        if single not in known:
            what = "take out" if joint else "claim"
            changed = replace(rule, linear=(*(known - set(joint)), single))
            yield f"{what} linear in {min(single)}", changed, bool(joint)
    for a in singles:
        for b in singles:
            if min(a) < min(b) and a | b not in known and (a in known or b in known):
                yield f"linear in {min(a)} and {min(b)} together", replace(rule, linear=(*known, a | b)), False


def _rebound(bound: BoundRule, text: str, by_hand: bool) -> Iterator[_Mutant]:
    """Changes beyond the text: uneven and empty pieces allowed, local shapes and local ops dropped."""

    def each(change: Callable[[Group], Group]) -> Rebind:
        return lambda b: replace(b, groups=tuple(map(change, b.groups)))

    nothing: Mapping[str, int] = {}
    if any(g.even for g in bound.groups):
        yield _Mutant("uneven pieces of merged dims", text, rebind=each(lambda g: replace(g, even=nothing)))
    if any(g.filled for g in bound.groups):
        emptied = each(lambda g: replace(g, filled=nothing))
        yield _Mutant("empty pieces", text, rebind=emptied, careful="could be cut")
    if bound.sizes:
        bare: Rebind = lambda b: replace(b, sizes={}, instead=None)  # noqa: E731
        yield _Mutant("global sizes on ranks", text, rebind=bare, careful="could do without")
    if bound.local:
        yield _Mutant("the op itself on ranks", text, rebind=lambda b: replace(b, local={}))
    if by_hand:
        if any(g.reduces for g in bound.groups):
            yield _Mutant("nothing to reduce", text, rebind=each(lambda g: replace(g, reduces={})))
            other = each(lambda g: replace(g, reduces={f: _OTHER.get(op, "sum") for f, op in g.reduces.items()}))
            yield _Mutant("reduced in another way", text, rebind=other)
        yield _Mutant("turn outputs round", text, rebind=each(lambda g: replace(g, outputs=_turned(g))))


def _turned(group: Group) -> Mapping[int, tuple[str | None, ...]]:
    return {o: term[::-1] for o, term in group.outputs.items()}


# -- the table ------------------------------------------------------------------------------------
def mutate_table(targets: Iterable[Any], samples: Samples) -> Iterator[tuple[Any, list[Mutation]]]:
    """Every op with the mutations of its rule. A mutation that crashes the process counts as caught.

    Memory that one op damages may crash the process at a later op, or make its check raise, so an op is blamed only if
    it does so in a new process too.
    """
    context = multiprocessing.get_context("fork")
    remaining = list(targets)
    crashing: set[Key] = set()
    while remaining:
        receive, send = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(remaining, samples, frozenset(crashing), send))
        worker.start()
        send.close()
        last: Key | None = None
        new = True
        while (message := _next(receive, worker)) is not None:
            if isinstance(message, list):
                yield remaining.pop(0), cast(list[Mutation], message)
                crashing.clear()
                last, new = None, False
            else:
                last = cast(Key, message)
        worker.join()
        if remaining and new and last is None:
            op = remaining.pop(0)
            yield op, [Mutation(str(op), "", f"none: the process ended with {worker.exitcode}", False, "survived")]
            crashing.clear()
        elif new and last is not None:
            crashing.add(last)


def _next(receive: Connection, worker: BaseProcess) -> Any:
    """The next message of the worker; None if it crashed or hangs."""
    if not receive.poll(_PATIENCE_SECONDS):
        worker.kill()
    try:
        return receive.recv()
    except EOFError:
        return None


def _work(targets: Sequence[Any], samples: Samples, crashing: frozenset[Key], send: Connection) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number, target in enumerate(targets):
        runs = not _torch.is_op(target) or runs_on_cpu(target)
        cases = cases_of(target, samples(target)) if runs else []
        try:
            send.send(mutate_op(cases, crashing if number == 0 else (), send.send))
        except Exception as error:  # a bug in the check itself must not count as a caught mutation
            if number:
                return
            send.send([Mutation(str(target), "", f"none: {type(error).__name__}: {error}", False, "survived")])


def main() -> int:
    """Mutate the rules that match; 1 if a mutation survives."""
    targets = table(*sys.argv[1:2])
    samples = samples_of(targets)
    found = [m for _, made in mutate_table(targets, samples.__getitem__) for m in made]
    for m in found:
        if m.verdict == "survived":
            print(f"{m.op}: '{m.rule}' passes with {m.change}")
    counts = Counter(m.verdict for m in found)
    print(f"{len(targets)} ops, {len(found)} mutations: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    return int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
