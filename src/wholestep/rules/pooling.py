"""Pooling, resampling and padding of planes: rows and channels may be cut, places stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .call import Call
from .registry import Bind, rule
from .rule import BoundRule
from .terms import aten, moves, ops, rand, text

_FILLED = frozenset("c")
_LEADING = frozenset({".1", ".2"})


def _spatial(call: Call) -> int:
    """How many dims of places: the number in the op's name."""
    name = str(call.target._overloadpacket.__name__)
    return next(int(digit) for digit in "123" if f"{digit}d" in name)


def _plane(call: Call, letter: str) -> str:
    """Rows, channels and places; rows are missing in a single plane."""
    count = _spatial(call)
    lead = ["n", "c"][2 - (len(call.made()) - count) :]
    return " ".join([*lead, *(f"{letter}{i}!" for i in range(count))])


def forward(call: Call) -> Bind:
    """(plane) -> a plane of another size, and where its values come from."""
    linear = "" if "max" in str(call.target) else "0"
    made = [_plane(call, "t")] * len(call.outputs)
    return Bind(text([_plane(call, "s")], made), linear, filled=_FILLED)


def backward(call: Call) -> Bind:
    """(gradient, input, indices) -> gradient of the input."""
    terms = [_plane(call, "s" if slot.name == "self" else "t") for slot in call.slots]
    sizes = {} if call.argument("input_size") is None else {"input_size": "out0"}
    return Bind(text(terms, [_plane(call, "s")]), "0", sizes=sizes, filled=_FILLED)


# -- pooling ------------------------------------------------------------------------------
_PLANE = (2, 5, 6, 7)


def _pools(op: Any, *options: Any) -> Iterator[tuple[Any, ...]]:
    """Arguments of the backward of `op`."""
    x = rand(*_PLANE)
    made = op(x, *options)
    values, *indices = [made] if isinstance(made, Tensor) else made
    yield rand(*values.shape, seed=3), x, *options, *indices


