"""The table of rules, and the search for the rule of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from .. import _torch
from ..errors import RuleError, shown
from .apply import apply, choose
from .call import Call
from .cut_in_units import in_whole_units
from .language import RuleText, cases
from .rule import BoundRule

Samples = Callable[[], Iterable[tuple[Any, ...]]]
BUILT_IN = "built in"


@dataclass(frozen=True)
class Bind:
    """Text and options of `rule`; a function of a call returns this."""

    text: str
    linear: str = ""
    moves: str = ""
    reduces: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    local: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    by_shape: frozenset[int] = frozenset()
    filled: frozenset[str] = frozenset()

    def cases(self) -> tuple[RuleText, ...]:
        """The cases of the text, parsed."""
        return cases(self.text, self.linear, tuple(sorted(self.reduces.items())), self.moves)

    def on(self, call: Call) -> BoundRule:
        """This rule bound to `call`."""
        return apply(choose(self.cases(), call), call, self.sizes, self.local, self.by_shape, self.filled)


Function = Callable[[Call], "Bind | BoundRule | str | None"]


@dataclass(frozen=True)
class Rule:
    """One row of the table: text, or a function of the call."""

    body: Bind | Function
    origin: str = BUILT_IN

    def bind(self, call: Call) -> BoundRule | None:
        """The rule bound to `call`; None if it does not apply."""
        body = self.body(call) if callable(self.body) else self.body
        body = Bind(body) if isinstance(body, str) else body
        bound = body.on(call) if isinstance(body, Bind) else body
        return bound if bound is None or bound.origin == self.origin else replace(bound, origin=self.origin)


RULES: dict[Any, Rule] = {}
"""By op; by name for ops of libraries that may not be imported."""
SAMPLES: dict[Any, Samples] = {}
"""Functions that make sample arguments of an op, for the check of its rule."""
FAMILIES: list[Callable[[Any], Function | None]] = []
"""Each returns the rule of an op of its family (by tag or name), or None for other ops."""


def rule(
    op: Any, text: str = "", *, linear: str = "", moves: str = "", reduces: Mapping[str, str] | None = None,
    sizes: Mapping[str, str] | None = None, local: Mapping[str, Callable[..., Any]] | None = None,
    by_shape: Collection[int] = (), filled: Collection[str] = (), samples: Samples | None = None,
    origin: str = "yours",
) -> Callable[[Function], Function]:  # fmt: skip
    """Register which dims of an op's tensors are sharded together. Precedes built-in rules and discovery.

    The text has one term for each tensor argument, then one for each tensor result; results that lack a factor are
    sums over it. `docs/rules.md` has the grammar. Without `text` it decorates a function that takes the call
    (`rules.call.Call`: shapes and arguments) and returns the text, or None for no rule.

    Args:
        op: an op or a list of ops: a custom op, a `torch.ops` overload or packet, or a plain function in a graph; or
            names of ATen overloads, `"sum.dim_IntList relu"`, and of ops of libraries that are imported later,
            `"library::op.default"`.
        text: the rule, `"m k, k n -> m n"`.
        linear: inputs the op is linear in: `"0 | 1"` in each alone, `"0+1"` in both together.
        moves: inputs whose values the op only moves, among zeros: any partial value passes.
        reduces: by factor, how a result that lacks it is partial if it is sharded: `sum`, `avg`, `max`, `min`, or `""`
            if all ranks compute the same.
        sizes: arguments that hold sizes, with their value on a rank: `out0`, `in1` or a factor;
            `start0` is where the rank's piece of a result begins.
        local: by factor, a function that ranks run instead of the op if the factor is sharded; its arguments are the
            start and the length of the rank's piece, then those of the op.
        by_shape: inputs of which the op reads only the shape.
        filled: factors of which no rank may get an empty piece.
        samples: makes tuples of arguments, on which `tools.check_rules` tries it.
        origin: the author of the rule, as plans show it.

    Raises:
        RuleError: the text breaks the grammar (with the position), or names an argument that the op does not have.

    Example:
        >>> import torch, wholestep as ws
        >>> @torch.library.custom_op("example::swish", mutates_args=())
        ... def swish(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ...     return torch.nn.functional.silu(gate) * x
        >>> _ = ws.rule(swish, "..., ... -> ...", linear="0")
        >>> ws.check_rule(swish, torch.randn(4, 6), torch.randn(4, 6)).ok
        True
    """
    targets = targets_of(op)

    def add(body: Bind | Function) -> None:
        RULES.update(dict.fromkeys(targets, Rule(body, origin)))
        SAMPLES.update(dict.fromkeys(targets, samples) if samples else {})
        global bound
        bound = {}

    if text:
        options = reduces or {}, sizes or {}, local or {}, frozenset(by_shape), frozenset(filled)
        bind = Bind(text, linear, moves, *options)
        if origin != BUILT_IN:  # these are parsed at their first call, and checked by a test
            check_named(bind, targets)
        add(bind)

    def decorate(function: Function) -> Function:
        if text:
            raise RuleError("a rule given as text and as a function", "one of them", "drop one")
        add(function)
        return function

    return decorate


def check_named(bind: Bind, targets: Iterable[Any]) -> None:
    """Raise RuleError if none of the ops has an argument that the rule names; ops that lack it use the default."""
    named = {case.when.argument for case in bind.cases() if case.when}
    named |= {name for case in bind.cases() for name in case.arguments if name != "keepdim"}
    ops = [target for target in targets if _torch.is_op(target)]
    names = dict.fromkeys(argument.name for op in ops for argument in _torch.schema_of(op).arguments)
    unknown = sorted(named - names.keys())
    if ops and unknown:
        problem = f"rule {bind.text!r} names an argument {unknown[0]!r}"
        raise RuleError(problem, f"one of {ops[0]}: {', '.join(names)}", "correct the rule")


def targets_of(op: Any) -> list[Any]:
    """The overloads of `op`: itself, a list, or names. Names that this torch lacks are skipped. Of an op of a library
    that writes in place, the op that returns what it writes.
    """
    if isinstance(op, str):
        return [target for name in op.split() if (target := _named(name)) is not None]
    ops: list[Any] = [*op] if isinstance(op, (list, tuple)) else [op]
    targets = [_torch.overload_of(op) for op in ops]
    targets = [_torch.functional_form(op) or op if _torch.is_library_op(op) else op for op in targets]
    for op in targets:
        if not callable(op) or getattr(type(op), "__hash__", None) is None:
            raise RuleError(f"{shown(op)} is no op", "an op of torch, a custom op, a function, or names", "give one")
    return targets


def _named(name: str) -> Any:
    """The ATen overload with a name (`relu` is its default overload); a name with a library stays a name."""
    if "::" in name:
        return name.replace("::", ".")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def find(target: Any) -> Rule | None:
    """The row of `target`, of the functional form of an in-place or out op, or of its family."""
    if target in RULES:
        return RULES[target]
    if not _torch.is_op(target):
        return None
    plain = _torch.functional_form(target)
    row = RULES.get(str(target)) if plain is None else RULES.get(plain)
    if row is not None:
        return row
    bodies = (family(target if plain is None else plain) for family in FAMILIES)
    body = next((body for body in bodies if body), None)
    return Rule(body) if body else None


def bind_rule(call: Call, fallback: Callable[[Call], BoundRule | None] | None = None) -> BoundRule | None:
    """The rule of `call` on its shapes, that of `fallback` if the table has none; None if neither has one."""
    row = find(call.target)
    bind = fallback if row is None else row.bind
    rule = bind(call) if bind else None
    return None if rule is None else in_whole_units(rule, call)


class CallKind:
    """All calls of an op with equal arguments and outputs. `rules` has their rule, once it is asked for."""

    def __init__(self) -> None:
        self.rules: tuple[BoundRule | None, ...] = ()


bound: dict[Any, CallKind] = {}
"""The kinds that `call_kind` met, by op and arguments. A new rule replaces the dict; nodes cache kinds with it."""


def is_random(node: Node) -> bool:
    """True for an op that may draw random numbers."""
    return _torch.is_op(node.target) and _is_random(node.target)


@cache
def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def draws(node: Node) -> bool:
    """True for an op that draws random numbers: fused attention does with dropout alone."""
    return is_random(node) and Call.of(node).argument("dropout_p", default=1) != 0
