"""Ops that cannot be sharded: each entry depends on all others, or the size of the result on values."""

from __future__ import annotations

from ..dsl import WHOLE, ints, rand, row, sample

row(
    "bincount histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges _histogramdd_from_bin_cts"
    " _histogramdd_from_bin_tensors _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive nonzero"
    " nonzero_static masked_select masked_scatter masked_scatter_backward repeat_interleave.Tensor put block_diag"
    " allclose hash_tensor _is_all_true _is_any_true _chunk_cat segment_reduce _segment_reduce_backward _embedding_bag"
    " _embedding_bag_backward _embedding_bag_per_sample_weights_backward _pdist_forward _pdist_backward _trilinear"
    " linalg_lstsq linalg_pinv.atol_rtol_tensor _linalg_check_errors",
    WHOLE,
)
sample("_is_all_true _is_any_true", lambda: [(rand(5, 7) > 0,)])
sample("unique_dim unique_dim_consecutive", lambda: [(ints(3, 5, 2), 0)])
sample("nonzero_static", lambda: [(rand(5, 7), {"size": 6})])
sample("_chunk_cat", lambda: [([rand(6, 5), rand(4, 5)], 0, 2)])
