"""Checks a rule against the real op: splits real tensors, runs every piece, assembles the results, compares."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ... import _torch
from ...errors import RuleError, WholestepError, first_line, shown
from ...graph.op_kinds import depends_on_strides, is_uninitialized
from ...layout import AxisState, Layout, replicated, resolve
from ...mesh import Mesh
from ..call import Call, opened
from ..localize import VIEWS_OF_PIECES, localize
from ..registry import bind_rule, targets_of
from ..rule import BoundRule, Group, PassThrough
from .harness import FORMS, assemble, differs, laid, parts_of, piece, tensors_in, with_tensors

_MESHES = (Mesh("a=2"), Mesh("a=3"), Mesh("a=4"), Mesh("a=2,b=2"))
_MEMORY = "operands"
_AS_VIEWS = ", pieces that are views"


@dataclass(frozen=True)
class Sample:
    """Arguments to run an op on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A disagreement of rule and op. `factor` may be a set of partial operands."""

    op: str
    factor: str
    cut: str
    place: str
    actual: str
    expected: str

    def __str__(self) -> str:
        return f"{self.op}: {self.factor} {self.cut}: {self.place} {self.actual}, expected {self.expected}"


@dataclass(frozen=True)
class CheckResult:
    """Coverage and failures of a check: factors, partial values that pass, samples; `shapes_only` for random ops.

    Example:
        >>> found = ws.check_rule(torch.ops.aten.mm, torch.randn(4, 6), torch.randn(6, 5))
        >>> found.ok, found.factors
        (True, ('m', 'k', 'n'))
    """

    op: str
    samples: int = 0
    factors: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    shapes_only: bool = False

    @property
    def ok(self) -> bool:
        """True if nothing failed."""
        return not self.failures

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(op, factor) for each factor that was sharded."""
        return tuple((self.op, factor) for factor in self.factors)

    def __add__(self, other: CheckResult) -> CheckResult:
        return CheckResult(
            self.op,
            self.samples + other.samples,
            tuple(dict.fromkeys((*self.factors, *other.factors))),
            tuple(dict.fromkeys((*self.passes, *other.passes))),
            (*self.failures, *other.failures),
            self.shapes_only or other.shapes_only,
        )

    def __str__(self) -> str:
        how = ", shapes only" if self.shapes_only else ""
        state = "holds" if self.ok else f"{len(self.failures)} failures"
        return f"{self.op}: {state}; factors {' '.join(self.factors) or 'none'}; {self.samples} samples{how}"


def check_rule(op: Any, *args: Any, **kwargs: Any) -> CheckResult:
    """Check the rule of `op` on one set of arguments.

    Each factor is split into 2, 3 and 4 parts (uneven and empty ones included) and into 2 x 2; operands that may be
    partial are split into terms. Pieces are views: at an offset in larger memory, and, for ops of torch, with gaps and
    in another order. Use small float64 tensors with dims greater than one.

    Raises:
        RuleError: `op` has no rule, or the rule is wrong; names the factor and the difference.

    Example:
        >>> import torch, wholestep as ws
        >>> ws.check_rule(torch.ops.aten.mm, torch.randn(4, 6), torch.randn(6, 5)).factors
        ('m', 'k', 'n')
    """
    (target,) = targets_of(op) if not isinstance(op, (str, list, tuple)) else (None,)
    if target is None:
        problem = f"check_rule({shown(cast(object, op))})"
        raise RuleError(problem, "an op of torch, a custom op or a function", "give one op")
    try:
        case = case_of(target, Sample(args, kwargs))
    except Exception as error:  # the op itself raises what it likes
        problem = f"{target} cannot be called with these arguments: {first_line(error)}"
        raise RuleError(problem, "arguments that the op takes", "correct them") from error
    result = check_case(case)
    if result is None:
        problem = f"{target} has no rule for these arguments"
        raise RuleError(problem, "a rule to check", "write one with @ws.rule, or leave the op to discovery")
    if result.failures:
        first = result.failures[0]
        problem = f"the rule of {first.op} is wrong in {len(result.failures)} ways; {first.factor} {first.cut}"
        raise RuleError(problem, f"{first.expected}; {first.place} {first.actual}", "correct the rule: " + _fix(first))
    return result


