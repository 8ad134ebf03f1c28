"""Convolution, pooling, resampling and padding of planes: batch and channels may be sharded, positions stay whole."""

from __future__ import annotations

from torch import Tensor

from ..call import Call
from ..dsl import aten, rand, row, sample
from ..registry import Bind

# -- convolution: channels may be sharded unless groups share them -----------------------------------
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


# -- planes -----------------------------------------------------------------------------------
# Names have `#` for the number of dims of a plane; `{0}` is a plane before, `{1}` after. One plane alone has no rows.
_PLANES = {1: ("... c x!", "... c u!"), 2: ("... c y! x!", "... c v! u!"), 3: ("... c z! y! x!", "... c w! v! u!")}


def _planes(names: str, text: str, *dims: int, linear: str = "0", moves: str = "", **sizes: str) -> None:
    """A row for planes of each number of dims. Every rank needs some channels."""
    for n in dims:
        op_names = names.replace("#", str(n))
        row(op_names, text.format(*_PLANES[n]), linear=linear, moves=moves, sizes=sizes, filled=["c"])


# -- pooling ------------------------------------------------------------------------------
_planes("avg_pool#d _adaptive_avg_pool#d", "{0} -> {1}", 2, 3)
_planes("avg_pool#d_backward _adaptive_avg_pool#d_backward", "{1}, {0} -> {0}", 2, 3)
_planes("max_pool#d_with_indices adaptive_max_pool#d", "{0} -> {1}+", 2, 3, linear="")
_planes(
    "max_pool#d_with_indices_backward adaptive_max_pool#d_backward fractional_max_pool#d_backward",
    "{1}, {0}, {1} -> {0}", 2, 3,
)  # fmt: skip
_planes("max_unpool#d", "{0}, {0} -> {1}", 2, 3)
# with random places for each row and channel
row("fractional_max_pool2d", "n c y! x!, n c r! -> n c v u+ | c y! x!, n! c r! -> c v u+", filled=["c"])
row("fractional_max_pool3d", "n c z! y! x!, n c r! -> n c w v u+ | c z! y! x!, n! c r! -> c w v u+", filled=["c"])

# -- resampling -----------------------------------------------------------------------------
_PLAIN = ("upsample_nearest#d", "_upsample_nearest_exact#d")
_KINDS = {
    1: (*_PLAIN, "upsample_linear#d"),
    2: (*_PLAIN, "upsample_bilinear#d", "upsample_bicubic#d", "_upsample_bilinear#d_aa", "_upsample_bicubic#d_aa",
        "_upsample_lanczos#d_aa"),
    3: (*_PLAIN, "upsample_trilinear#d"),
}  # fmt: skip
for _n, _names in _KINDS.items():
    _planes(" ".join(_names), "{0} -> {1}", _n)
    _planes(" ".join(f"{name}_backward" for name in _names), "{1} -> {0}", _n, input_size="out0")
for _kind in ("bilinear", "bicubic", "lanczos"):
    sample(f"_upsample_{_kind}2d_aa", lambda: [(rand(2, 5, 6, 8), [3, 4], False)])

# (plane, places) -> values there; gradients of the plane sum over places, of the places over channels
_GRIDS = "n c s...!", "n t... x!", "n c t..."
row("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler", "{}, {} -> {}".format(*_GRIDS), linear="0")
row("grid_sampler_2d_backward grid_sampler_3d_backward", "{2}, {0}, {1} -> {0}, {1}".format(*_GRIDS), linear="0")
row("cudnn_grid_sampler_backward", "{0}, {1}, {2} -> {0}, {1}".format(*_GRIDS), linear="2")


def _grid_piece(start: int, length: int, theta: Tensor, size: list[int], corners: bool) -> Tensor:
    return aten.affine_grid_generator.default(theta, [length, *size[1:]], corners)


row("affine_grid_generator", "n a! b! -> n ...", local={"n": _grid_piece})
sample("affine_grid_generator", lambda: [(rand(5, 2, 3), [5, 2, 3, 4], False)])

# -- windows: channels are the outer factor of what is in one -----------------------------------
row(
    "im2col",
    "... c y! x! -> ... (c k) l", linear="0", filled=["...", "c"],
    samples=lambda: [(rand(5, 3, 6, 7), [2, 3], [1, 1], [0, 0], [1, 1])],
)  # fmt: skip


@row("col2im")
def col2im(call: Call) -> Bind:
    """Sums overlapping windows."""
    return Bind(f"... {_merged('c', 'k', call.made()[-3])} l! -> ... c y x", "0")


def _merged(outer: str, inner: str, size: int) -> str:
    """A merged dim; its inner factor cannot be sharded."""
    return f"({outer} {inner})" if size > 1 else f"{inner}!"


# -- padding and shuffling ------------------------------------------------------------------
_planes("reflection_pad#d replication_pad#d", "{0} -> {1}", 1, 2, 3, linear="", moves="0")
_planes("reflection_pad#d_backward replication_pad#d_backward", "{1}, {0} -> {0}", 1, 2, 3)
row("channel_shuffle native_channel_shuffle", "n c! ... -> n c! ...", moves="0")
sample("native_channel_shuffle", lambda: [(rand(5, 6, 3, 2), 2)])


@row("pixel_shuffle")
def pixel_shuffle(call: Call) -> Bind:
    """Moves channels to positions."""
    channels = _merged("c", "r", call.made()[-3])
    return Bind(f"... {channels} y x -> ... c (y i) (x j)", moves="0", filled=frozenset({"..."}))


@row("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> Bind:
    """Moves positions to channels."""
    rows, columns = _merged("y", "i", call.made()[-2]), _merged("x", "j", call.made()[-1])
    return Bind(f"... c {rows} {columns} -> ... (c r) y x", moves="0", filled=frozenset({"...", "c"}))
