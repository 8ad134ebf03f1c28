"""Makes a problem smaller: a choice that takes one value, which nothing else reads, is joined with what makes that.

What is brought from one state to another is then brought at the end of such a chain, not inside it. Only links whose
result is no larger are joined, so that nothing is sent dearer for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problem import Choice, Option, Problem, Value


@dataclass(frozen=True)
class Joined:
    """A smaller problem. `of` says for each choice of the one that it stands for which choice it is part of now, and
    `parts` for each option of the smaller one the options that it is made of, by number of the choice.
    """

    problem: Problem
    of: tuple[int, ...]
    parts: tuple[tuple[dict[int, int], ...], ...]

    def opened(self, picked: tuple[int, ...]) -> tuple[int, ...]:
        """The options of all choices of the larger problem, from those of the smaller one."""
        found: dict[int, int] = {}
        for choice, option in enumerate(picked):
            found |= self.parts[choice][option]
        return tuple(found[number] for number in range(len(self.of)))


@dataclass
class _Part:
    """A choice on its way: its options, and what each is made of."""

    choice: Choice
    made_of: list[dict[int, int]]


def joined(problem: Problem) -> Joined:
    """`problem` with its chains joined."""
    parts = {n: _Part(c, [{n: i} for i in range(len(c.options))]) for n, c in enumerate(problem.choices)}
    values, into = list(problem.values), {n: n for n in parts}
    made = _by_maker(values)
    for at in range(len(values)):
        value = values[at]
        taker = value.needs[0].taker
        maker = _root(into, value.maker)
        if len(value.needs) > 1 or taker == maker or len(made.get(value.maker, ())) > 1 or into[taker] != taker:
            continue
        link = _link(parts[maker], parts[taker], value, [values[i] for i in made.get(taker, ())])
        if link is not None:
            parts[maker] = link
            into[taker] = maker
            del parts[taker]
            values[at] = replace(value, needs=())
    numbers = {old: new for new, old in enumerate(sorted(parts))}
    of = tuple(numbers[_root(into, n)] for n in range(len(problem.choices)))
    kept = [_moved(v, of) for v in values if v.needs]
    choices = tuple(parts[n].choice for n in sorted(parts))
    return Joined(
        replace(problem, choices=choices, values=tuple(kept)), of, tuple(tuple(parts[n].made_of) for n in sorted(parts))
    )


def _link(maker: _Part, taker: _Part, value: Value, made: list[Value]) -> _Part | None:
    """Both as one choice; None where something could be lost by that."""
    at = value.needs[0].at
    apart = maker.choice.count != taker.choice.count or (value.needs[0].later and value.kept)
    if apart or any(set(o.takes) != {at} for o in taker.choice.options) or any(v.size > value.size for v in made):
        return None
    states = {o.gives[value.output] for o in maker.choice.options}
    if not states <= {o.takes[at] for o in taker.choice.options}:
        return None
    options: list[Option] = []
    made_of: list[dict[int, int]] = []
    for first, one in zip(maker.made_of, maker.choice.options, strict=True):
        for second, other in zip(taker.made_of, taker.choice.options, strict=True):
            move = value.moves.get((one.gives[value.output], other.takes[at]))
            if move is not None and move.is_nothing:
                options.append(Option(other.name, other.gives, one.takes, one.load + other.load))
                made_of.append(first | second)
    return _Part(replace(maker.choice, options=tuple(options)), made_of)


def _by_maker(values: list[Value]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        out.setdefault(value.maker, []).append(i)
    return out


def _root(into: dict[int, int], number: int) -> int:
    while into[number] != number:
        number = into[number]
    return number


def _moved(value: Value, of: tuple[int, ...]) -> Value:
    needs = tuple(replace(need, taker=of[need.taker]) for need in value.needs)
    return replace(value, maker=of[value.maker], needs=needs)
