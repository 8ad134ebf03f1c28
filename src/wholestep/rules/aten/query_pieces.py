"""Fused attention of a rank that has the queries [start, start + length), or several such ranges, and all keys.

Kernels mask by local index. So causal attention is two calls: to the keys before the piece, and causal to those at its
own places. Their results are merged by the logarithms of their sums; the backward of each takes what was merged. So are
the results for pieces of the keys, where a rank never has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from ... import _torch
from ...graph.op_kinds import packet_name
from ..dsl import called
from ..rule import COUNT_OPERANDS

_OF_QUERIES = ("query", "out", "grad_out", "grad_out_", "logsumexp")
_DROWNS = -64  # by a number further below, a mask rounds scores away: over the precision of the sums


@cache
def query_piece(op: Any) -> Callable[..., tuple[Any, ...]]:
    """What a rank calls in place of `op`, the forward or backward of fused attention to keys in dim -2."""
    run = _backward if packet_name(op).endswith("_backward") else _forward

    def of_queries(start: int | list[int], length: int | list[int], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return run(_Attention(op, args, kwargs), start, length)

    COUNT_OPERANDS.add(of_queries)
    return called(of_queries, op, "of_queries")


@cache
def key_piece(op: Any) -> Callable[..., tuple[Any, ...]]:
    """What a rank calls in place of `op` for one piece of the keys: its last `length` queries attend to them, of which
    `start` are in front of the first of these queries. `merged`: what calls for other pieces have returned, output and
    sums, or the gradient of the queries, in single precision at least. `keys`: how many are seen, the first ones.
    `most`: the largest number of each row of a mask of which the call has the columns of this piece.
    """
    run = _gradients_of_keys if packet_name(op).endswith("_backward") else _merged_with_keys

    def of_keys(
        start: int, length: int, *args: Any, merged: Sequence[Tensor] = (), keys: int | None = None,
        most: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        call = _Attention(op, args, kwargs)
        hidden = 0 if keys is None else call["key"].shape[2] - keys
        near = call.changed(**{name: call[name][:, :, :keys] for name in ("key", "value")}) if hidden else call
        wide = None if most is None else most.to(torch.promote_types(most.dtype, torch.float32))
        first, *others = run(near, start, length, merged, wide)
        if run is _gradients_of_keys and hidden:
            others = [torch.nn.functional.pad(gradient, (0, 0, 0, hidden)) for gradient in others]
        return first.to(torch.promote_types(first.dtype, torch.float32)), *others

    COUNT_OPERANDS.add(of_keys)
    return called(of_keys, op, "of_keys")


class _Attention:
    """A call of an attention op, by the names of its arguments."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs

    def __getitem__(self, name: str) -> Any:
        place = _torch.position_of(self.op, name)
        return self.args[place] if place is not None and place < len(self.args) else self.kwargs.get(name)

    def changed(self, **changed: Any) -> _Attention:
        """The call with some arguments changed, of those that it has."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            place = _torch.position_of(self.op, name)
            if place is not None and place < len(args):
                args[place] = value
            elif name in kwargs:
                kwargs[name] = value
        return _Attention(self.op, args, kwargs)

    def __call__(self, **changed: Any) -> tuple[Any, ...]:
        """Call the op with some arguments changed."""
        call = self.changed(**changed)
        return self.op(*call.args, **call.kwargs)

    def ranges(self, start: Any, length: Any) -> Iterator[tuple[int, _Attention]]:
        """Where each range of the queries starts, and the call on it; on a place of zeros where there is none."""
        if not isinstance(start, list):
            yield start, self
            return
        ends: list[int] = list(accumulate(length))
        for first, begin, end in zip(cast("list[int]", start), [0, *ends], ends, strict=False):
            if begin < end:
                yield first, self.of_queries(begin, end)
        if not ends[-1]:
            yield start[0], self.on_zeros(*_OF_QUERIES)

    def of_queries(self, begin: int, end: int) -> _Attention:
        """The call on some of the queries."""
        kept = [name for name in _OF_QUERIES if self[name] is not None]
        return self.changed(**{name: self[name][:, :, begin:end] for name in kept})

    def on_zeros(self, *names: str) -> _Attention:
        """The call on one place of zeros."""
        kept = {name: self[name] for name in names if self[name] is not None}
        zeros = {n: t.new_zeros((*t.shape[:2], 1, *t.shape[3:])) for n, t in kept.items()}
        return self.changed(**zeros, attn_mask=None, attn_bias=None)

    def parts(self, start: int) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """The results for each range of keys that a piece of the queries attends to."""
        key, value, causal = self["key"], self["value"], bool(self["is_causal"])
        length, count = self["query"].shape[-2], key.shape[-2]
        middle = min(start, count) if causal else count
        for first, end in ((0, middle), (middle, min(start + length, count))):
            if first < end:
                keys, values = key.narrow(-2, first, end - first), value.narrow(-2, first, end - first)
                own = {"is_causal": causal and first == middle, "compute_log_sumexp": True}
                yield first, end, self(key=keys, value=values, max_q=length, max_k=end - first, **own)


def _forward(call: _Attention, start: Any, length: Any) -> tuple[Any, ...]:
    query = call["query"]
    results = [_merged_with_keys(part, first, part["query"].shape[2]) for first, part in call.ranges(start, length)]
    out, sums = results[0][:2] if len(results) == 1 else (torch.cat([r[place] for r in results], 2) for place in (0, 1))
    return (out[:, :, : query.shape[2]].to(query.dtype), sums[:, :, : query.shape[2]], *results[-1][2:])


def _backward(call: _Attention, start: Any, length: Any) -> tuple[Any, ...]:
    key, value, queries = torch.zeros_like(call["key"]), torch.zeros_like(call["value"]), list[Tensor]()
    others: Sequence[Any] = ()
    for begin, part in call.ranges(start, length):
        put = Tensor.add_ if queries else Tensor.copy_
        queries.append(torch.zeros_like(part["query"]))
        for first, end, gradients in part.parts(begin):
            of_query, of_key, of_value, *others = gradients
            queries[-1] += of_query
            put(key.narrow(-2, first, end - first), of_key)
            put(value.narrow(-2, first, end - first), of_value)
            del gradients, of_query, of_key, of_value  # they would be held beside those of the next part
    query = queries[0] if len(queries) == 1 else torch.cat(queries, 2)
    return (query[:, :, : call["query"].shape[2]], key, value, *others)


def _merged_with_keys(
    call: _Attention, start: int, length: int, merged: Sequence[Tensor] = (), most: Tensor | None = None
) -> tuple[Any, ...]:
    query, count = call["query"], call["query"].shape[2]
    parts = [part for *_, part in call.of_queries(count - length, count).parts(start)] if length else []
    parts = [_by_mask(call, part, most) for part in parts] if most is not None else parts
    out, sums, *others = parts[0] if parts else next(call.on_zeros("query", "key", "value").parts(0))[2]
    if merged:
        out, sums = (tensor.clone() for tensor in merged)
    elif parts and length == count:
        out, parts = out.to(sums.dtype) if parts[1:] else out, parts[1:]
    else:
        shape = (out.shape[0], count, out.shape[1], out.shape[3])
        out = torch.zeros(shape, dtype=sums.dtype, device=query.device).transpose(1, 2)
        sums = sums.new_full((*sums.shape[:2], count, *sums.shape[3:]), -torch.inf)
    here, logs = out[:, :, count - length :], sums[:, :, count - length :]
    for part, sums_of_part, *_ in parts:
        total = torch.logaddexp(logs, sums_of_part)
        all_seen = total.clamp(min=torch.finfo(total.dtype).min)  # less -inf, -inf would be no number
        before, after = ((log - all_seen).exp().reshape((*here.shape[:3], 1)) for log in (logs, sums_of_part))
        here.mul_(before).add_(after * part)
        logs.copy_(total)
    return (out, sums, *others)


def _by_mask(call: _Attention, part: tuple[Any, ...], most: Tensor) -> tuple[Any, ...]:
    """Results of a call with some columns of a mask, with the logarithms of the sums that merge exactly. Of rows that
    see none of these keys, kernels return any number. Where a row has large negative numbers alone, as `finfo.min`,
    scores are rounded away beside them, and the keys with the largest count alike.
    """
    mask, (out, sums, *others) = call["attn_bias"] if call["attn_mask"] is None else call["attn_mask"], part
    lowest, drowned = torch.finfo(mask.dtype).min, most < _DROWNS / torch.finfo(sums.dtype).eps
    keys = (mask < torch.where(drowned, most, lowest).clamp(min=lowest)).logical_not().sum(-1, keepdim=True)
    logs = torch.where(drowned | (keys == 0), keys.to(sums.dtype).log(), sums.reshape(*out.shape[:3], 1))
    return (out.masked_fill(keys == 0, 0), logs.reshape(sums.shape), *others)


def _gradients_of_keys(
    call: _Attention, start: int, length: int, merged: Sequence[Tensor], most: Tensor | None
) -> tuple[Any, ...]:
    count, sums = call["query"].shape[2], call["logsumexp"]
    of_queries = merged[0].clone() if merged else torch.zeros_like(call["query"], dtype=sums.dtype)
    if not length:
        return of_queries, torch.zeros_like(call["key"]), torch.zeros_like(call["value"])
    if most is not None:  # as one call returns them
        drowned = most < _DROWNS / torch.finfo(sums.dtype).eps
        logs = most.nan_to_num(neginf=0).where(drowned, sums.reshape(*sums.shape[:3], 1))
        call = call.changed(logsumexp=logs.to(sums.dtype).reshape(sums.shape))
    of_some, *of_keys = _backward(call.of_queries(count - length, count), start, length)
    of_queries[:, :, count - length :] += of_some
    return of_queries, *of_keys[:2]
