"""Ops that are not cut: what they do to one entry depends on all others, or the size of their result on values."""

from __future__ import annotations

from .registry import Samples, rule
from .terms import ints, ops, rand, whole

_SAMPLES: dict[str, Samples] = {
    "_is_all_true": lambda: [(rand(5, 7) > 0,)],
    "_is_any_true": lambda: [(rand(5, 7) > 0,)],
    "unique_dim": lambda: [(ints(3, 5, 2), 0)],
    "unique_dim_consecutive": lambda: [(ints(3, 5, 2), 0)],
    "nonzero_static": lambda: [(rand(5, 7), {"size": 6})],
    "_chunk_cat": lambda: [([rand(6, 5), rand(4, 5)], 0, 2)],
}
rule(
    ops(
        "bincount", "histogram.bin_ct", "histogram.bins_tensor", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts",
        "_histogramdd_from_bin_tensors", "_unique", "_unique2", "unique_consecutive", "nonzero", "masked_select",
        "masked_scatter", "masked_scatter_backward", "repeat_interleave.Tensor", "put", "block_diag", "allclose",
        "hash_tensor", "_embedding_bag", "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward",
        "segment_reduce", "_segment_reduce_backward", "_pdist_forward", "_pdist_backward", "_trilinear",
        "linalg_lstsq", "linalg_pinv.atol_rtol_tensor", "_linalg_check_errors",
    )
)(whole)  # fmt: skip
for _name, _samples in _SAMPLES.items():
    rule(ops(_name), samples=_samples)(whole)
