"""What a proof of padding knows of the tensors of a padded run."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.sizes_in_graph import sizes_among
from ..rules.call import Call

aten = torch.ops.aten
H = TypeVar("H", bound=Hashable)
Region = frozenset[int]
"""Padded dims, by number, whose places are beyond the real ones; in all other padded dims the places are real."""
Numbers = tuple[int, ...]
"""A size in several batches: the proof compares sizes there."""
END = sys.maxsize


@dataclass(frozen=True)
class Places:
    """The places of a padded dim: `outer` rows of `length` places of `inner` elements, in the order of memory."""

    outer: Numbers
    length: Numbers
    inner: Numbers

    @staticmethod
    def alone(length: Numbers) -> Places:
        """Those of a dim that is padded itself."""
        ones = (1,) * len(length)
        return Places(ones, length, ones)

    @property
    def first(self) -> bool:
        """True if the real places are the first ones of the dim."""
        return max(self.outer) == max(self.inner) == 1


@dataclass(frozen=True)
class Value:
    """What is known of a tensor of the padded run. `tails` has the constant in each region, or None. `constant` is that
    of a tensor without padded dims. With `index`, each element is its place along the padded dim of that number. With
    `real`, it is the number of real places.
    """

    dims: Mapping[int, Places] = field(default_factory=dict[int, Places])
    tails: Mapping[Region, float | None] = field(default_factory=dict[Region, Any])
    constant: float | None = None
    index: int | None = None
    real: bool = False

    def at(self, region: Region) -> float | None:
        """The constant in a region; in none, that of the whole tensor."""
        return self.tails[region] if region else self.constant


ONE_POSITION = "a mask that leaves each row one position: mask keys alone, and not rows of queries"
NO_LENGTH = "a number that does not depend on it"
SAME = Value()
Made = Value | Sequence[Any]


def subsets(several: Collection[H]) -> Iterator[frozenset[H]]:
    """Every set of padded dims, or of factors, but the empty one."""
    return map(frozenset, chain.from_iterable(combinations(several, n) for n in range(1, len(several) + 1)))


def filled(dims: Mapping[int, Places], constant: float | None) -> Value:
    """A value whose tails are one constant, or nothing that is known."""
    return Value(dims, dict.fromkeys(subsets(dims), constant))


KEEPING = (
    aten.clone, aten._to_copy, aten.alias, aten.detach, aten.unsqueeze, aten.squeeze, aten.permute, aten.transpose,
    aten.t, aten.contiguous,
)  # fmt: skip
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # these hold the number of each place
COMPARISONS = (aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ne.Tensor)


def keeps(target: Any) -> bool:
    """True for an op whose result has the elements of its operand."""
    return getattr(target, "overloadpacket", None) in KEEPING


def adds_nothing(node: Node) -> bool:
    """True for a sum with the number 0: its result has the elements of its operand."""
    zero = node.target in (aten.add.Tensor, aten.sub.Tensor) and len(node.all_input_nodes) == 1 and not node.kwargs
    return zero and type(node.args[1]) is int and node.args[1] == 0


def pointwise(target: Any) -> bool:
    """True for an op that makes each element of the elements at its place."""
    return _torch.is_op(target) and (torch.Tag.pointwise in target.tags or keeps(target))


def constant_made(node: Node) -> float | None:
    """The constant that a factory fills its result with."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return 0.0
    if packet in (aten.ones, aten.ones_like, aten.new_ones):
        return 1.0
    value = Call.of(node).argument("fill_value") if packet in (aten.full, aten.full_like, aten.new_full) else None
    value = Call.of(node).argument("s") if packet is aten.scalar_tensor else value
    return float(value) if isinstance(value, (bool, int, float)) and not sizes_among([value]) else None


def short_cut(node: Node, constants: Mapping[Node, float | None]) -> float | None:
    """What a pointwise op makes whatever the operands that are not known are."""
    packet, args = getattr(node.target, "overloadpacket", None), node.args

    def constant(position: int) -> float | None:
        argument = args[position] if position < len(args) else None
        if isinstance(argument, Node):
            return constants.get(argument)
        return float(argument) if isinstance(argument, (bool, int, float)) and not sizes_among([argument]) else None

    if packet in (aten.where, aten.masked_fill):
        condition, yes, no = (constant(i) for i in ((0, 1, 2) if packet is aten.where else (1, 2, 0)))
        if condition is None:
            return yes if yes == no else None
        return yes if condition else no
    if packet in (aten.mul, aten.logical_and, aten.bitwise_and) and 0 in (constant(0), constant(1)):
        return None if any(no_number(constant(i)) for i in (0, 1)) else 0.0
    if packet is aten.div and constant(0) == 0 and constant(1) is None:
        return 0.0
    if packet in (aten.logical_or, aten.bitwise_or) and meta.one_tensor(node).dtype is torch.bool:
        return 1.0 if 1 in (constant(0), constant(1)) else None
    if packet is aten.add and not node.kwargs:
        return next((v for v in (constant(0), constant(1)) if v is not None and math.isinf(v)), None)
    return None


def no_number(value: float | None) -> bool:
    """True for a constant that is known, and is infinite or not a number."""
    return value is not None and not math.isfinite(value)


def put_back(tree: Any, flat: Iterator[Value]) -> Made:
    """Values in the order of the flat outputs, as the op returns them."""
    if isinstance(tree, (list, tuple)):
        return [put_back(entry, flat) for entry in cast(Sequence[Any], tree)]
    return next(flat)


def renamed(value: Value, dims: Mapping[int, Places], names: Mapping[int, int]) -> Value:
    """A value with padded dims at other numbers."""
    tails = {frozenset(names[d] for d in region): tail for region, tail in value.tails.items()}
    return Value(dims, tails, value.constant, None if value.index is None else names[value.index])


class Proof(Protocol):
    """The part of a proof that rows use."""

    batches: Sequence[Mapping[str, int]]
    node: Node

    def numbers(self, size: int) -> Numbers:
        """A size in all batches."""
        ...

    def varies(self, size: object) -> bool:
        """True if a number depends on the padded length."""
        ...

    def refuse(self, why: str, needed: str = "") -> NoReturn:
        """The step cannot be padded."""
        ...

    def fill(self, operand: int, dim: int, value: float) -> bool:
        """Whether the program can have this constant at the padded places of an operand of the node."""
        ...

    def by_rule(self, call: Call, operands: Sequence[Value]) -> Made:
        """What the sharding rule of an op says."""
        ...
