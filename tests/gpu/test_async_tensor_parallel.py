"""Async tensor parallelism through symmetric memory, on the GPUs of one node. Skipped where there are not two."""

import pytest
import torch
import torch.distributed as dist

import wholestep as ws
from tests.gpu.ranks import RANKS, on_ranks
from tests.tp_models import SEQUENCE, VOCAB, Llama, next_token, step_of
from wholestep.passes import async_tensor_parallel
from wholestep.passes.fused_products import (
    FUSED,
    multiply_gathered,
    multiply_gathered_scaled,
    scatter_product,
    scatter_scaled_product,
)
from wholestep.passes.fusible_products import sites

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")


def _ops(rank: int) -> None:
    torch.manual_seed(rank)
    group = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    shard = torch.randn(96, 3, 64, device="cuda")
    factors = [torch.randn(64, columns, device="cuda") for columns in (32, 48)]
    whole = torch.empty(RANKS * 96, 3, 64, device="cuda")
    dist.all_gather_into_tensor(whole, shard)
    gathered, *products = multiply_gathered(shard, factors, RANKS, group)
    assert torch.equal(gathered, whole)
    for made, factor in zip(products, factors, strict=True):
        torch.testing.assert_close(made, whole @ factor)
    left, right = torch.randn(3 * RANKS * 96, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    partial = (left @ right).view(3, RANKS * 96, 32).transpose(0, 1).contiguous()
    expected = torch.empty(96, 3, 32, device="cuda")
    dist.reduce_scatter_tensor(expected, partial)
    torch.testing.assert_close(scatter_product(left, right, 3, RANKS, group), expected)


def test_the_ops_of_symmetric_memory() -> None:
    on_ranks(_ops)


def _scaled_ops(rank: int) -> None:
    torch.manual_seed(rank)
    group = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    half, eight = torch.bfloat16, torch.float8_e4m3fn
    scale, scales = torch.tensor(0.5, device="cuda"), [torch.tensor(n, device="cuda") for n in (2.0, 0.25)]
    shard = torch.randn(96, 3, 64, device="cuda").to(eight)
    factors = [torch.randn(columns, 64, device="cuda").to(eight).t() for columns in (32, 48)]
    whole = torch.empty(RANKS * 96, 3, 64, device="cuda", dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, shard.view(torch.uint8))
    whole = whole.view(eight)
    gathered, *products = multiply_gathered_scaled(shard, factors, scale, scales, half, True, RANKS, group)
    assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
    for made, factor, other in zip(products, factors, scales, strict=True):
        torch.testing.assert_close(made.float(), whole.float() @ factor.float() * scale * other, rtol=2e-2, atol=0.1)
    left, right = torch.randn(3 * RANKS * 96, 64, device="cuda").to(eight), factors[0]
    partial = (left.float() @ right.float() * scale * scales[0]).view(3, RANKS * 96, 32).transpose(0, 1).contiguous()
    expected = torch.empty(96, 3, 32, device="cuda")
    dist.reduce_scatter_tensor(expected, partial)
    found = scatter_scaled_product(left, right, scale, scales[0], half, False, 3, RANKS, group)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.2)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8")
def test_the_ops_of_symmetric_memory_in_float8() -> None:
    on_ranks(_scaled_ops)


def _steps(rank: int) -> None:
    losses: dict[bool, list[float]] = {}
    async_tensor_parallel.faster_sites = lambda local, axes, _: sites(local.graph, axes)
    for mode in (False, True):
        torch.manual_seed(0)
        model = Llama(heads=4, kv=4).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tensor = ws.TensorParallel(SEQUENCE, async_tp=mode)
        step = ws.compile(step_of(next_token), parallel=tensor, mesh=f"tp={RANKS}")
        torch.manual_seed(1)
        batches = [torch.randint(0, VOCAB, (2, 4, 32), device="cuda") for _ in range(5)]
        losses[mode] = [step(model, optimizer, x, y).item() for x, y in batches]
        assert step.local_graph is not None
        assert any(node.target in FUSED for node in step.local_graph.graph.nodes) == mode
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-4, atol=1e-5)


def test_steps_equal_those_without() -> None:
    """Also recorded as a CUDA graph, which is the default on GPUs."""
    on_ranks(_steps)
