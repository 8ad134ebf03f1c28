"""Static-shape forms of ops whose result size depends on values: the size comes from integers of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import _torch
from ..graph.ops import CTC_LOSS

aten = torch.ops.aten
Known = Callable[[Tensor], "Tensor | None"]


def fixed_sizes(known: Known) -> dict[Any, Callable[..., Any]]:
    """Return a table of op -> form for the tracer; `known` gives the real value of a traced tensor, or None."""

    def read(x: Tensor) -> Any:
        value = known(x) if _torch.is_fake(x) else None
        if value is None:
            return NotImplemented
        with _torch.outside_of_trace():
            return value.item()

    def nonzero(x: Tensor) -> Any:
        return _nonzero(x, known)

    def masked_select(x: Tensor, mask: Tensor) -> Any:
        both = cast("list[Tensor]", torch.broadcast_tensors(x, mask))
        positions = _nonzero(both[1], known)
        return NotImplemented if positions is NotImplemented else both[0][positions.unbind(1)]

    def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
        if not any(_is_mask(i) for i in indices):
            return NotImplemented
        found: list[Tensor | None] = []
        for i in indices:
            positions = _nonzero(i, known) if i is not None and _is_mask(i) else None
            if positions is NotImplemented:
                return NotImplemented
            found += [i] if positions is None else positions.unbind(1)
        return aten.index.Tensor(x, found)

    return {
        aten._local_scalar_dense.default: read,
        aten.nonzero.default: nonzero,
        aten.masked_select.default: masked_select,
        aten.index.Tensor: index,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss.default: _ctc_loss,
    }


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _nonzero(mask: Tensor, known: Known) -> Any:
    total = known((mask != 0).sum())
    with _torch.outside_of_trace():
        count = None if total is None else int(total)
    return NotImplemented if count is None else torch.nonzero_static(mask, size=count)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> Any:
    return CTC_LOSS(log_probs, targets, _long(inputs), _long(lengths), blank, zero_infinity)


def _long(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
