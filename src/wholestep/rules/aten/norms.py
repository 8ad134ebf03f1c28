"""Layer, group, RMS and batch norm, forward and backward: normalized dims stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dsl import rand, row, sample

# -- over trailing dims -------------------------------------------------------------------
_WEIGHT, _ONES = "w[#normalized_shape]!", "1[#normalized_shape]"
_FULL, _STATS = f"... {_WEIGHT}", f"... {_ONES}"
row("native_layer_norm", f"{_FULL}, {_WEIGHT}, {_WEIGHT} -> {_FULL}, {_STATS}, {_STATS}")
row(
    "native_layer_norm_backward",
    f"{_FULL}, {_FULL}, {_STATS}, {_STATS}, {_WEIGHT}, {_WEIGHT} -> {_FULL}, {_WEIGHT}, {_WEIGHT}", linear="0",
)  # fmt: skip
row("rms_norm", f"{_FULL}, {_WEIGHT} -> {_FULL}")
row("_fused_rms_norm", f"{_FULL}, {_WEIGHT} -> {_FULL}, {_STATS}")
row("_fused_rms_norm_backward", f"{_FULL}, {_FULL}, {_STATS}, {_WEIGHT} -> {_FULL}, {_WEIGHT}", linear="0")
sample("native_layer_norm", lambda: [(rand(5, 7, 4, 3), [4, 3], rand(4, 3), rand(4, 3, seed=1), 1e-5)])
sample("rms_norm _fused_rms_norm", lambda: [(rand(5, 7, 4), [4], rand(4), 1e-5)])

# -- over groups of channels ---------------------------------------------------------------
row("native_group_norm", "n c! ...!, c!, c! -> n c! ...!, n g, n g", sizes={"N": "n"})
row(
    "native_group_norm_backward",
    "n c! ...!, n c! ...!, n g!, n g!, c! -> n c! ...!, c!, c!", linear="0", sizes={"N": "n"},
)  # fmt: skip

# -- over the batch ------------------------------------------------------------------------
# (input, weights, statistics) -> output, statistics. In training, statistics are over batch and positions, which stay
# whole. Otherwise there are none, or all ranks compute the same.
_TRAINS, _TESTS = "n! c ...!, c+ -> n! c ...!, c*+", "n c ..., c+ -> n c ..., c*+"
_SAME, _FILLED = {"n": "", "...": ""}, ["n", "c", "..."]
row(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm miopen_batch_norm"
    " _native_batch_norm_legit.no_stats",
    f"training: {_TRAINS} | {_TESTS}", reduces=_SAME, filled=_FILLED,
)  # fmt: skip
row("_batch_norm_with_update _batch_norm_with_update_functional", _TRAINS, filled=_FILLED)
row("_batch_norm_no_update _native_batch_norm_legit_no_training", _TESTS, reduces=_SAME, filled=_FILLED)
_TRAINS_BACK, _TESTS_BACK = (f"{x}, {x}, c, c*+ -> {x}, c, c" for x in ("n! c ...!", "n c ..."))
row("native_batch_norm_backward", f"train: {_TRAINS_BACK} | {_TESTS_BACK}", linear="0", filled=_FILLED)
row("batch_norm_backward", f"update: {_TRAINS_BACK} | {_TESTS_BACK}", linear="0", filled=_FILLED)
row("cudnn_batch_norm_backward miopen_batch_norm_backward", _TRAINS_BACK, linear="1", filled=_FILLED)


def _batch_norm(*switch: bool) -> Iterator[tuple[Any, ...]]:
    yield rand(5, 6, 3), rand(6), rand(6, seed=1), rand(6, seed=2), rand(6, seed=3).exp(), *switch, 0.1, 1e-5


def _batch_norm_gradients() -> Iterator[tuple[Any, ...]]:
    for train in (True, False):
        stats = rand(6, seed=1), rand(6, seed=2).exp()
        mask = [True, True, True]
        yield rand(5, 6, 3), rand(5, 6, 3, seed=1), rand(6), *stats, *stats, train, 1e-5, mask, rand(0).byte()


sample("_native_batch_norm_legit_functional", lambda: [*_batch_norm(True), *_batch_norm(False)])
sample("_native_batch_norm_legit_no_training _batch_norm_no_update", _batch_norm)
sample("_batch_norm_with_update_functional", _batch_norm)
sample("batch_norm_backward", _batch_norm_gradients)

# -- weights: whole but for the dim that has lengths of its own ----------------------------------
_LINE = "...! x[dim]"
row("_weight_norm_interface", f"{_LINE}, {_LINE} -> {_LINE}, {_LINE}", filled=["x"])
row(
    "_weight_norm_interface_backward",
    f"{_LINE}, {_LINE}, {_LINE}, {_LINE} -> {_LINE}, {_LINE}", linear="0", filled=["x"],
)  # fmt: skip
sample("_weight_norm_interface", lambda: [(rand(5, 4, 3), rand(5, 1, 1), 0), (rand(5, 4, 3), rand(1, 1, 3), 2)])
