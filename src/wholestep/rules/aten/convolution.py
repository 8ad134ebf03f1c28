"""Convolutions, forward and backward: the batch may be sharded, and channels unless groups share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..call import Call
from ..dsl import aten, rand, row, sample
from ..registry import Bind

_FILLED = frozenset("iog")


def _channels(call: Call, inputs: int, weight: int) -> tuple[str, str, str, bool]:
    """Channel terms of input, output and weight, and whether every channel is a separate group."""
    groups, shape = int(call.argument("groups")), call.shape(weight)
    transposed = bool(call.argument("transposed", False))
    if groups == 1:
        return "i", "o", "i o" if transposed else "o i", False
    if shape[1] == 1 and groups == call.shape(inputs)[1] == shape[0]:
        return "g", "g", "g 1", True
    return "i!", "o!", "i! q!" if transposed else "o! q!", False


@row("convolution")
def convolution(call: Call) -> Bind:
    """(input, weight, bias): with a bias, which must be added once, input channels stay whole."""
    i, o, weight, alone = _channels(call, 0, 1)
    biased = bool(call.slots[2].positions)
    i += "!" if biased and i == "i" else ""
    rule = f"n {i} s...!, {weight} k...!, {o} -> n {o} t..."
    return Bind(rule, "" if biased else "0 | 1", sizes={"groups": "g"} if alone else {}, filled=_FILLED)


@row("convolution_backward")
def convolution_backward(call: Call) -> Bind:
    """Gradients of input, weight and bias; that of the bias does not depend on input channels."""
    i, o, weight, alone = _channels(call, 1, 2)
    sizes = {"groups": "g"} if alone else {}
    biased = len(call.outputs) > 2 and call.outputs[2] is not None
    if biased and call.argument("bias_sizes") is not None:
        sizes["bias_sizes"] = "out2"
    same = {"i": ""} if i == "i" and biased else {}
    full, weight = f"n {i} s...!", f"{weight} k...!"
    return Bind(
        f"n {o} t...!, {full}, {weight} -> {full}, {weight}, {o}", "0", reduces=same, sizes=sizes, filled=_FILLED
    )


# -- samples --------------------------------------------------------------------------------
def _calls() -> Iterator[tuple[Tensor, Tensor, Tensor | None, list[Any]]]:
    """Input, weight, bias; stride, padding, dilation, transposed, output padding, groups."""
    one, two, zero = [1], [2], [0]
    yield rand(5, 3, 6), rand(4, 3, 3), None, [one, one, one, False, zero, 1]
    yield rand(5, 3, 6), rand(4, 3, 3), rand(4), [two, zero, one, False, zero, 1]
    yield rand(5, 3, 6), rand(3, 4, 3), None, [two, zero, one, True, zero, 1]
    yield rand(5, 4, 6), rand(4, 1, 3), rand(4), [one, one, one, False, zero, 4]
    yield rand(5, 4, 6), rand(6, 2, 3), rand(6), [one, one, one, False, zero, 2]
    yield rand(5, 4, 6), rand(4, 3, 3), rand(6), [one, one, one, True, zero, 2]
    yield rand(5, 3, 4, 5), rand(4, 3, 3, 2), rand(4), [[1, 1], [1, 0], [1, 1], False, [0, 0], 1]


def _samples() -> Iterator[tuple[Any, ...]]:
    for x, weight, bias, options in _calls():
        yield x, weight, bias, *options


def _gradients() -> Iterator[tuple[Any, ...]]:
    for x, weight, bias, options in _calls():
        made = aten.convolution(x, weight, bias, *options)
        sizes = None if bias is None else list(bias.shape)
        yield rand(*made.shape, seed=3), x, weight, sizes, *options, [True, True, bias is not None]


sample("convolution", _samples)
sample("convolution_backward", _gradients)
