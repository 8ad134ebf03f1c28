"""Ops whose result's size depends on values, in forms of fixed size: a known count, or the most there can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..graph.ops import CTC_LOSS

aten = torch.ops.aten
Count = Callable[[Tensor], "int | None"]


def fixed_sizes(count: Count) -> dict[Any, Callable[..., Any]]:
    """A table for the tracer; `count` gives the number of elements set in a mask, or None where that is not known."""

    def nonzero(x: Tensor) -> Any:
        return _places(x, count)

    def masked_select(x: Tensor, mask: Tensor) -> Any:
        both = cast("list[Tensor]", torch.broadcast_tensors(x, mask))
        at = _places(both[1], count)
        return NotImplemented if at is NotImplemented else both[0][at.unbind(1)]

    def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
        if not any(_is_mask(i) for i in indices):
            return NotImplemented
        found: list[Tensor | None] = []
        for i in indices:
            at = _places(i, count) if i is not None and _is_mask(i) else None
            if at is NotImplemented:
                return NotImplemented
            found += [i] if at is None else at.unbind(1)
        return aten.index.Tensor(x, found)

    return {
        aten.nonzero.default: nonzero,
        aten.masked_select.default: masked_select,
        aten.index.Tensor: index,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss.default: _ctc_loss,
    }


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _places(mask: Tensor, count: Count) -> Any:
    found = count(mask != 0)
    return NotImplemented if found is None else torch.nonzero_static(mask, size=found)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> Any:
    return CTC_LOSS(log_probs, targets, _long(inputs), _long(lengths), blank, zero_infinity)


def _long(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
