"""The table of rules, and the one place that finds the rule of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import RuleError
from ..graph import meta
from ..graph.meta import TensorMeta
from .apply import apply
from .call import Call
from .language import parse
from .rule import BoundRule, Group

Samples = Callable[[], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class Bind:
    """What a rule that looks at shapes returns: text and the options of `rule`."""

    text: str
    linear: str = ""
    reduces: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    local: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    by_shape: frozenset[int] = frozenset()
    filled: frozenset[str] = frozenset()

    def on(self, call: Call) -> BoundRule:
        """These words about `call`."""
        said: Bind = call.reword(self) if call.reword else self
        parsed = parse(said.text, said.linear, tuple(sorted(said.reduces.items())))
        bound = apply(parsed, call, said.sizes, said.local, said.by_shape)
        return bound if not said.filled else replace(bound, groups=tuple(said._fill(g, call) for g in bound.groups))

    def _fill(self, group: Group, call: Call) -> Group:
        terms = [(term, call.shape(i)) for i, term in group.operands.items()]
        sizes = {f: n for term, shape in terms for f, n in zip(term, shape, strict=True) if f in self.filled}
        return replace(group, filled={**group.filled, **{f: n for f, n in sizes.items() if f}})


Function = Callable[[Call], "Bind | BoundRule | str | None"]


@dataclass(frozen=True)
class Rule:
    """One row of the table: text, or a function of the call; sample arguments for its check."""

    target: Any
    body: Bind | Function
    samples: Samples | None = None
    origin: str = "built in"

    def bind(self, call: Call) -> BoundRule | None:
        """What the rule says about `call`; None when it has nothing to say."""
        body = self.body(call) if callable(self.body) else self.body
        body = Bind(body) if isinstance(body, str) else body
        bound = body.on(call) if isinstance(body, Bind) else body
        return bound if bound is None or bound.origin == self.origin else replace(bound, origin=self.origin)


RULES: dict[Any, Rule] = {}


def rule(
    targets: Any,
    text: str = "",
    *,
    linear: str = "",
    reduces: Mapping[str, str] | None = None,
    sizes: Mapping[str, str] | None = None,
    local: Mapping[str, Callable[..., Any]] | None = None,
    by_shape: Iterable[int] = (),
    filled: Iterable[str] = (),
    samples: Samples | None = None,
    origin: str = "built in",
) -> Callable[[Function], Function]:
    """Give one or several ops a rule: `text`, or, as a decorator, a function of the call that returns one.

    The arguments are those of `yours.rule`, which users call; `origin` is where the rule comes from, as plans show it.

    Raises:
        RuleError: the text breaks the grammar.

    Example:
        >>> rule(torch.ops.aten.mm.default, "m k, k n -> m n", linear="0 | 1")
    """
    given: list[Any] = [*targets] if isinstance(targets, (list, tuple)) else [targets]
    found: list[Any] = [_torch.overload_of(target) for target in given]

    def add(body: Bind | Function) -> None:
        for target in found:
            RULES[target] = Rule(target, body, samples, origin)
        global _bound
        _bound = {}

    if text:
        bind = Bind(text, linear, reduces or {}, sizes or {}, local or {}, frozenset(by_shape), frozenset(filled))
        parse(text, linear, tuple(sorted(bind.reduces.items())))
        add(bind)

    def decorate(function: Function) -> Function:
        if text:
            raise RuleError("a rule given as text and as a function", "one of them", "drop one")
        add(function)
        return function

    return decorate


def find(target: Any) -> Rule | None:
    """The row of `target`, of the op it is the in-place or out form of, or of its family."""
    if target in RULES:
        return RULES[target]
    if not _torch.is_op(target):
        return None
    plain = _torch.functional_form(target)
    if plain is not None and plain in RULES:
        return replace(RULES[plain], target=target)
    from .elementwise import family

    body = family(target if plain is None else plain)
    return Rule(target, body) if body else None


def bind_rule(call: Call, discover: bool = False) -> BoundRule | None:
    """The rule of `call` on its shapes, or None when there is none: its inputs are then made whole.

    `discover`: where the table has no rule, the op runs on small random inputs to find one (`rules.discover`).
    """
    found = find(call.target)
    if found is None and discover:
        from .discover import discover as search

        return search(call)
    return found.bind(call) if found else None


def rule_for(node: Node, discover: bool = False) -> BoundRule | None:
    """The rule of `node` on its global shapes. Calls that look alike share one."""
    known = meta.known_rule(node)
    now = _bound, node.args, node.kwargs, discover
    if known is not None and all(then is one for then, one in zip(known[0], now, strict=True)):
        return known[1]
    found = _rule_for(node, discover)
    meta.set_known_rule(node, (now, found))
    return found


def _rule_for(node: Node, discover: bool) -> BoundRule | None:
    call = Call.of(node)
    key = (call.target, _frozen(call.args), _frozen(tuple(call.kwargs.items())), call.outputs, discover)
    try:
        return _bound[key]
    except KeyError:
        return _bound.setdefault(key, bind_rule(call, discover))
    except TypeError:  # an argument that cannot be hashed
        return bind_rule(call, discover)


_bound: dict[Any, BoundRule | None] = {}
"""By what a call looks like. Another table for each set of rules: what nodes know is of one of them."""


def _frozen(value: Any) -> Any:
    """A key for an argument: numbers of different types differ (sum over dim 1 or True)."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in cast(Sequence[Any], value))
    return value if isinstance(value, TensorMeta) else (type(value), value)


def is_random(node: Node) -> bool:
    """True for an op that draws from the random number generator."""
    return _torch.is_op(node.target) and torch.Tag.nondeterministic_seeded in node.target.tags
