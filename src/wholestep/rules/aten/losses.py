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
from ..dsl import WHOLE, aten, called, ints, rand, row, sample, text
from ..registry import Bind

NONE, MEAN, SUM = 0, 1, 2
_OUTSIDE = -100


# -- negative log likelihood -----------------------------------------------------------------
def _classes(call: Call, operand: int) -> tuple[list[str], list[str]]:
    """Dims of the scores and of the targets: batch, classes, positions."""
    ndim = len(call.shape(operand))
    places = [f"s{i}" for i in range(ndim - 2)]
    return (["n", "c", *places], ["n", *places]) if ndim > 1 else (["c"], [])


def _near(target: Tensor, start: int, length: int, ignored: int) -> Tensor:
    inside = (target >= start) & (target < start + length) & (target != ignored)
    return torch.where(inside, target - start, _OUTSIDE)


def _padded(scores: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add a class if the rank has none, which losses refuse."""
    dim = min(1, scores.dim() - 1)
    if scores.shape[dim]:
        return scores, weight
    shape = [*scores.shape[:dim], 1, *scores.shape[dim + 1 :]]
    return scores.new_zeros(shape), None if weight is None else weight.new_zeros(1)


def _forward_piece(op: Any) -> Any:
    def run(
        start: int, length: int, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
    ) -> Any:
        scores, weight = _padded(scores, weight)
        return op(scores, _near(target, start, length, ignored), weight, reduction, _OUTSIDE)

    return called(run, op, "in_piece")


def _backward_piece(op: Any) -> Any:
    def run(
        start: int, length: int, grad: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
        ignored: int, total: Tensor,
    ) -> Tensor:  # fmt: skip
        more, weight = _padded(scores, weight)
        made = op(grad, more, _near(target, start, length, ignored), weight, reduction, _OUTSIDE, total)
        return made.narrow(min(1, made.dim() - 1), 0, length)

    return called(run, op, "in_piece")


def _labels(high: int, *shape: int) -> Tensor:
    """Targets of which one is ignored."""
    out = ints(high, *shape)
    out.view(-1)[0] = 3
    return out


def _nll() -> Iterator[tuple[Any, ...]]:
    for reduction in (NONE, SUM, MEAN):
        yield rand(5, 7), _labels(7, 5), rand(7, seed=1).abs(), reduction, 3
    yield rand(5, 3), ints(3, 5), None, SUM, -100


def _nll2d() -> Iterator[tuple[Any, ...]]:
    for reduction in (NONE, SUM, MEAN):
        yield rand(5, 7, 3, 4), _labels(7, 5, 3, 4), rand(7, seed=1).abs(), reduction, 3


@row("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: Call) -> Bind:
    """(log probabilities, targets, class weights) -> loss, weight of all targets."""
    scores, targets = _classes(call, 0)
    if call.argument("reduction") == MEAN:
        scores, targets = [f"{d}!" for d in scores], [f"{d}!" for d in targets]
    classes = next(d for d in scores if d.startswith("c"))
    made = " ".join(targets) if call.argument("reduction") == NONE else ""
    inputs = [" ".join(scores), " ".join(targets) or "()", classes]
    return Bind(text(inputs, [made or "()", "()"]), local={"c": _forward_piece(call.target)})


def _nll_gradients(forward: Any, samples: Any) -> Iterator[tuple[Any, ...]]:
    for scores, target, weight, reduction, ignored in samples():
        loss, total = forward(scores, target, weight, reduction, ignored)
        yield rand(*loss.shape, seed=2), scores, target, weight, reduction, ignored, total


@row("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Bind:
    """The total weight is an operand, so the batch may be sharded with any reduction."""
    scores, targets = _classes(call, 1)
    grad = " ".join(targets) if call.argument("reduction") == NONE else ""
    inputs = [grad or "()", " ".join(scores), " ".join(targets) or "()", "c", "()"]
    return Bind(text(inputs, [" ".join(scores)]), "0", local={"c": _backward_piece(call.target)})


sample("nll_loss_forward", _nll)
sample("nll_loss2d_forward", _nll2d)
sample("nll_loss_backward", lambda: _nll_gradients(aten.nll_loss_forward, _nll))
sample("nll_loss2d_backward", lambda: _nll_gradients(aten.nll_loss2d_forward, _nll2d))


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


def _pairs(*weights: int, **more: float) -> Callable[[], Iterator[tuple[Any, ...]]]:
    """Samples for every reduction, with a weight for each of `weights` (None for 0) and further arguments."""

    def samples() -> Iterator[tuple[Any, ...]]:
        for reduction in (NONE, SUM, MEAN):
            given = [rand(n, seed=3).abs() if n else None for n in weights]
            yield rand(5, 7).sigmoid(), rand(5, 7, seed=1).sigmoid(), *given, reduction, *more.values()

    return samples


def _pair_gradients(*weights: int, **more: float) -> Callable[[], Iterator[tuple[Any, ...]]]:
    def samples() -> Iterator[tuple[Any, ...]]:
        for given in _pairs(*weights, **more)():
            none = given[2 + len(weights)] == NONE
            yield rand(*((5, 7) if none else ()), seed=2), *given
            if not none:
                yield rand(1, 1, seed=2), *given

    return samples


sample("mse_loss soft_margin_loss", _pairs())
sample("mse_loss_backward soft_margin_loss_backward", _pair_gradients())
sample("smooth_l1_loss huber_loss", _pairs(delta=0.5))
sample("smooth_l1_loss_backward huber_loss_backward", _pair_gradients(delta=0.5))
sample("binary_cross_entropy", _pairs(7))
sample("binary_cross_entropy_backward", _pair_gradients(7))
sample("binary_cross_entropy_with_logits", _pairs(0, 7))


# -- margins: rows of scores --------------------------------------------------------------------
def _margins(multi: bool) -> Iterator[tuple[Any, ...]]:
    for reduction in (NONE, SUM, MEAN):
        if multi:
            yield rand(5, 7), torch.where(rand(5, 7) > 0, ints(7, 5, 7), -1), reduction
        else:
            yield rand(5, 7), ints(7, 5), 1, 1.0, rand(7).abs(), reduction


def _margin_gradients(multi: bool) -> Iterator[tuple[Any, ...]]:
    for given in _margins(multi):
        more: list[Any] = []
        if multi:
            more = [aten.multilabel_margin_loss_forward(*given)[1]]
        yield rand(*((5,) if given[-1] == NONE else ()), seed=2), *given, *more


row(
    "multi_margin_loss",
    f"reduction=1: n! c!, n!, c! -> () | reduction=0: n c!, n, c! -> n | n c!, n, c! -> () | {WHOLE}",
    filled=["n"],  # torch leaves the sum of no rows unwritten
    samples=lambda: _margins(False),
)
row(
    "multilabel_margin_loss_forward",
    f"reduction=1: n! c!, n! c! -> (), n! c! | reduction=0: n c!, n c! -> n, n c! | n c!, n c! -> (), n c! | {WHOLE}",
    filled=["n"],
    samples=lambda: _margins(True),
)
row(
    "multi_margin_loss_backward",
    "reduction=1: (), n! c!, n!, c! -> n! c! | reduction=0: n, n c!, n, c! -> n c! | (), n c!, n, c! -> n c!"
    f" | {WHOLE}",
    linear="0",
    samples=lambda: _margin_gradients(False),
)
row(
    "multilabel_margin_loss_backward",
    f"reduction=1: (), n! c!+ -> n! c! | reduction=0: n, n c!+ -> n c! | (), n c!+ -> n c! | {WHOLE}",
    linear="0",
    samples=lambda: _margin_gradients(True),
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