def _fix(failure: Failure) -> str:
    if failure.factor == _MEMORY or failure.cut.endswith(_AS_VIEWS):
        return "read operands by index, not by their place in memory: a piece is a view of a larger tensor"
    if failure.factor.startswith("factor"):
        return "mark a factor that must stay whole with '!'"
    return "linear= names inputs that may stay partial, by_shape= those that are never read"


def check_case(case: OpCase) -> CheckResult | None:
    """Check all claims of the rule about one call; None if it does not apply."""
    bound = bind_rule(case.call)
    if bound is None:
        return None
    factors = {f: None for group in bound.groups for f in claimed_factors(bound, group)}
    passes: dict[str, None] = {}
    failures: list[Failure] = []
    for way in ways(case, bound):
        if failure := check_way(case, bound, way):
            failures.append(check_way(case, bound, way, views=False) or replace(failure, cut=failure.cut + _AS_VIEWS))
    failures += _check_memory(case)
    for group in bound.groups:
        for through in group.partial if not case.random else ():
            for op in sorted(through.ops):
                pass_failures = check_pass(case, group, through, op)
                failures += pass_failures or ()
                name = f"{op}({'+'.join(map(str, sorted(through.operands)))})"
                passes |= {} if pass_failures is None else {name: None}
    if bound.by_shape and not case.random:
        failures += _check_unread(case, bound)
    return CheckResult(case.name, 1, tuple(factors), tuple(passes), tuple(failures), case.random)


@dataclass(frozen=True)
class OpCase:
    """An op, its arguments, and its results on one device."""

    target: Any
    sample: Sample
    call: Call
    tensors: tuple[Tensor, ...]
    expected: tuple[Tensor | None, ...]
    draws: bool = False
    """True if a second run of the op gave other values."""

    @property
    def name(self) -> str:
        """The op's name."""
        return str(self.target)

    @property
    def random(self) -> bool:
        """True if values cannot be compared: random numbers and uninitialized memory."""
        return self.draws or is_uninitialized(self.target)

    def run(self, tensors: Sequence[Tensor], form: int = 0) -> tuple[Tensor | None, ...]:
        """The outputs for other operands, in memory layouts by `_laid_out`."""
        args, kwargs = with_tensors(self.sample.args, self.sample.kwargs, _laid_out(self.target, tensors, form))
        return _outputs(self.target if form == 0 else VIEWS_OF_PIECES.get(self.target, self.target), args, kwargs)


def case_of(target: Any, sample: Sample) -> OpCase:
    """Run the op on one device."""
    tensors = tuple(tensors_in([*sample.args, *sample.kwargs.values()]))
    args, kwargs = with_tensors(sample.args, sample.kwargs, _laid_out(target, tensors))
    with torch.no_grad():
        outputs = target(*args, **kwargs)
    call = Call.on(target, args, kwargs, outputs)
    case = OpCase(target, sample, call, tensors, _flat(outputs))
    if not _torch.is_op(target) or torch.Tag.nondeterministic_seeded not in target.tags:
        return case
    state = torch.get_rng_state()  # two equal results prove nothing: one draw of a coin may repeat
    case.run(tensors)
    return replace(case, draws=not torch.equal(state, torch.get_rng_state()))


def _laid_out(target: Any, tensors: Sequence[Tensor], form: int = 0) -> list[Tensor]:
    """Writable copies: the first in the memory layout `FORMS[form]`, the others in the next ones.

    Form 0 leaves all as they are. Ops that depend on strides, and ops of other libraries, only get an offset:
    partitioning keeps the strides of one device for them.
    """
    forms = _forms(target)
    return [laid(t, (form + i) % forms if form else 0) for i, t in enumerate(tensors)]


def _forms(target: Any) -> int:
    is_aten = _torch.is_op(target) and target.namespace == "aten"
    return len(FORMS) if is_aten and not depends_on_strides(target) else 2


