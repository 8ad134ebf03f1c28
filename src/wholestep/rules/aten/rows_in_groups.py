"""Ops on rows that are sorted by group, of which a rank sorts, reads and multiplies its own.

The order of rows is of no account where `plan.rows_in_any_order` proves it. Then a rank that has some of the rows calls
the op itself on these, and its indices count them. Or ranks have some of the groups, `count` from `first` on: they sort
rows of these first, and multiply these only. Or they send each other the rows of these, as many as there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ...graph.op_kinds import PRODUCTS, READS_A_PART, SHARES_OF_ROWS
from ..call import Call
from ..dsl import aten, called, row
from ..registry import Bind, Function, bind_rule
from ..rule import BoundRule
from .linalg import in_lines_of_16_bytes

FORWARD = "transformers.grouped_mm_fallback.default"
BACKWARD = "transformers.grouped_mm_fallback_backward.default"


@cache
def own_rows(op: Any) -> Callable[..., Any]:
    """`op`, which sorts rows or reads x[rows], of the rows that a rank has."""

    def of_rows(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    if op in READS_A_PART:
        READS_A_PART.add(of_rows)
    return _with_rule(called(of_rows, op, "of_rows"), _reads if op is aten.index.Tensor else _sorts)


def _sorts(call: Call) -> str:
    return "t -> t+"


def _reads(call: Call) -> Bind:
    """x[rows]: each place of `x` has as many rows, all of them in the same piece."""
    rest = " ".join(f"r{i}" for i in range(len(call.shape(0)) - 1))
    at = "t" if call.shape(0)[0] == call.shape(1)[0] else "(t k)"
    return Bind(f"t {rest}, {at} -> {at} {rest}", moves="0")


@cache
def groups_first(op: Any, groups: int) -> Callable[..., Any]:
    """`op`, which sorts the groups of rows, with those from `first` on before all others."""

    def from_first(first: int, of: Tensor, *args: Any, **kwargs: Any) -> Any:
        order = op((of - first) % groups, *args, **kwargs)
        return order if isinstance(order, Tensor) else ((order[0] + first) % groups, order[1])

    return _with_rule(called(from_first, op, "from_first"), _sorts)


def rows_of_groups(first: int, count: int, x: Tensor, of: Tensor, dim: int) -> Tensor:
    """`x` with zeros in place of rows, along `dim`, of other groups than `count` from `first` on."""
    counts = ((of >= first) & (of < first + count)).view([-1 if d == dim else 1 for d in range(x.dim())])
    return torch.where(counts, x, x.new_zeros(()))


@row(rows_of_groups)
def _chosen(call: Call) -> Bind:
    dims = [f"r{d}" for d in range(len(call.shape(0)))]
    term = " ".join(dims)
    return Bind(f"{term}, {dims[cast(int, call.args[4])]} -> {term}", linear="0")


def sent_rows(back: bool, x: Tensor, of: Tensor, first: int, count: int, groups: int, axis: str, apart: int) -> Tensor:
    """Rows, sorted by groups `of`, at the ranks of these along `axis`, sorted by group; or `back` where they were. The
    host counts them; or there is room for all, of which `apart` in a row have different groups, and it is not 0.
    """
    return x


@row(sent_rows)
def _sent(call: Call) -> str:
    rest = " ".join(f"r{i}" for i in range(len(call.shape(0)) - 1))
    return f"t {rest}, t -> t {rest}"


def most_rows(rows: int, apart: int, groups: int, ranks: int) -> int:
    """How many of `rows` one rank has groups of at most: of rows in a row of `apart` different groups, all or as many
    as it has groups.
    """
    return rows // apart * min(apart, -(-groups // ranks)) if rows % apart == 0 else rows


def received_groups(of: Tensor, first: int, count: int, groups: int, axis: str, apart: int) -> Tensor:
    """The groups of the rows that `sent_rows` brings; behind them, of those for which there is room only, another."""
    return of


row(received_groups, "t -> t")


@cache
def with_its_rows(op: Any, place: int, at: int, dim: int) -> Callable[..., Any]:
    """`op`, of which argument `place` is a shape, with as many rows, at dim `at` of it, as the first operand has along
    `dim`.
    """

    def with_rows(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        shape = [x.shape[dim] if d == at else size for d, size in enumerate(args[place - 1])]
        return op(x, *args[: place - 1], shape, *args[place:], **kwargs)

    def unsized(call: Call) -> BoundRule | None:
        rule = bind_rule(replace(call, target=op))
        return rule and replace(rule, sizes={}, instead=None)

    return _with_rule(called(with_rows, op, "with_its_rows"), unsized)


def sum_of_rows(rows: Tensor, values: Tensor, each: int) -> Tensor:
    """The sums of the values at equal positions in `rows`, of which there are `each` for one position."""
    zeros = values.new_zeros((rows.shape[0] // each, *values.shape[1:]))
    return zeros.index_put((rows,), values, accumulate=True)


@row(sum_of_rows)
def _sums(call: Call) -> Bind:
    rest = " ".join(f"r{i}" for i in range(len(call.shape(1)) - 1))
    at = "t" if call.made() == call.shape(1) else "(t k)"
    return Bind(f"{at}, {at} {rest} -> t {rest}", linear="1")


def inverse_rows(rows: Tensor) -> Tensor:
    """The inverse of a permutation of rows."""
    return torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.shape[0], device=rows.device))


row(inverse_rows, "t -> t")


@cache
def product_of_rows(op: Any, groups: int) -> Callable[..., Any]:
    """A grouped product that is given the group of each row, in order, in place of the ends of `groups` groups."""

    def of_rows(*args: Any, **kwargs: Any) -> Any:
        return _multiplied(op, groups, 0, groups, *args, **kwargs)

    return _product(of_rows, op, "of_rows")


@cache
def product_of_groups(op: Any, groups: int, ranks: int) -> Callable[..., Any]:
    """As `product_of_rows`, of the groups of one of several ranks, whose rows come first. Other rows are undefined."""

    def of_groups(*args: Any, **kwargs: Any) -> Any:
        return _multiplied(op, groups, *args, **kwargs)

    SHARES_OF_ROWS[of_groups] = ranks
    return _product(of_groups, op, "of_groups")


def _multiplied(
    op: Any, groups: int, first: int, count: int, x: Tensor, other: Tensor, of: Tensor, *rest: Any, **kwargs: Any
) -> Any:
    if count and (of.shape[0] or op is not aten._grouped_mm.default):
        places = torch.arange(count, device=of.device, dtype=of.dtype)
        ends = torch.searchsorted((of - first) % groups if count < groups else of, places, right=True, out_int32=True)
        return op(x, other, ends, *rest, **kwargs)
    if str(op) == BACKWARD:
        return torch.zeros_like(x), torch.zeros_like(other)
    return x.new_zeros((x.shape[0], other.shape[2]) if other.ndim == 3 else (count, x.shape[0], other.shape[1]))


def _product(function: Callable[..., Any], op: Any, what: str) -> Callable[..., Any]:
    if op in PRODUCTS:
        PRODUCTS.add(function)
    back = Bind("t k, e! k n, t, t n -> t k, e! k n", "3")
    return _with_rule(called(function, op, what), (lambda _: back) if str(op) == BACKWARD else _multiplies)


def _multiplies(call: Call) -> BoundRule:
    bound = Bind("t k, e! k n, t -> t n | m t, t n, t -> e m n", "0 | 1").on(call)
    return in_lines_of_16_bytes(bound, call, "et")


def _with_rule(function: Callable[..., Any], rule: Function) -> Callable[..., Any]:
    row(function)(rule)
    return function
