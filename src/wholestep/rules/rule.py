"""A rule applied to one call of an op: which dims of which operands are cut together, what may pass unreduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Term = tuple[str | None, ...]
"""For each dim of a tensor the factor that may shard it; None where it must stay whole."""

LINEAR = frozenset({"sum", "avg"})
ANY_PARTIAL = frozenset({"sum", "avg", "max", "min", "norm1", "norm2"})


@dataclass(frozen=True)
class PassThrough:
    """Operands that may hold partial values of `ops`, all of them together; the outputs are then partial likewise.

    `mixed`: some of them may be whole instead, and are taken as one rank's share of a partial value.
    """

    operands: frozenset[int]
    ops: frozenset[str] = LINEAR
    mixed: bool = False


@dataclass(frozen=True)
class Group:
    """Operands and outputs, by position, that share factors and are cut independently of every other group.

    Invariants: a factor stands at most once in a term; operands named in no group are shared and stay whole.
    `reduces` maps a factor that is missing in the outputs to the partial op that sharding it leaves there. `sizes`
    are those of factors that must be cut into equal parts (outer factors of merged dims) or into parts that are not
    empty (`filled`); any other factor is cut as torch.chunk cuts. What `opaque` outputs hold means nothing to anyone.
    """

    operands: Mapping[int, Term]
    outputs: Mapping[int, Term]
    reduces: Mapping[str, str] = field(default_factory=dict[str, str])
    partial: tuple[PassThrough, ...] = ()
    even: Mapping[str, int] = field(default_factory=dict[str, int])
    filled: Mapping[str, int] = field(default_factory=dict[str, int])
    opaque: frozenset[int] = frozenset()

    def factors_at(self, operand: int, dim: int) -> str | None:
        """The factor of one dim of one operand."""
        term = self.operands[operand]
        return term[dim] if dim < len(term) else None

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors of the operands, in order of appearance."""
        return tuple(dict.fromkeys(f for term in self.operands.values() for f in term if f))

    def splits(self, factor: str, parts: int) -> bool:
        """True when `factor` may be cut into `parts`."""
        size = self.filled.get(factor)
        return self.even.get(factor, 0) % parts == 0 and (size is None or -(-size // parts) * (parts - 1) < size)


@dataclass(frozen=True)
class BoundRule:
    """Independent groups of one call.

    `by_shape` names operands whose values the op never reads. `sizes` names arguments that hold shapes, and what they
    are on a rank: `out0`, `in1` (the local shape of an output or operand) or a factor (its local size). `local` swaps
    the op itself on a rank, where cutting takes more than smaller shapes: it is given the call and the factors that
    are cut, and returns the function to call with more arguments (`rules.localize`). `instead` is called by a rank on
    the first argument and the values of `sizes` alone. `origin`: `built in`, `yours` or `discovered`.
    """

    groups: tuple[Group, ...]
    by_shape: frozenset[int] = frozenset()
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    local: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    instead: Callable[..., Any] | None = None
    origin: str = "built in"
