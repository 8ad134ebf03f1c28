"""Losses, forward and backward.

Without a reduction and with sums, the batch may be sharded; a mean divides by the total count, so its operands stay
whole. A class dim may be sharded for sums: each rank counts the targets in its piece and ignores the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...graph.ops import CTC_LOSS
from ..call import Call
from ..dsl import WHOLE, aten, called, ints, rand, row, sample
from ..registry import Bind
from ..rule import OF_WHOLE

NONE, MEAN, SUM = 0, 1, 2
_OUTSIDE = -100


# -- negative log likelihood -----------------------------------------------------------------
def _near(target: Tensor, start: int, length: int, size: int, ignored: int) -> Tensor:
    """Classes as positions in this rank's piece; those that are no class become `length + 1`, at which losses raise."""
    inside = (target >= start) & (target < start + length) & (target != ignored)
    elsewhere = torch.where(((target >= 0) & (target < size)) | (target == ignored), _OUTSIDE, length + 1)
    return torch.where(inside, target - start, elsewhere)


def _padded(scores: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add a class if the rank has none, which losses refuse."""
    dim = min(1, scores.dim() - 1)
    if scores.shape[dim]:
        return scores, weight
    shape = [*scores.shape[:dim], 1, *scores.shape[dim + 1 :]]
    return scores.new_zeros(shape), None if weight is None else weight.new_zeros(1)


def _in_piece(op: Any, grads: int) -> Callable[..., Any]:
    """`op` on this rank's piece of the classes; `grads` operands stand before the scores."""

    def run(start: int, length: int, size: int, *args: Any) -> Any:
        scores, target, weight, reduction, ignored, *total = args[grads:]
        scores, weight = _padded(scores, weight)
        near = _near(target, start, length, size, ignored)
        values = op(*args[:grads], scores, near, weight, reduction, _OUTSIDE, *total)
        return values.narrow(min(1, values.dim() - 1), 0, length) if grads else values

    OF_WHOLE.add(run)
    return called(run, op, "in_piece")


# (log probabilities, targets, class weights) -> loss, weight of all targets. That weight is an operand of the backward,
# so the batch may be sharded with any reduction.
for _op, _back in (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
):
    row(
        _op,
        "reduction=1: n! c! s...!, n! s...!, c! -> (), () | reduction=0: n c s..., n s..., c -> n s..., ()"
        " | n c s..., n s..., c -> (), () | reduction=1: c!, (), c! -> (), () | c, (), c -> (), ()",
        local={"c": _in_piece(_op, 0)},
    )
    row(
        _back,
        "reduction=0: n s..., n c s..., n s..., c, () -> n c s... | (), n c s..., n s..., c, () -> n c s..."
        " | (), c, (), c, () -> c",
        linear="0",
        local={"c": _in_piece(_back, 1)},
    )


# -- losses of each element, their sum or their mean --------------------------------------------
row(
    "mse_loss soft_margin_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
    "reduction=0: ...+ -> ... | reduction=2: ...+ -> () | ...!+ -> ()",
)


@row(
    "mse_loss_backward soft_margin_loss_backward smooth_l1_loss_backward huber_loss_backward"
    " binary_cross_entropy_backward"
)
def each_backward(call: Call) -> Bind:
    """The gradient of a pointwise loss; that of a reduced loss is one number, with any number of dims."""
    kind = call.argument("reduction", MEAN)
    if kind != NONE and call.operands[0].numel != 1:
        return Bind(WHOLE)
    grad = "..." if kind == NONE else " ".join("1" for _ in call.shape(0)) or "()"
    return Bind(f"{grad}, ...!+ -> ...!" if kind == MEAN else f"{grad}, ...+ -> ...", "0")


def _pairs(*options: float) -> Iterator[tuple[Any, ...]]:
    for reduction in (NONE, SUM, MEAN):
        yield rand(5, 7), rand(5, 7, seed=1), reduction, *options


sample("mse_loss soft_margin_loss", _pairs)
sample("smooth_l1_loss", lambda: _pairs(0.5))
sample("mse_loss_backward", lambda: [(rand(1, 1), rand(5, 7), rand(5, 7, seed=1), r) for r in (SUM, MEAN)])

# -- margins: rows of scores --------------------------------------------------------------------
row(
    "multi_margin_loss",
    f"reduction=1: n! c!, n!, c! -> () | reduction=0: n c!, n, c! -> n | n c!, n, c! -> () | {WHOLE}",
    filled=["n"],  # torch leaves the sum of no rows unwritten
)
row(
    "multilabel_margin_loss_forward",
    f"reduction=1: n! c!, n! c! -> (), n! c! | reduction=0: n c!, n c! -> n, n c! | n c!, n c! -> (), n c! | {WHOLE}",
    filled=["n"],
)
row(
    "multi_margin_loss_backward",
    "reduction=1: (), n! c!, n!, c! -> n! c! | reduction=0: n, n c!, n, c! -> n c! | (), n c!, n, c! -> n c!"
    f" | {WHOLE}",
    linear="0",
)
row(
    "multilabel_margin_loss_backward",
    f"reduction=1: (), n! c!+ -> n! c! | reduction=0: n, n c!+ -> n c! | (), n c!+ -> n c! | {WHOLE}",
    linear="0",
)


# -- connectionist temporal classification ----------------------------------------------------------
def _ctc() -> Iterator[tuple[Any, ...]]:
    """Rows of full length: ops leave values past the end of a row unset."""
    inputs, lengths = torch.full((5,), 6), torch.full((5,), 2)
    yield rand(6, 5, 4).log_softmax(-1), ints(3, 5, 2) + 1, inputs, lengths, 0, False


def _ctc_gradients() -> Iterator[tuple[Any, ...]]:
    for probs, targets, inputs, lengths, blank, infinity in _ctc():
        loss, alpha = CTC_LOSS(probs, targets, inputs, lengths, blank, infinity)
        yield rand(5), probs, targets, inputs, lengths, loss, alpha, blank, infinity


# Rows of targets, each padded to one length; end to end they stay whole.
row(CTC_LOSS, f"t! n c!, n s!, n, n -> n, n t! a | {WHOLE}", filled=["n"], samples=_ctc)
row(
    "_ctc_loss_backward.Tensor", f"n, t! n c!, n s!, n, n, n, n t! a! -> t! n c! | {WHOLE}", linear="0", filled=["n"],
    samples=_ctc_gradients,
)  # fmt: skip
