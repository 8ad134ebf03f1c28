"""What a step asks of a CUDA device, counted on one that computes nothing (tools/nullcuda). Skipped elsewhere."""

import dataclasses
from typing import Any

import pytest
import torch

import wholestep as ws
from benchmarks.gpu.workload import SIZES, Setting, train_step_of
from wholestep.passes.bucket import in_pieces, pieces_of_gather
from wholestep.passes.write_into_buckets import put_pieces

nullcuda: Any = pytest.importorskip(
    "nullcuda", reason="needs the null CUDA device: make test-nullcuda", exc_type=ImportError
)

UNCOUNTED = 5  # a recording is made in one of them
SIX_LAYERS = dataclasses.replace(SIZES["tiny"], layers=6)


def counts(step: Any, *state: Any) -> Any:
    x = torch.zeros(SIX_LAYERS.rows, SIX_LAYERS.context, dtype=torch.long, device="cuda")
    for _ in range(UNCOUNTED):
        step(*state, x, x)
    with nullcuda.counting() as counted:
        step(*state, x, x)
    return counted.counts


@pytest.mark.parametrize("optimizer", ["fused", "default", "foreach"])
def test_no_more_launches_than_eager_torch(optimizer: str) -> None:
    """A GPT of 6 layers with clipping: the same products, no copy and no sync."""
    setting = Setting("tiny", SIX_LAYERS, precision="float32", optimizer=optimizer)
    step = train_step_of(setting)
    eager = counts(step, *setting.build())
    ours = counts(ws.compile(step, device="cuda:0", cuda_graphs=False), *setting.build())
    assert ours.blas == eager.blas
    assert ours.launches <= eager.launches
    assert (ours.memcpys, ours.syncs, ours.mallocs) == (0, 0, 0)


@pytest.mark.parametrize("optimizer", ["fused", "default", "foreach"])
def test_a_recorded_step_is_one_launch(optimizer: str) -> None:
    """And a copy for the batch and for each number that changed."""
    setting = Setting("tiny", SIX_LAYERS, precision="float32", optimizer=optimizer)
    found = counts(ws.compile(train_step_of(setting), device="cuda:0", cuda_graphs=True), *setting.build())
    assert (found.graphs, found.launches, found.blas, found.syncs) == (1, 0, 0, 0)
    assert found.memcpys <= 3


def test_pieces_of_a_bucket_are_written_together() -> None:
    """Biases and norms, which are no matrix products: two kernels for any number of them."""
    pieces = [torch.zeros(64, device="cuda") for _ in range(50)]
    bucket = torch.zeros(64 * 50, device="cuda")
    with nullcuda.counting() as counted:
        put_pieces(bucket, [64] * 50, list(range(50)), pieces, 0.5)
    assert (counted.counts.launches, counted.counts.memcpys) == (2, 0)


@pytest.mark.parametrize("recorded", [False, True])
def test_parameters_leave_the_bucket_in_which_they_were_gathered_together(recorded: bool) -> None:
    """ZeRO-1 on 2 ranks: 52 parameters, and one kernel for each 64 pieces."""
    params = [torch.zeros(64, 8, device="cuda") for _ in range(52)]
    gathered = torch.zeros(2 * 52 * 32 * 8, device="cuda")

    def copy() -> None:
        pieces = pieces_of_gather(gathered, [(32, 8)] * 52, range(52), 2)
        torch.ops.aten._foreach_copy_.default(in_pieces(params, 2), pieces)

    copy()
    with nullcuda.counting() as counted:
        if recorded:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                copy()
        else:
            copy()
    found = counted.counts
    assert (found.captured if recorded else found.launches, found.memcpys) == (2, 0)


def test_a_gradient_norm_is_one_kernel_for_all_parameters() -> None:
    setting = Setting("tiny", SIX_LAYERS, precision="float32", optimizer="fused")
    step = ws.compile(train_step_of(setting), device="cuda:0", cuda_graphs=False)
    counts(step, *setting.build())
    norms = [
        n for n in step.local_graph.graph.nodes if "vector_norm" in str(n.target) or "foreach_norm" in str(n.target)
    ]
    assert sorted(str(n.target) for n in norms) == ["aten._foreach_norm.Scalar", "aten.linalg_vector_norm.default"]
