"""AsyncTensorParallel: the program of a sequence-parallel layer before and after."""

import torch

import wholestep as ws
from tests.steps import mean_square as train_step
from tests.tp_models import NORMED_PLAN, Normed
from wholestep.passes import async_tensor_parallel
from wholestep.passes.async_tensor_parallel import AsyncTensorParallel
from wholestep.passes.fusible_products import sites


def picture(local: ws.LocalGraph) -> str:
    """The forward and the backward."""
    lines = [line for line in str(local).splitlines() if line.startswith("  %")]
    last = max(i for i, line in enumerate(lines) if "mm(" in line or "_product(" in line or "multiply_" in line)
    return "\n".join(lines[: last + 1])


def test_async_tensor_parallel(golden, monkeypatch):
    monkeypatch.setattr(async_tensor_parallel, "faster_sites", lambda local, axes, _: sites(local.graph, axes))
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = ws.capture(train_step, model, optimizer, torch.randn(2, 8, 10))
    local = ws.partition(graph, ws.plan(graph, "tp=2", ws.TensorParallel(NORMED_PLAN, async_tp=True)))
    fused = ws.run_passes(local, [AsyncTensorParallel(ws.Hardware.preset("dgx-h100"))])
    golden("async_tensor_parallel", f"before\n{picture(local)}\n\nafter\n{picture(fused)}")
