"""A rule bound to one call of an op: which dims are sharded together, and which operands may stay partial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from ..layout import PARTIAL_OPS, AxisState, sharded_along
from ..sizes import SizeInt

Term = tuple[str | None, ...]
"""For each dim of a tensor the factor that may shard it; None if it must stay whole."""

LINEAR = frozenset({"sum", "avg"})
ANY_PARTIAL = frozenset(PARTIAL_OPS)


COUNT_OPERANDS: set[Callable[..., Any]] = set()
"""Functions that run instead of an op on as many places as their operands have, whatever the length of the piece."""
OF_WHOLE: set[Callable[..., Any]] = set()
"""Functions that run instead of an op, and are given the size of the whole dim behind the start and the length."""


@dataclass(frozen=True)
class PassThrough:
    """Operands that may be partial by `ops`, all together; the outputs are then partial by the same op.

    `mixed`: some of them may be whole instead, and count as one rank's share of a partial value.
    """

    operands: frozenset[int]
    ops: frozenset[str] = LINEAR
    mixed: bool = False


@dataclass(frozen=True)
class Group:
    """Operands and outputs, by position, that share factors and are sharded independently of every other group.

    `reduces` maps a factor that an output lacks to the partial op of that output if the factor is sharded. `even` has
    sizes of factors that need equal parts (outer factors of merged dims), `filled` of factors that need non-empty
    parts; other factors are split as by torch.chunk. `in_units` are those of `even` whose merged dims are cut between
    whole units, so that parts may differ. Values of `opaque` outputs are never read. `sizes` are those of factors of
    which blocks may be sharded. `merged` has all factors of a dim, outermost first, by side (0 operands, 1 outputs),
    position and dim, where terms cannot say it: where some are merged behind others.
    Invariants: a factor stands at most once in a term; operands in no group are shared and stay whole.
    """

    operands: Mapping[int, Term]
    outputs: Mapping[int, Term]
    reduces: Mapping[str, str] = field(default_factory=dict[str, str])
    partial: tuple[PassThrough, ...] = ()
    even: Mapping[str, int] = field(default_factory=dict[str, int])
    filled: Mapping[str, int] = field(default_factory=dict[str, int])
    opaque: frozenset[int] = frozenset()
    in_units: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    merged: Mapping[tuple[int, int, int], tuple[str, ...]] = field(
        default_factory=dict[tuple[int, int, int], tuple[str, ...]]
    )

    def factor_at(self, side: int, position: int, state: AxisState) -> str | None:
        """The factor that shards an operand (side 0) or output (1) as `state` does: `f`, or `f in 4` for each of four
        blocks of it.
        """
        term = (self.operands, self.outputs)[side][position]
        if state.kind != "S" or state.dim >= len(term):
            return None
        plain, before = term[state.dim], 1
        for factor in self.merged.get((side, position, state.dim), (plain,) if plain else ()):
            blocks, uneven = divmod(state.blocks, before)
            if blocks == 1 or (blocks < self.sizes.get(factor, 0) and not uneven):
                return factor if blocks == 1 else f"{factor} in {blocks}"
            before *= self._settled(factor)
        return plain if state.blocks == 1 else None

    def state_by(self, factor: str, side: int, position: int) -> AxisState | None:
        """The state of an operand (side 0) or output (1) that is sharded by a factor, as `factor_at` names it; None
        where the tensor lacks it.
        """
        name, _, blocks = factor.partition(" in ")
        term = (self.operands, self.outputs)[side][position]
        if name in term:
            return sharded_along(term.index(name), int(blocks or 1))
        for (of, at, dim), factors in self.merged.items():
            if (of, at) == (side, position) and name in factors:
                before = prod(map(self._settled, factors[: factors.index(name)]))
                return sharded_along(dim, before * int(blocks or 1))
        return None

    def _settled(self, factor: str) -> int:
        """The size of a factor by which blocks are counted: the program is for batches that have this one."""
        size = self.sizes.get(factor, 0)
        return int(size) if size == int(size) else 0  # of a symbol, the comparison is what other batches are asked

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors of the operands, in order of appearance."""
        return tuple(dict.fromkeys(f for term in self.operands.values() for f in term if f))

    def splits(self, factor: str, parts: Sequence[int], equal: bool = False, extended: bool = False) -> bool:
        """True if `factor` may be split into `parts`, those of the outermost axis first. `equal`: merged dims are not
        cut in units. `extended`: a rank with an empty piece computes on one place of zeros, where that is right.
        """
        name, _, blocks = factor.partition(" in ")
        if self.is_inner(factor):
            places, uneven = divmod(self.sizes.get(name, 0), int(blocks or 1))
            even = not self._leads(name) or places % prod(parts) == self.even.get(name, 0) % prod(parts) == 0
            return places > 0 and uneven == 0 and even and (name not in self.filled or _is_filled(places, parts))
        size = None if extended and self.may_be_extended(factor) else self.filled.get(factor)
        fits = (factor in self.in_units and not equal) or self.even.get(factor, 0) % prod(parts) == 0
        return fits and (size is None or _is_filled(size, parts))

    def is_inner(self, factor: str) -> bool:
        """True for blocks of a factor, and for one that is merged behind another."""
        return " in " in factor or not any(factor in term for term in (*self.operands.values(), *self.outputs.values()))

    def is_counted_by_symbols(self, factor: str) -> bool:
        """True for a factor behind one whose size is another one in other batches, and with it the number of blocks."""
        behind = (factors[: factors.index(factor)] for factors in self.merged.values() if factor in factors)
        return any(isinstance(self.sizes[outer], SizeInt) for factors in behind for outer in factors)

    def nests(self, cuts: Mapping[str, Sequence[int]]) -> bool:
        """True if factors that are split at once leave blocks whole: parts of the innermost places alone may differ."""
        if len(cuts) == 1 or not any(map(self.is_inner, cuts)):
            return True
        split: dict[str, list[tuple[int, int]]] = {}
        for factor, parts in cuts.items():
            name, _, blocks = factor.partition(" in ")
            split.setdefault(name, []).append((int(blocks or 1), prod(parts)))
        ends = {name: [*sorted(at), (self.sizes.get(name, 0), 1)] for name, at in split.items()}
        return all(
            b > 0 and b % a == 0 and ((i == len(at) - 2 and not self._leads(name)) or b // a % parts == 0)
            for name, at in ends.items()
            for i, ((a, parts), (b, _)) in enumerate(pairwise(at))
        )

    def _leads(self, name: str) -> bool:
        """True for a factor whose places have others behind them in a merged dim."""
        return name in self.even or any(name in factors[:-1] for factors in self.merged.values())

    def may_be_extended(self, factor: str) -> bool:
        """True if ranks with an empty piece may compute on one place of zeros instead: it is cut off from outputs that
        have the factor, and adds zero to sums that lack it.
        """
        linear = [passing.operands for passing in self.partial if "sum" in passing.ops]
        sums = any(all(factor in self.operands[i] for i in positions) for positions in linear)
        lost = [number for number, term in self.outputs.items() if factor not in term and number not in self.opaque]
        return factor not in self.even and (not lost or (sums and self.reduces.get(factor, "sum") == "sum"))


def _is_filled(size: int, parts: Sequence[int]) -> bool:
    """True if no piece is empty where a dim is cut into parts, and each of these again."""
    if not parts:
        return size > 0
    first, *inner = parts
    step = -(-size // first)
    last = size - step * (first - 1)
    if not inner:
        return last > 0
    return last > 0 and _is_filled(step, inner) and _is_filled(last, inner)


@dataclass(frozen=True)
class BoundRule:
    """Independent groups of one call.

    `by_shape`: operands of which the op reads only the shape. `sizes`: arguments that hold shapes, with their value on
    a rank: `out0`, `in1` (local shape of an output or operand), `start0` (where a rank's piece of an output begins) or
    a factor (its local size). `local`: by factor, the function that ranks call instead of the op if the factor is
    sharded (`rules.localize`). `instead`: ranks call this with the first argument and the values of `sizes` only.
    `origin`: `built in`, `yours` or `discovered`.
    """

    groups: tuple[Group, ...]
    by_shape: frozenset[int] = frozenset()
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    local: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    instead: Callable[..., Any] | None = None
    origin: str = "built in"

    @property
    def extends(self) -> bool:
        """True if calls may be given more places: no argument says how many, nor a function that runs instead."""
        return not self.sizes and self.instead is None and COUNT_OPERANDS.issuperset(self.local.values())

    def made_factors(self, group: Group) -> tuple[str, ...]:
        """Factors that outputs of a group alone have, and whose pieces a function of the rule makes: the rows of an
        embedding's gradient.
        """
        factors = dict.fromkeys(f for term in group.outputs.values() for f in term if f and f in self.local)
        return tuple(f for f in factors if f not in group.factors)
