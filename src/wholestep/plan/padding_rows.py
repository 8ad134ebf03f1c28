"""Ops with a row of their own in the proof of padding: views, factories, masks, softmax, attention, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..graph import meta
from ..rules.call import Call
from ..sizes import text_of
from . import padding_places
from .padded_values import (
    NO_LENGTH,
    ONE_POSITION,
    SAME,
    Made,
    Numbers,
    Places,
    Proof,
    Region,
    Value,
    constant_made,
    filled,
    no_number,
    put_back,
    renamed,
    subsets,
)

aten = torch.ops.aten
Special = Callable[[Proof, Call, Sequence[Value]], Made]


def _regroup(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A view by other sizes: the elements are the same, in the same order."""
    source = operands[0]
    pieces: list[tuple[Numbers, int | None]] = []  # sizes of the operand, from the left, and the padded dim they are
    for dim, size in enumerate(call.shape(0)):
        places = source.dims.get(dim)
        if places is None:
            pieces.append((proof.numbers(size), None))
        else:
            pieces += [(places.outer, None), (places.length, dim), (places.inner, None)]
    ones = (1,) * len(proof.batches)
    pieces = [piece for piece in pieces if piece[0] != ones]
    dims: dict[int, Places] = {}
    names: dict[int, int] = {}
    for dim, size in enumerate(call.made()):
        remaining, factors = proof.numbers(size), list[tuple[Numbers, int | None]]()
        while remaining != ones:
            if not pieces:
                proof.refuse("takes padded positions apart")
            piece, padded = pieces.pop(0)
            if _divides(piece, remaining):
                factors.append((piece, padded))
                remaining = _quotient(remaining, piece)
            elif padded is None and _divides(remaining, piece):
                factors.append((remaining, None))
                pieces.insert(0, (_quotient(piece, remaining), None))
                remaining = ones
            else:
                proof.refuse("takes padded positions apart")
        long = [i for i, (_, padded) in enumerate(factors) if padded is not None]
        if len(long) > 1:
            proof.refuse("merges two padded dims")
        for i in long:
            before, after = (_product(ones, factors[:i]), _product(ones, factors[i + 1 :]))
            dims[dim] = Places(before, factors[i][0], after)
            names[cast(int, factors[i][1])] = dim
    return renamed(source, dims, names)