def _outputs(target: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, ...]:
    with torch.no_grad(), _unwritten_is_nan():
        return _flat(target(*args, **kwargs))


@contextlib.contextmanager
def _unwritten_is_nan() -> Generator[None]:
    """Fills uninitialized memory with NaN, so that an op that returns some fails the check on every run."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def _flat(outputs: Any) -> tuple[Tensor | None, ...]:
    tensors = (torch.tensor(x) if isinstance(x, (bool, int, float)) else x for x in opened([outputs]))
    return tuple(x if isinstance(x, Tensor) else None for x in tensors)


@dataclass(frozen=True)
class ShardedFactor:
    """One claim of a rule: a factor of a group may be sharded by the axes of a mesh."""

    number: int
    factor: str
    mesh: Mesh
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]


def ways(case: OpCase, bound: BoundRule) -> Iterator[ShardedFactor]:
    """All claims of a rule about factors."""
    for number, group in enumerate(bound.groups):
        inner = dict.fromkeys(f for factors in group.merged.values() for f in factors)
        blocks = (*inner, *(f"{f} in 2" for f in group.factors if f in group.sizes)) if not case.random else ()
        for factor in dict.fromkeys((*claimed_factors(bound, group), *blocks)):
            for mesh in _MESHES[:1] if group.is_inner(factor) else _MESHES:
                if group.splits(factor, [axis.size for axis in mesh.axes]):
                    yield ShardedFactor(number, factor, mesh, *layouts(case, group, factor, mesh))


def claimed_factors(bound: BoundRule, group: Group) -> tuple[str, ...]:
    """Factors of operands; factors of outputs alone too if there are no operands, or ranks call another function."""
    of_outputs = dict.fromkeys(f for term in group.outputs.values() for f in term if f)
    return tuple(dict.fromkeys((*group.factors, *(f for f in of_outputs if not group.operands or f in bound.local))))


def check_way(case: OpCase, bound: BoundRule, way: ShardedFactor, views: bool = True) -> Failure | None:
    """The first difference between one device and ranks. With `views`, pieces have other memory layouts."""
    problem = _cut(case, bound, way, views)
    parts = "x".join(str(axis.size) for axis in way.mesh.axes)
    return problem and Failure(case.name, f"factor {way.factor!r}", f"cut into {parts}", *problem)


def _check_memory(case: OpCase) -> list[Failure]:
    """Check that memory layouts of whole operands do not matter: on ranks they are views of gathered tensors."""
    for form in range(1, _forms(case.target)) if case.tensors and not case.random else ():
        try:
            outputs = case.run(case.tensors, form)
        except Exception as error:
            problem: Problem | None = ("a rank", f"raises {first_line(error)}", "a result")
        else:
            pairs = zip(outputs, case.expected, strict=True)
            difference = next((d for a, b in pairs if a is not None and b is not None and (d := differs(a, b))), None)
            problem = ("the output", *difference) if difference else None
        if problem:
            return [Failure(case.name, _MEMORY, FORMS[form], *problem)]
    return []


def layouts(case: OpCase, group: Group, factor: str, mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of operands and outputs if every axis of `mesh` shards `factor`."""
    takes = [replicated(t.ndim) for t in case.tensors]
    gives = [replicated(t.ndim if t is not None else 0) for t in case.expected]
    op = group.reduces.get(factor.partition(" in ")[0])
    reduced = AxisState("P", op=op) if op else AxisState("R")
    for axis in mesh.names:
        for i in group.operands:
            takes[i] = takes[i].put(axis, group.state_by(factor, 0, i) or AxisState("R"))
        for o in group.outputs:
            gives[o] = gives[o].put(axis, group.state_by(factor, 1, o) or reduced)
    return tuple(takes), tuple(gives)


Problem = tuple[str, str, str]


