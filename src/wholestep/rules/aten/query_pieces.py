"""Fused attention of a rank that has the queries [start, start + length), or several such ranges, and all keys.

Kernels mask by local index. So causal attention is two calls: to the keys before the piece, and causal to those at its
own places. Their results are merged by the logarithms of their sums; the backward of each takes what was merged.
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


@cache
def query_piece(op: Any) -> Callable[..., tuple[Any, ...]]:
    """What a rank calls in place of `op`, the forward or backward of fused attention to keys in dim -2."""
    run = _backward if packet_name(op).endswith("_backward") else _forward

    def of_queries(start: int | list[int], length: int | list[int], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return run(_Attention(op, args, kwargs), start, length)

    COUNT_OPERANDS.add(of_queries)
    return called(of_queries, op, "of_queries")


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
        kept = [name for name in _OF_QUERIES if self[name] is not None]
        for first, begin, end in zip(cast("list[int]", start), [0, *ends], ends, strict=False):
            if begin < end:
                yield first, self.changed(**{name: self[name][:, :, begin:end] for name in kept})
        if not ends[-1]:
            yield start[0], self.changed(**{n: (t := self[n]).new_zeros((*t.shape[:2], 1, *t.shape[3:])) for n in kept})

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
    results = [_merged(part, first) for first, part in call.ranges(start, length)]
    if not isinstance(length, list):
        return results[0]
    rows = call["query"].shape[2]
    joined = (torch.cat([returned[place] for returned in results], 2)[:, :, :rows] for place in (0, 1))
    return (*joined, *results[-1][2:])


def _merged(call: _Attention, start: int) -> tuple[Any, ...]:
    results = [returned for *_, returned in call.parts(start)]
    out, sums, *others = cast("tuple[Tensor, Tensor, *tuple[Any, ...]]", results[-1])
    if len(results) == 1:
        return (out, sums, *others)
    length = out.shape[-2]  # some kernels return more sums
    logs = [returned[1].narrow(2, 0, length) for returned in results]
    total = torch.logaddexp(*logs)
    weights = [(log - total).exp().reshape(out.shape[:-1]).unsqueeze(-1) for log in logs]
    merged = weights[0] * results[0][0] + weights[1] * out
    sums.narrow(2, 0, length).copy_(total)
    return (merged.to(out.dtype), sums, *others)


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
    query = queries[0] if len(queries) == 1 else torch.cat(queries, 2)
    return (query[:, :, : call["query"].shape[2]], key, value, *others)