def _divides(a: Numbers, b: Numbers) -> bool:
    return all(y % x == 0 for x, y in zip(a, b, strict=True))


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    return tuple(x // y for x, y in zip(a, b, strict=True))


def _product(product: Numbers, pieces: Sequence[tuple[Numbers, int | None]]) -> Numbers:
    for piece, _ in pieces:
        product = tuple(x * y for x, y in zip(product, piece, strict=True))
    return product


def _expanded(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    source, shape, new_shape = operands[0], call.shape(0), call.made()
    lead = len(new_shape) - len(shape)
    dims = {dim + lead: places for dim, places in source.dims.items()}
    for dim, size in enumerate(new_shape):
        if dim not in dims and proof.varies(size):
            dims[dim] = Places.alone(proof.numbers(size))
    old = {dim + lead for dim in source.dims}
    tails = {r: source.at(frozenset(d - lead for d in r & old)) for r in subsets(dims)}
    return Value(dims, tails, index=None if source.index is None else source.index + lead)


def _factory(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A tensor that is filled with one constant, or not at all."""
    if proof.varies(call.argument("fill_value")):
        proof.refuse("computes with the padded length (fill_value)", NO_LENGTH)
    dims = {d: Places.alone(proof.numbers(n)) for d, n in enumerate(call.made()) if proof.varies(n)}
    if operands and operands[0].dims and list(map(text_of, call.made())) == list(map(text_of, call.shape(0))):
        dims = dict(operands[0].dims)
    constant = constant_made(proof.node)
    return replace(filled(dims, constant), constant=constant)


def _counted(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    if proof.varies(call.argument("start", 0)) or proof.varies(call.argument("step", 1)):
        proof.refuse("counts from the padded length on")
    plain = call.argument("start", 0) == 0 and call.argument("step", 1) == 1
    return Value({0: Places.alone(proof.numbers(call.made()[0]))}, {frozenset({0}): None}, index=0 if plain else None)


def _triangle(proof: Proof, call: Call, operands: Sequence[Value]) -> Value:
    """Zeros on one side of a diagonal of the last two dims."""
    source, rank = operands[0], len(call.shape(0))
    row, column, diagonal = rank - 2, rank - 1, call.argument("diagonal", 0)
    dims = source.dims
    if set(dims) - {row, column} or not all(places.first for places in dims.values()) or len(dims) != 2:
        proof.refuse("counts positions of the padded length")
    if dims[row] != dims[column] or proof.varies(diagonal):
        proof.refuse("counts positions of the padded length")
    lower = call.target is aten.tril.default
    right = (
        0.0 if lower and diagonal <= 0 else source.tails[frozenset({column})] if not lower and diagonal <= 1 else None
    )
    below = 0.0 if not lower and diagonal >= 0 else source.tails[frozenset({row})] if lower and diagonal >= -1 else None
    both = 0.0 if source.tails[frozenset({row, column})] == 0 else None
    tails = {frozenset({column}): right, frozenset({row}): below, frozenset({row, column}): both}
    return Value(dims, tails)


def _masked(proof: Proof, operand: int, source: Value, dim: int) -> Value:
    """An operand with -inf at the padded places of a dim, where the program can have it there: softmax then computes as
    without them, whatever a mask leaves over in a row. Padded rows have zeros before: a mask may leave nothing of them
    but padded places, and a softmax of -inf alone is no number, which no gradient of zero makes harmless.
    """
    if not source.dims[dim].first:
        return source
    masked = source.tails[frozenset({dim})] == -math.inf
    for row in source.dims:
        unknown = row != dim and source.tails[frozenset({row})] in (None, -math.inf)
        if unknown and source.dims[row].first and proof.fill(operand, row, 0.0):
            source, masked = _with_tail(source, row, 0.0), False
    if not masked and proof.fill(operand, dim, -math.inf):
        source = _with_tail(source, dim, -math.inf)
    return source


def _with_tail(source: Value, dim: int, value: float) -> Value:
    return replace(source, tails={r: value if dim in r else tail for r, tail in source.tails.items()}, index=None)


def _softmax(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    source = operands[0]
    dim = call.argument("dim") % len(call.shape(0))
    if dim not in source.dims:
        return proof.by_rule(call, operands)
    source = _masked(proof, 0, source, dim)
    if source.tails[frozenset({dim})] != -math.inf:
        proof.refuse("is a softmax over padded positions", "-inf at padded positions: a mask with masked_fill(-inf)")
    tails: dict[Region, float | None] = {}
    for region in subsets(source.dims):
        row = region - {dim}
        nothing = source.tails[row | {dim}] == -math.inf and bool(row) and source.tails[row] == -math.inf
        empty = 0.0 if call.target is aten._safe_softmax.default else math.nan
        masked = source.tails[region] == -math.inf and dim in region
        tails[region] = empty if nothing else 0.0 if masked else None
    return Value(source.dims, tails)


def _softmax_backward(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    grad, output = operands
    dim = call.argument("dim") % len(call.shape(0))
    if dim not in output.dims:
        return proof.by_rule(call, operands)
    if grad.dims != output.dims or output.tails[frozenset({dim})] != 0:
        proof.refuse("is a softmax over padded positions", "-inf at padded positions: a mask with masked_fill(-inf)")
    tails: dict[Region, float | None] = {}
    for region in subsets(output.dims):
        if any(no_number(operand.tails[region]) for operand in operands):
            proof.refuse("has rows of padded positions that are no number", ONE_POSITION)
        row = region - {dim}
        no_grad = bool(row) and grad.tails[row] == 0 and grad.tails[row | {dim}] == 0
        tails[region] = 0.0 if no_grad or (output.tails[region] == 0 and dim in region) else None
    return Value(output.dims, tails)


def _attention(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Attention, forward and backward, by the names of its arguments."""
    arguments = _by_name(call, operands)
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    places = call.shape(0)
    at = len(places) - 2
    query_dims, key_dims = query.dims, key.dims
    if set(query_dims) - {at} or set(key_dims) - {at} or key_dims != value.dims:
        proof.refuse("mixes padded positions with others")
    if proof.varies(call.argument("scale")):
        proof.refuse("computes with the padded length (scale)", NO_LENGTH)
    if call.argument("dropout_p", 0.0) != 0:
        proof.refuse("draws random numbers, other ones for another length", "attention without dropout")
    if key_dims:
        mask = arguments.get("attn_mask", arguments.get("attn_bias"))
        causal = bool(call.argument("is_causal", False)) and query_dims == key_dims and key_dims[at].first
        at_mask = next((s.positions[0] for s in call.slots if s.name in ("attn_mask", "attn_bias") and s.positions), -1)
        last = len(call.shape(at_mask)) - 1 if at_mask >= 0 else -1
        masked = False
        if mask is not None and last in mask.dims and not causal:
            mask = _masked(proof, at_mask, mask, last)
            masked = mask.tails[frozenset({last})] == -math.inf and mask.dims[last] == key_dims[at]
        if not causal and not masked:
            proof.refuse(
                "attends to padded positions",
                "is_causal=True, or a mask that is False (or -inf) at padded keys: attn_mask=mask[:, None, None, :]",
            )
        rows = frozenset(mask.dims) - {last} if mask is not None else frozenset[int]()
        if mask is not None and rows and mask.tails[rows] == mask.tails.get(rows | {last}) == -math.inf:
            proof.refuse("has rows of padded positions that are no number", ONE_POSITION)
    grad = arguments.get("grad_out", arguments.get("grad_out_"))
    if grad is None:
        flat = [Value()] * len(call.outputs)
        flat[0] = filled(query_dims, None)
        for i, tensor in enumerate(call.outputs[1:], 1):
            if tensor is not None and query_dims and any(proof.varies(n) for n in tensor.shape):
                flat[i] = filled({len(tensor.shape) - 1: query_dims[at]}, None)
        return put_back(meta.value(proof.node), iter(flat))
    if query_dims and (grad.dims != query_dims or grad.tails[frozenset({at})] != 0):
        proof.refuse("has gradients at padded positions that are not zero", "a loss that leaves padded positions out")
    zeros = [filled(dims, 0.0) for dims in (query_dims, key_dims, key_dims)]
    return put_back(meta.value(proof.node), iter([*zeros, *[SAME] * (len(call.outputs) - 3)]))


def _by_name(call: Call, operands: Sequence[Value]) -> dict[str, Value]:
    return {slot.name: operands[slot.positions[0]] for slot in call.slots if slot.positions}


def _loss(proof: Proof, call: Call, operands: Sequence[Value]) -> Made:
    """The loss of classes: padded positions are left out if their target is the class that it ignores."""
    arguments = _by_name(call, operands)
    scores, target = arguments["self"], arguments["target"]
    ignored = call.argument("ignore_index", -100)
    rows = {dim - (dim > 1): places for dim, places in scores.dims.items()}  # dim 1 are the classes
    if rows != target.dims or 1 in scores.dims:
        proof.refuse("mixes padded positions with others")
    if any(tail != ignored for tail in target.tails.values()):
        proof.refuse(
            "is a loss with padded positions", f"fill={{...: {ignored}}} for its targets: the loss ignores that class"
        )
    if "grad_output" in arguments:
        return filled(scores.dims, 0.0)
    each = filled(target.dims, 0.0) if call.argument("reduction", 1) == 0 else SAME
    return [each, SAME]


SPECIAL: dict[Any, Special] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), _regroup),
    aten.expand: _expanded,
    **dict.fromkeys(
        (aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros,
         aten.new_ones, aten.new_full, aten.empty, aten.empty_like, aten.new_empty), _factory,
    ),
    aten.arange: _counted,
    aten.slice.Tensor: padding_places.sliced,
    aten.slice_backward: padding_places.unsliced,
    aten.select.int: padding_places.selected,
    aten.select_backward: padding_places.unselected,
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), padding_places.written),
    aten.constant_pad_nd: padding_places.bordered,
    aten.index.Tensor: padding_places.indexed,
    aten.gather: padding_places.gathered,
    aten.cumsum: padding_places.summed_up,
    aten.cat: padding_places.joined,
    **dict.fromkeys((aten.tril, aten.triu), _triangle),
    **dict.fromkeys((aten._softmax, aten._safe_softmax), _softmax),
    aten._softmax_backward_data: _softmax_backward,
    **dict.fromkeys(
        (aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward), _loss
    ),
    **dict.fromkeys(
        (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
         aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
         aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
        _attention,
    ),
}  # fmt: skip
