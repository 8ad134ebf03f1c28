"""Ops that take positions by number in the proof of padding: slices, indexing, borders, concatenation, running sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..rules.call import Call
from .padded_values import END, NO_LENGTH, Made, Places, Proof, Value, filled, renamed, subsets

aten = torch.ops.aten


def sliced(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A slice along one dim."""
    source = operands[0]
    dim: int = call.argument("dim", 0) % len(call.shape(0))
    start, end, step = call.argument("start") or 0, call.argument("end"), call.argument("step", 1)
    size: int = call.made()[dim]
    if dim not in source.dims and not proof.varies(size):
        return source
    if proof.varies(start) or start < 0 or step != 1:
        proof.refuse("reads positions counted from the end of the padded length", "positions counted from the start")
    if dim in source.dims and not source.dims[dim].first:
        proof.refuse("takes padded positions apart")
    other_dims = {d: places for d, places in source.dims.items() if d != dim}
    if not proof.varies(size):  # the first ones, which are real where the guards of the capture hold
        if end is not None and (proof.varies(end) or end < 0):
            proof.refuse("reads positions counted from the end of the padded length")
        return Value(other_dims, {r: tail for r, tail in source.tails.items() if dim not in r})
    dims = {**other_dims, dim: Places.alone(proof.numbers(size))}
    to_end = end is None or end == END or (dim in source.dims and proof.numbers(end) == source.dims[dim].length)
    tails = {r: source.at(r) if dim in source.dims and (to_end or dim not in r) else None for r in subsets(dims)}
    if dim not in source.dims:
        tails |= {r: source.at(r) for r in subsets(other_dims)}
    return Value(dims, tails, index=source.index if start == 0 else None)


