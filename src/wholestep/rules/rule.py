"""A rule applied to one call of an op: which dims of which operands are cut together, what may pass unreduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    `reduces` maps a factor that is missing in the outputs to the partial op that sharding it leaves there.
    """

    operands: Mapping[int, Term]
    outputs: Mapping[int, Term]
    reduces: Mapping[str, str] = field(default_factory=dict[str, str])
    partial: tuple[PassThrough, ...] = ()

    def factors_at(self, operand: int, dim: int) -> str | None:
        """The factor of one dim of one operand."""
        term = self.operands[operand]
        return term[dim] if dim < len(term) else None


@dataclass(frozen=True)
class BoundRule:
    """Independent groups of one call. `by_shape` names operands whose values the op never reads."""

    groups: tuple[Group, ...]
    by_shape: frozenset[int] = frozenset()