def _cut(case: OpCase, bound: BoundRule, way: ShardedFactor, views: bool) -> Problem | None:
    """Place, found, expected of the first difference."""
    mesh, takes, gives = way.mesh, way.takes, way.gives
    by_rank: list[tuple[Tensor | None, ...]] = []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        pieces = [piece(t, layout, mesh, at) for t, layout in zip(case.tensors, takes, strict=True)]
        pieces = _laid_out(case.target, pieces, rank + 1 if views else 0)
        args, kwargs = with_tensors(case.sample.args, case.sample.kwargs, pieces)
        try:
            local = localize(bound, case.call, takes, gives, mesh, args, kwargs)
            kwargs = {k: resolve(v, at) for k, v in local.kwargs.items()}
            by_rank.append(_outputs(VIEWS_OF_PIECES.get(local.target, local.target), resolve(local.args, at), kwargs))
        except WholestepError:
            raise
        except Exception as error:
            return f"rank {rank}", f"raises {first_line(error)}", "a result"
    return _compared(case, bound.groups[way.number], gives, mesh, by_rank)


def _compared(
    case: OpCase, group: Group, gives: Sequence[Layout], mesh: Mesh, by_rank: Sequence[Sequence[Tensor | None]]
) -> Problem | None:
    for o, (expected, layout) in enumerate(zip(case.expected, gives, strict=True)):
        if expected is None or o in group.opaque or (len(case.call.outputs) > 1 and o not in group.outputs):
            continue
        for rank, outputs in enumerate(by_rank):
            local = outputs[o] if o < len(outputs) else None
            want = layout.local_shape(expected.shape, mesh, mesh.coordinate(rank))
            if local is None or tuple(local.shape) != want:
                have = "no tensor" if local is None else f"has shape {list(local.shape)}"
                return f"output {o} on rank {rank}", have, f"shape {list(want)}"
        if case.random:
            continue
        pieces = [outputs[o] for outputs in by_rank]
        problem = differs(assemble([p for p in pieces if p is not None], layout, expected, mesh), expected)
        if problem is None and not layout.axes:
            problem = next((d for p in pieces if p is not None and (d := differs(p, expected))), None)
        if problem:
            return f"output {o}", *problem
    return None


def check_pass(case: OpCase, group: Group, through: PassThrough, op: str) -> list[Failure] | None:
    """Split partial operands into the terms of two ranks, run both, reduce; None if they cannot be split."""
    splits = {i: parts_of(case.tensors[i], op, seed=i) for i in sorted(through.operands)}
    if any(parts is None for parts in splits.values()) or all(case.tensors[i].numel() < 2 for i in splits):
        return None  # booleans or NaN cannot be partial; single elements prove nothing
    full_tensors = list(case.tensors)
    both = [list(case.tensors), list(case.tensors)]
    for i, parts in splits.items():
        assert parts is not None, "looked at above"
        full_tensors[i] = parts[2]
        both[0][i], both[1][i] = parts[0], parts[1]
    name = f"partial {op} in operands {', '.join(map(str, sorted(through.operands)))}"
    try:
        expected, *by_rank = (case.run(tensors, form) for form, tensors in enumerate((full_tensors, *both)))
    except Exception as error:
        return [Failure(case.name, name, "in 2 parts", "a part", f"raises {first_line(error)}", "a result")]
    partial = AxisState("P", op=op)
    gives = [replicated(w.ndim if w is not None else 0).put("a", partial) for w in expected]
    problem = _compared(replace(case, expected=expected), group, gives, Mesh("a=2"), by_rank)
    return [Failure(case.name, name, "in 2 parts", *problem)] if problem else []


def _check_unread(case: OpCase, bound: BoundRule) -> list[Failure]:
    """Check that values of `by_shape` operands do not matter."""
    tensors = list(case.tensors)
    for i in bound.by_shape:
        tensors[i] = ~tensors[i] if tensors[i].dtype == torch.bool else tensors[i] + 1
    for o, (expected, other) in enumerate(zip(case.expected, case.run(tensors), strict=True)):
        problem = differs(other, expected) if expected is not None and other is not None else None
        if problem:
            name = f"operands {', '.join(map(str, sorted(bound.by_shape)))}, never read,"
            return [Failure(case.name, name, "given other values", f"output {o}", *problem)]
    return []