def unsliced(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A slice in the middle of zeros."""
    source, shape = operands[0], call.made()
    dim: int = call.argument("dim") % len(shape)
    start, end, step = call.argument("start"), call.argument("end"), call.argument("step")
    if dim not in source.dims and not proof.varies(shape[dim]):
        return source
    if proof.varies(start) or start < 0 or step != 1 or (dim in source.dims and not source.dims[dim].first):
        proof.refuse("reads positions counted from the end of the padded length")
    if dim not in source.dims:  # a few of the first places, all of which are real
        dims = {**source.dims, dim: Places.alone(proof.numbers(shape[dim]))}
        return Value(dims, {r: 0.0 if dim in r else source.at(r) for r in subsets(dims)})
    if end != END and any(source.tails[r] != 0 for r in subsets(source.dims) if dim in r):
        proof.refuse("puts padded positions, which are not zero, beside others")
    other_dims = {d: places for d, places in source.dims.items() if d != dim}
    if not proof.varies(shape[dim]):
        return Value(other_dims, {r: tail for r, tail in source.tails.items() if dim not in r})
    dims = {**other_dims, dim: Places.alone(proof.numbers(shape[dim]))}
    return Value(dims, dict(source.tails))


def written(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A slice, or one place, of a tensor replaced."""
    into, new = operands
    rank, several = len(call.shape(0)), call.target is aten.slice_scatter.default
    dim: int = call.argument("dim", 0) % rank
    start = (call.argument("start") or 0) if several else call.argument("index")
    new_dims = new.dims if several else {d + (d >= dim): places for d, places in new.dims.items()}
    at = new if several else renamed(new, new_dims, {d: d + (d >= dim) for d in new.dims})
    other_dims = {d: places for d, places in into.dims.items() if d != dim}
    if {d: places for d, places in new_dims.items() if d != dim} != other_dims:
        proof.refuse("aligns padded positions with other ones")
    if dim not in into.dims and dim not in new_dims:
        same = {r for r in into.tails if into.tails[r] == at.tails[r]}
        return Value(into.dims, {r: tail if r in same else None for r, tail in into.tails.items()})
    if proof.varies(start) or start < 0 or call.argument("step", 1) != 1 or dim not in into.dims:
        proof.refuse("writes positions counted from the end of the padded length", "positions counted from the start")
    last = tuple(n - start for n in into.dims[dim].length)
    if not into.dims[dim].first or (dim in new_dims and (not new_dims[dim].first or new_dims[dim].length != last)):
        proof.refuse("writes some of the padded positions", "all positions behind the first one that is written")
    behind = at if dim in new_dims else into
    tails = {r: behind.tails[r] if dim in r else None for r in into.tails}
    return Value(into.dims, tails)


def selected(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """One place of a dim."""
    source = operands[0]
    dim, index = call.argument("dim") % len(call.shape(0)), call.argument("index")
    if dim in source.dims and (proof.varies(index) or index < 0 or not source.dims[dim].first):
        proof.refuse("reads the last of the padded positions", "a position counted from the start")
    names = {d: d - (d > dim) for d in source.dims if d != dim}
    remaining = Value(source.dims, {r: t for r, t in source.tails.items() if dim not in r}, source.constant)
    return renamed(remaining, {names[d]: p for d, p in source.dims.items() if d != dim}, names)


def bordered(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A constant around a tensor; less of it where a border is negative."""
    source, pad, value = operands[0], call.argument("pad"), call.argument("value", 0)
    rank = len(call.shape(0))
    borders = {rank - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    if any(map(proof.varies, (*pad, value))):
        proof.refuse("computes with the padded length (pad)", NO_LENGTH)
    tails, dims = dict(source.tails), dict(source.dims)
    for dim in source.dims.keys() & borders.keys():
        (before, after), behind = borders[dim], [r for r in tails if dim in r]
        if not source.dims[dim].first:
            proof.refuse("takes padded positions apart")
        if after > 0 and any(tails[region] != value for region in behind):
            proof.refuse("puts a constant behind padded positions, which have another", f"{value} at padded positions")
        if after < 0:  # places that are real without padding
            tails |= dict.fromkeys(behind)
        if before or after:
            dims[dim] = Places.alone(proof.numbers(call.made()[dim]))
    if any(n > 0 for border in borders.values() for n in border):
        tails = {region: tail if tail == value else None for region, tail in tails.items()}
    return Value(dims, tails)


def indexed(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Elements by number: of padded dims, each place by its own."""
    source, chosen = operands[0], call.argument("indices")
    at = [dim for dim, index in enumerate(chosen) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in chosen if index is not None):
        return proof.by_rule(call, operands)
    width = max(len(chosen[dim].shape) for dim in at)
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    dims: dict[int, Places] = {}
    sources: dict[int, int] = {}  # padded dims of the operand: the dim of the result that has their places
    for dim, index in zip(at, operands[1:], strict=True):
        lead = start + width - len(chosen[dim].shape)
        for place, places in index.dims.items():
            if dims.setdefault(lead + place, places) != places:
                proof.refuse("aligns padded positions with other ones")
        if dim in source.dims:
            index_dim = index.index
            if index_dim is None or index.dims[index_dim] != source.dims[dim]:
                proof.refuse("reads positions of the padded length by number", "all positions in order: arange(length)")
            sources[dim] = lead + index_dim
    for dim, index in zip(at, operands[1:], strict=True):
        lead = start + width - len(chosen[dim].shape)
        wide = {lead + d for d, size in enumerate(chosen[dim].shape) if not (type(size) is int and size == 1)}
        if (dims.keys() & wide) - {lead + d for d in index.dims}:
            proof.refuse("aligns padded positions with a dim that is not padded")
    rest = [dim for dim in range(len(call.shape(0))) if dim not in at]
    for number, dim in enumerate(rest):
        if dim in source.dims:
            sources[dim] = number + (width if number >= start else 0)
            dims[sources[dim]] = source.dims[dim]
    tails = {r: source.at(frozenset(dim for dim, target in sources.items() if target in r)) for r in subsets(dims)}
    return Value(dims, tails)


def gathered(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Elements of a tensor without padded positions."""
    source, index = operands
    return filled(index.dims, None) if not source.dims else proof.by_rule(call, operands)


def summed_up(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Sums from the first position to each."""
    source, dim = operands[0], call.argument("dim") % len(call.shape(0))
    if dim not in source.dims or not source.dims[dim].first:
        return proof.by_rule(call, operands)
    return Value(source.dims, {r: 0.0 if tail == 0 and dim not in r else None for r, tail in source.tails.items()})


def joined(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Padded positions behind others."""
    dim: int = call.argument("dim", 0) % len(call.made())
    *earlier, last = operands
    if not any(dim in operand.dims for operand in operands):
        return proof.by_rule(call, operands)
    if any(dim in operand.dims for operand in earlier) or not last.dims[dim].first:
        proof.refuse("puts other positions behind padded ones", "the padded positions as the last of what is joined")
    rest = {d: places for d, places in last.dims.items() if d != dim}
    if any(operand.dims != rest for operand in earlier):
        proof.refuse("aligns padded positions with other ones")
    dims = {**rest, dim: Places.alone(proof.numbers(call.made()[dim]))}
    tails = dict(last.tails)
    for region in subsets(rest):
        tails[region] = last.tails[region] if all(o.tails[region] == last.tails[region] for o in earlier) else None
    return Value(dims, tails)


def unselected(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """One place in zeros."""
    source, shape = operands[0], call.made()
    dim: int = call.argument("dim") % len(shape)
    index = call.argument("index")
    names = {d: d + (d >= dim) for d in source.dims}
    placed = renamed(source, {names[d]: places for d, places in source.dims.items()}, names)
    if not proof.varies(shape[dim]):
        return Value(placed.dims, {r: tail if tail == 0 else None for r, tail in placed.tails.items()})
    if proof.varies(index) or index < 0:
        proof.refuse("reads the last of the padded positions", "a position counted from the start")
    dims = {**placed.dims, dim: Places.alone(proof.numbers(shape[dim]))}
    tails = {r: 0.0 if dim in r or placed.tails[r] == 0 else None for r in subsets(dims)}
    return Value(dims, tails)
