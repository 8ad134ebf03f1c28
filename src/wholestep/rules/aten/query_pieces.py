"""Fused attention of a rank that has the queries [start, start + length) and all keys.

Kernels mask by local index. So causal attention is two calls: to the keys before the piece, and causal to those at its
own places. Their results are merged by the logarithms of their sums; the backward of each takes what was merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ... import _torch
from ...graph.op_kinds import packet_name
from ..dsl import called
from ..rule import COUNT_OPERANDS


@cache
def query_piece(op: Any) -> Callable[..., tuple[Any, ...]]:
    """What a rank calls in place of `op`, the forward or backward of fused attention to keys in dim -2."""
    run = _backward if packet_name(op).endswith("_backward") else _forward

    def of_queries(start: int, length: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return run(_Attention(op, args, kwargs), start)

    COUNT_OPERANDS.add(of_queries)
    return called(of_queries, op, "of_queries")


class _Attention:
    """A call of an attention op, by the names of its arguments."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs

    def __getitem__(self, name: str) -> Any:
        place = _torch.position_of(self.op, name)
        return self.args[place] if place is not None and place < len(self.args) else self.kwargs.get(name)

    def __call__(self, **changed: Any) -> tuple[Any, ...]:
        """Call the op with some arguments changed, of those that it has."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            place = _torch.position_of(self.op, name)
            if place is not None and place < len(args):
                args[place] = value
            elif name in kwargs:
                kwargs[name] = value
        return self.op(*args, **kwargs)

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


def _forward(call: _Attention, start: int) -> tuple[Any, ...]:
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


def _backward(call: _Attention, start: int) -> tuple[Any, ...]:
    query, key, value = (torch.zeros_like(call[name]) for name in ("query", "key", "value"))
    others: Sequence[Any] = ()
    for first, end, gradients in call.parts(start):
        of_query, of_key, of_value, *others = gradients
        query += of_query
        key.narrow(-2, first, end - first).copy_(of_key)
        value.narrow(-2, first, end - first).copy_(of_value)
    return (query, key, value, *others)
