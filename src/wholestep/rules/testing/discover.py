"""Discovers a rule for an op without one, by running it on pieces of small random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ...graph.call_keys import place_in
from ...graph.meta import TensorMeta
from ..call import Call
from ..rule import BoundRule, Group, PassThrough
from .check import OpCase, Sample, ShardedFactor, case_of, check_pass, check_way, ways

_SMALL = (12, 8, 6, 10, 4, 9, 5, 7, 11)  # sizes that replace those of the call, largest tensors first
_SEEDS = 3
_TRIES = 512  # sets of dims tried for one size
_REDUCTIONS = ("sum", "", "max", "min")  # what a factor missing in an output may leave there


def discover(call: Call) -> BoundRule | None:
    """The factors of `call`, and the operands it is linear in; None if none are found. Never raises.

    The op runs on random inputs with the same numbers of dims and dtypes, and smaller sizes. A set of equal dims is a
    factor if all ways to shard it give the result of one device on several samples.
    """
    if not callable(call.target) or not call.operands or any(0 in m.shape for m in call.operands):
        return None
    if _torch.is_op(target := call.target):
        is_impure = _torch.schema_of(target).is_mutable or torch.Tag.nondeterministic_seeded in target.tags
        if is_impure or target.namespace in ("aten", "prims"):
            return None
    try:
        cache, key = place_in(_discovered, call)
        if key not in cache:
            cache[key] = _search(call)
        return cache[key]
    except Exception:  # an unknown op may raise anything
        return None


_discovered: dict[Any, BoundRule | None] = {}


def _search(call: Call) -> BoundRule | None:
    with torch.random.fork_rng(devices=[]):
        cases = _cases(call)
    if not cases:
        return None
    group = Group(
        {i: (None,) * len(m.shape) for i, m in enumerate(call.operands)},
        {o: (None,) * len(m.shape) for o, m in enumerate(call.outputs) if m is not None},
    )
    number = 0
    for dims in _guesses(cases[0]):
        wider = _with(group, f"f{number}", dims)
        accepted = _accepted(cases, wider, f"f{number}") if wider else None
        if accepted:
            group, number = accepted, number + 1
    group = replace(group, partial=_linear(cases, group))
    if not number and not group.partial:
        return None
    sizes = call.sizes(group.operands)  # in place of the small ones
    return BoundRule((replace(group, even={f: sizes[f] for f in group.even}),), origin="discovered")


def _cases(call: Call) -> list[OpCase]:
    """The op on small random inputs of one shape; empty if it refuses them or returns other shapes."""
    for sizes in _small_sizes(call):
        for wide in (True, False):
            cases = [case for seed in range(_SEEDS) if (case := _case(call, sizes, wide, seed)) is not None]
            if len(cases) == _SEEDS and not any(case.random for case in cases):
                return cases
    return []


def _small_sizes(call: Call) -> Iterator[Mapping[int, int]]:
    """Maps from sizes of the call to small ones: all different, then the real ones if they are small enough."""
    sizes = dict.fromkeys(n for m in (*call.operands, *filter(None, call.outputs)) for n in m.shape if n > 1)
    for turn in range(2):
        names = _SMALL[turn:] + _SMALL[:turn]
        if len(sizes) <= len(names):
            yield dict(zip(sizes, names, strict=False))
    if all(m.numel <= 1 << 16 for m in call.operands):
        yield {n: n for n in sizes}


def _case(call: Call, sizes: Mapping[int, int], wide: bool, seed: int) -> OpCase | None:
    source = torch.Generator().manual_seed(seed)
    inputs = _torch.tree_map_only(TensorMeta, lambda m: _random(m, sizes, wide, source), (call.args, dict(call.kwargs)))
    try:
        case = case_of(call.target, Sample(*inputs))
    except Exception:  # the op refuses these sizes or types
        return None
    pairs = list(zip(case.expected, call.outputs, strict=True)) if len(case.expected) == len(call.outputs) else []
    fits = all(w is None or m is None or _shape(m, sizes) == tuple(w.shape) for w, m in pairs)
    live = all(w is None or bool(w.any()) for w, _ in pairs)  # any rule holds for zeros
    again = case.run(case.tensors)
    same = all(w is None or (a is not None and torch.equal(w, a)) for w, a in zip(case.expected, again, strict=True))
    return case if pairs and fits and live and same else None


def _shape(meta: TensorMeta, sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(n, n) for n in meta.shape)


def _random(meta: TensorMeta, sizes: Mapping[int, int], wide: bool, source: torch.Generator) -> Tensor:
    """Random values; integers below the smallest size, for they may be indices."""
    shape = _shape(meta, sizes)
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        dtype = torch.float64 if wide and meta.dtype.is_floating_point else meta.dtype
        values = torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    else:
        high = 2 if meta.dtype == torch.bool else max(2, min(sizes.values(), default=2))
        values = torch.randint(0, high, shape, generator=source).to(meta.dtype)
    return values.to(meta.device)


_Guess = tuple[int | None, ...]
"""A candidate for a factor: for each operand and then each output a dim of one size, or None."""


def _guesses(case: OpCase) -> Iterator[_Guess]:
    """Sets of dims of one size, large sets and equal positions first."""
    operands = [tuple(t.shape) for t in case.tensors]
    outputs = [tuple(w.shape) if w is not None else () for w in case.expected]
    for size in dict.fromkeys(n for shape in operands for n in shape if n > 1):
        choices = [[*(d for d, n in enumerate(shape) if n == size), None] for shape in (*operands, *outputs)]
        tried = sorted(islice(product(*choices), _TRIES), key=_order)
        yield from (dims for dims in tried if any(d is not None for d in dims[: len(operands)]))


def _order(dims: Sequence[int | None]) -> tuple[int, int]:
    chosen = [d for d in dims if d is not None]
    return -len(chosen), len(set(chosen))


def _with(group: Group, factor: str, dims: _Guess) -> Group | None:
    """The group with `factor` in these dims; None if one of them has another factor."""
    sides = (group.operands, dims[: len(group.operands)]), (group.outputs, dims[len(group.operands) :])
    if any(f and d == side[i] for terms, side in sides for i, term in terms.items() for d, f in enumerate(term)):
        return None
    operands, outputs = (
        {i: tuple(factor if d == side[i] else f for d, f in enumerate(term)) for i, term in terms.items()}
        for terms, side in sides
    )
    return replace(group, operands=operands, outputs=outputs)


def _accepted(cases: Sequence[OpCase], group: Group, factor: str) -> Group | None:
    """The group with the reduction, and equal pieces if needed, for which `factor` holds on all samples; else None."""
    size = next(
        cases[0].tensors[i].shape[list(term).index(factor)] for i, term in group.operands.items() if factor in term
    )
    missing = any(factor not in term for term in group.outputs.values())
    for reduction in _REDUCTIONS if missing else ("",):
        reduced = replace(group, reduces={**group.reduces, factor: reduction}) if reduction else group
        for strict in (reduced, replace(reduced, even={**group.even, factor: size})):
            if all(_holds(case, strict, factor) for case in cases):
                return strict
    return None


def _holds(case: OpCase, group: Group, factor: str) -> bool:
    bound = BoundRule((group,))
    claims: list[ShardedFactor] = [way for way in ways(case, bound) if way.factor == factor]
    return bool(claims) and all(check_way(case, bound, way) is None for way in claims)


def _linear(cases: Sequence[OpCase], group: Group) -> tuple[PassThrough, ...]:
    """Operands the op is linear in, each alone; if there are none, all together."""
    singles = [PassThrough(frozenset({i})) for i in group.operands]
    together = [PassThrough(frozenset(group.operands))] if len(singles) > 1 else []

    def passes(through: PassThrough) -> bool:
        return all(check_pass(case, group, through, op) == [] for case in cases for op in sorted(through.ops))

    return tuple(filter(passes, singles)) or tuple(filter(passes, together))
