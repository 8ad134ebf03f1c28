"""Convolutions, forward and backward: rows may be cut, and channels where groups do not mix with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .call import Call
from .registry import Bind, rule
from .terms import aten, ops, rand, text

_FILLED = frozenset("iog")


def _channels(call: Call, inputs: int, weight: int) -> tuple[str, str, str, str, bool]:
    """Channel terms of input, output and weight (two), and whether every channel is a group of its own."""
    groups, shape = int(call.argument("groups")), call.shape(weight)
    transposed = bool(call.argument("transposed", False))
    if groups == 1:
        return ("i", "o", "i", "o", False) if transposed else ("i", "o", "o", "i", False)
    if shape[1] == 1 and groups == call.shape(inputs)[1] == shape[0]:
        return "g", "g", "g", "1", True
    return "i!", "o!", "i!" if transposed else "o!", "q!", False


def _places(call: Call, operand: int, letter: str) -> str:
    return "".join(f" {letter}{i}!" for i in range(len(call.shape(operand)) - 2))


@rule(ops("convolution"), samples=lambda: _samples())
def convolution(call: Call) -> Bind:
    """(input, weight, bias): a bias must be added once, so with one a cut sum over input channels needs it whole."""
    i, o, w0, w1, alone = _channels(call, 0, 1)
    if call.slots[2].positions and i == "i":
        i, w0, w1 = "i!", *(f"{w}!" if w == "i" else w for w in (w0, w1))
    size = _places(call, 0, "s")
    given = [f"n {i}{size}", f"{w0} {w1}{_places(call, 1, 'k')}", o]
    made = "".join(f" t{k}" for k in range(size.count("!")))
    linear = "" if call.slots[2].positions else "0 | 1"
    return Bind(text(given, [f"n {o}{made}"]), linear, sizes={"groups": "g"} if alone else {}, filled=_FILLED)


@rule(aten.convolution_backward.default, samples=lambda: _gradients())
def convolution_backward(call: Call) -> Bind:
    """Gradients of input, weight and bias; that of the bias knows nothing of input channels."""
    i, o, w0, w1, alone = _channels(call, 1, 2)
    grad, full = f"n {o}{_places(call, 0, 't')}", f"n {i}{_places(call, 1, 's')}"
    weight = f"{w0} {w1}{_places(call, 2, 'k')}"
    sizes = {"groups": "g"} if alone else {}
    biased = len(call.outputs) > 2 and call.outputs[2] is not None
    if biased and call.argument("bias_sizes") is not None:
        sizes["bias_sizes"] = "out2"
    same = {"i": ""} if i == "i" and biased else {}
    return Bind(text([grad, full, weight], [full, weight, o]), "0", same, sizes, filled=_FILLED)


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
