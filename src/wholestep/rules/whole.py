"""Ops that are not cut: what they do to one entry depends on all others, or the size of their result on values."""

from __future__ import annotations

from .registry import rule
from .terms import ops, whole

rule(
    ops(
        "bincount", "histogram.bin_ct", "histogram.bins_tensor",
        "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_unique", "_unique2",
        "unique_dim", "unique_consecutive", "unique_dim_consecutive", "nonzero", "nonzero_static", "masked_select",
        "masked_scatter", "masked_scatter_backward", "repeat_interleave.Tensor", "put", "block_diag", "allclose",
        "_is_all_true", "_is_any_true", "hash_tensor", "_embedding_bag", "_embedding_bag_forward_only",
        "_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
        "segment_reduce", "_segment_reduce_backward", "_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward",
        "_pdist_forward", "_pdist_backward", "_trilinear", "_sample_dirichlet", "_dirichlet_grad", "linalg_lstsq",
        "linalg_pinv.atol_rtol_tensor", "_assert_async", "_assert_async.msg", "_functional_assert_async.msg",
        "embedding_renorm", "_pack_padded_sequence", "_chunk_cat", "_compute_linear_combination",
        "_amp_update_scale", "_linalg_check_errors",
    )
)(whole)  # fmt: skip
