"""Presolve of a layout problem: chains of choices become one choice.

A choice with one operand, which no other choice reads, is merged into the choice that makes the operand. A reshard
inside such a chain moves to its end. Only links with results no larger than the operand are merged, so that no reshard
sends more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problem import OneOf, Option, Problem, ValueEdge

_Chain = tuple[OneOf, list[dict[int, int]]]
"""A merged choice, and the original options that each of its options merges, by number of the original choice."""


@dataclass(frozen=True)
class Presolved:
    """A smaller problem. `parts` gives, for each option of each of its choices, the options that it merges, by number
    of the original choice.
    """

    problem: Problem
    parts: tuple[tuple[dict[int, int], ...], ...]

    def original(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        """The options of all original choices, from those of the smaller problem."""
        found: dict[int, int] = {}
        for choice, option in enumerate(picked):
            found |= self.parts[choice][option]
        return tuple(found[number] for number in range(len(found)))


def presolve(problem: Problem) -> Presolved:
    """`problem` with its chains merged."""
    chains = {n: (c, [{n: i} for i in range(len(c.options))]) for n, c in enumerate(problem.choices)}
    values, into = list(problem.values), {n: n for n in chains}
    made: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        made.setdefault(value.maker, []).append(i)
    for at in range(len(values)):
        value = values[at]
        taker = value.needs[0].taker
        maker = _root(into, value.maker)
        if len(value.needs) > 1 or taker == maker or len(made.get(value.maker, ())) > 1 or into[taker] != taker:
            continue
        chain = _merged(chains[maker], chains[taker], value, [values[i] for i in made.get(taker, ())])
        if chain is not None:
            chains[maker] = chain
            into[taker] = maker
            del chains[taker]
            values[at] = replace(value, needs=())
    numbers = {old: new for new, old in enumerate(sorted(chains))}
    of = tuple(numbers[_root(into, n)] for n in range(len(problem.choices)))
    kept = [_renumbered(v, of) for v in values if v.needs]
    choices, parts = zip(*(chains[n] for n in sorted(chains)), strict=True)
    return Presolved(replace(problem, choices=choices, values=tuple(kept)), tuple(map(tuple, parts)))


def _merged(maker: _Chain, taker: _Chain, value: ValueEdge, made: list[ValueEdge]) -> _Chain | None:
    """Both as one choice; None where the merge could lose a better assignment."""
    (before, before_of), (after, after_of), at = maker, taker, value.needs[0].at
    apart = before.count != after.count or (value.needs[0].later and value.kept)
    if apart or any(set(o.takes) != {at} for o in after.options) or any(v.size > value.size for v in made):
        return None
    if not {o.gives[value.output] for o in before.options} <= {o.takes[at] for o in after.options}:
        return None
    options: list[Option] = []
    made_of: list[dict[int, int]] = []
    for first, one in zip(before_of, before.options, strict=True):
        for second, other in zip(after_of, after.options, strict=True):
            move = value.moves.get((one.gives[value.output], other.takes[at]))
            if move is not None and move.is_nothing:
                options.append(Option(other.gives, one.takes, one.load + other.load))
                made_of.append(first | second)
    return replace(before, options=tuple(options)), made_of


def _root(into: dict[int, int], number: int) -> int:
    while into[number] != number:
        number = into[number]
    return number


def _renumbered(value: ValueEdge, of: tuple[int, ...]) -> ValueEdge:
    needs = tuple(replace(need, taker=of[need.taker]) for need in value.needs)
    return replace(value, maker=of[value.maker], needs=needs)