rule(ops("avg_pool2d", "avg_pool3d"))(forward)
rule(ops("avg_pool2d"), samples=lambda: [(rand(*_PLANE), [3, 2], [2, 2])])(forward)
rule(ops("avg_pool2d_backward", "avg_pool3d_backward"))(backward)
_AVERAGE = ([3, 2], [2, 2], [0, 0], False, True, None)
rule(ops("avg_pool2d_backward"), samples=lambda: _pools(aten.avg_pool2d, *_AVERAGE))(backward)
rule(ops("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"))(forward)
rule(ops("max_pool2d_with_indices"), samples=lambda: [(rand(*_PLANE), [3, 2], [2, 2])])(forward)
rule(
    ops("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
)(backward)  # fmt: skip
_LARGEST = ([3, 2], [2, 2], [0, 0], [1, 1], False)
rule(ops("max_pool2d_with_indices_backward"), samples=lambda: _pools(aten.max_pool2d_with_indices, *_LARGEST))(backward)
rule(ops("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"))(forward)
rule(ops("_adaptive_avg_pool2d"), samples=lambda: [(rand(*_PLANE), [3, 2])])(forward)
rule(ops("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"))(backward)
rule(ops("_adaptive_avg_pool2d_backward"), samples=lambda: [(rand(2, 5, 3, 2), rand(*_PLANE))])(backward)


@rule(ops("fractional_max_pool2d", "fractional_max_pool3d"))
def fractional(call: Call) -> Bind:
    """(plane, random places for each row and channel) -> plane, indices."""
    if len(call.made()) == _spatial(call) + 1:
        return Bind(text([_plane(call, "s"), "r! c x!"], [_plane(call, "t")] * 2), filled=_FILLED)
    return Bind(text([_plane(call, "s"), "n c x!"], [_plane(call, "t")] * 2), filled=_FILLED)


@rule(ops("max_unpool2d", "max_unpool3d"))
def unpool(call: Call) -> Bind:
    """(plane, indices) -> a larger plane."""
    return Bind(text([_plane(call, "s")] * 2, [_plane(call, "t")]), "0", filled=_FILLED)


# -- resampling -----------------------------------------------------------------------------
_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
_NAMES = (
    *(f"upsample_{kind}" for kind in _KINDS), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip
rule(ops(*_NAMES))(forward)
rule(ops(*(name for name in _NAMES if name.endswith("2d_aa"))), samples=lambda: [(rand(2, 5, 6, 8), [3, 4], False)])(
    forward
)
rule(ops(*(f"{name}_backward" for name in _NAMES)))(backward)
rule(
    ops(*(f"{name}_backward" for name in _NAMES if name.endswith("2d_aa"))),
    samples=lambda: [(rand(2, 5, 3, 4), [3, 4], [2, 5, 6, 8], False)],
)(backward)
rule(ops("upsample_bilinear2d"), samples=lambda: [(rand(2, 5, 3, 4), [5, 6], False)])(forward)
rule(ops("upsample_bilinear2d_backward"), samples=lambda: [(rand(2, 5, 5, 6), [5, 6], [2, 5, 3, 4], False)])(backward)


@rule(aten.im2col.default, samples=lambda: [(rand(5, 3, 6, 7), [2, 3], [1, 1], [0, 0], [1, 1])])
def im2col(call: Call) -> Bind:
    """Windows of a plane: channels are the outer factor of what is in a window."""
    lead = "n " if len(call.shape(0)) == 4 else ""
    return Bind(f"{lead}c y! x! -> {lead}(c k) l", "0", filled=frozenset("nc"))


@rule(aten.col2im.default, samples=lambda: [(rand(5, 12, 30), [6, 7], [2, 2], [1, 1], [0, 0], [1, 1])])
def col2im(call: Call) -> Bind:
    """Sums of windows that overlap."""
    lead = "n " if len(call.shape(0)) == 3 else ""
    return Bind(f"{lead}{_merged('c', 'k', call.made()[-3])} l! -> {lead}c y x", "0")


def _grids() -> tuple[Tensor, Tensor]:
    return rand(5, 3, 6, 4), rand(5, 7, 2, 2).tanh()


@rule(ops("grid_sampler_2d"), samples=lambda: [(*_grids(), 0, 0, False)])
@rule(ops("grid_sampler_3d", "cudnn_grid_sampler"))
def grid_sampler(call: Call) -> Bind:
    """(plane, places) -> values there."""
    count = len(call.shape(0)) - 2
    plane, at = (" ".join(f"{letter}{i}" for i in range(count)) for letter in "st")
    return Bind(f"n c {' '.join(f'{d}!' for d in plane.split())}, n {at} x! -> n c {at}", "0")


@rule(
    ops("grid_sampler_2d_backward"),
    samples=lambda: [(rand(5, 3, 7, 2, seed=3), *_grids(), 0, 0, False, [True, True])],
)
@rule(ops("grid_sampler_3d_backward", "cudnn_grid_sampler_backward"))
def grid_sampler_backward(call: Call) -> Bind:
    """Gradients of the plane, a sum over places, and of the places, a sum over channels."""
    count = len(call.shape(0)) - 2
    plane, at = (" ".join(f"{letter}{i}" for i in range(count)) for letter in "st")
    full, grid, grad = f"n c {' '.join(f'{d}!' for d in plane.split())}", f"n {at} x!", f"n c {at}"
    terms = [grad if s.name == "grad_output" else grid if s.name == "grid" else full for s in call.slots]
    number = next(i for i, slot in enumerate(call.slots) if slot.name == "grad_output")
    return Bind(text(terms, [full, grid]), str(number))


def _grid_piece(start: int, length: int, theta: Tensor, size: list[int], corners: bool) -> Tensor:
    return aten.affine_grid_generator.default(theta, [length, *size[1:]], corners)


@rule(aten.affine_grid_generator.default, samples=lambda: [(rand(5, 2, 3), [5, 2, 3, 4], False)])
def affine_grid(call: Call) -> Bind:
    """One grid for each row of matrices."""
    made = " ".join(f"t{i}" for i in range(len(call.made()) - 1))
    return Bind(f"n a! b! -> n {made}", "", local={"n": _grid_piece})


def _merged(outer: str, inner: str, size: int) -> str:
    """A merged dim, of which the inner factor alone is never cut."""
    return f"({outer} {inner})" if size > 1 else f"{inner}!"


# -- padding and shuffling ------------------------------------------------------------------
_PADS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]


@rule(ops(*_PADS))
@rule(ops("reflection_pad2d", "replication_pad2d"), samples=lambda: [(rand(2, 5, 3, 4), [1, 0, 2, 1])])
def pad(call: Call) -> BoundRule:
    """Values at the rim, again."""
    return moves(call, forward(call))


rule(ops(*(f"{name}_backward" for name in _PADS)))(backward)
rule(
    ops("reflection_pad2d_backward", "replication_pad2d_backward"),
    samples=lambda: [(rand(2, 5, 6, 5), rand(2, 5, 3, 4), [1, 0, 2, 1])],
)(backward)


@rule(ops("pixel_shuffle"), samples=lambda: [(rand(5, 12, 3, 2), 2)])
def pixel_shuffle(call: Call) -> BoundRule:
    """Channels become places inside each place."""
    channels = _merged("c", "r", call.made()[-3])
    return moves(call, Bind(f"... {channels} y x -> ... c (y i) (x j)", filled=_LEADING))


@rule(ops("pixel_unshuffle"), samples=lambda: [(rand(5, 3, 6, 4), 2)])
def pixel_unshuffle(call: Call) -> BoundRule:
    """Places become channels."""
    rows, columns = _merged("y", "i", call.made()[-2]), _merged("x", "j", call.made()[-1])
    return moves(call, Bind(f"... c {rows} {columns} -> ... (c r) y x", filled=_LEADING | {"c"}))


@rule(ops("channel_shuffle", "native_channel_shuffle"), samples=lambda: [(rand(5, 6, 3, 2), 2)])
def channel_shuffle(call: Call) -> BoundRule:
    """Channels in another order."""
    places = "".join(f" s{i}" for i in range(len(call.shape(0)) - 2))
    return moves(call, Bind(f"n c!{places} -> n c!{places}"))
