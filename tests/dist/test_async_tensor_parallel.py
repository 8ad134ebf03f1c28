"""Async tensor parallelism on gloo ranks: the ops that GPUs run, each as the collective and then the product."""

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.tp_models import SEQUENCE, VOCAB, Llama, next_token, step_of
from wholestep.passes import async_tensor_parallel
from wholestep.passes.fused_products import FUSED
from wholestep.passes.fusible_products import sites

H100 = ws.Hardware.preset("dgx-h100")


def _trained(mesh: str, async_tp: bool, rank: int) -> tuple[list[Tensor], ws.CompiledStep]:
    """Losses and parameters of two steps, the second of another size; ranks along tp are given the same batch."""
    torch.manual_seed(0)
    model = Llama(heads=4, kv=4, layers=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    tensor = ws.TensorParallel(SEQUENCE, async_tp=async_tp)
    parallel = [ws.DataParallel("fully_shard", axis="dp"), tensor] if "dp" in mesh else [tensor]
    step = ws.compile(step_of(next_token), parallel=parallel, mesh=mesh, schedule=ws.Schedule(H100))
    results: list[Tensor] = []
    for number, shape in enumerate(((3, 14), (2, 10))):
        generator = torch.Generator().manual_seed(10 * number + (rank // 2 if "dp" in mesh else 0))
        tokens, targets = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
        results.append(step(model, optimizer, tokens, targets))
    return [*results, *map(whole, model.parameters())], step


def _fused(rank: int, world: int, mesh: str) -> tuple[float, int, list[str]]:
    torch.set_default_dtype(torch.float64)
    plain, _ = _trained(mesh, False, rank)
    async_tensor_parallel.faster_sites = lambda local, axes, _: sites(local.graph, axes)
    results, step = _trained(mesh, True, rank)
    assert step.local_graph is not None
    worst = max((a - b).abs().max().item() for a, b in zip(plain, results, strict=True))
    return worst, sum(node.target in FUSED for node in step.local_graph.graph.nodes), step.misses


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.full)])
def test_fused_products_compute_what_one_device_does(mesh: str) -> None:
    for worst, fused, misses in run_ranks(_fused, ws.Mesh(mesh).size, mesh):
        assert worst < 1e-12
        assert fused >= 6  # three gathers and a reduce-scatter of the layer, forward, and two gathers backward
        assert any("async tensor parallelism fuses products by their size" in miss for miss in misses)
