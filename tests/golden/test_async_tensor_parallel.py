"""AsyncTensorParallel: the program of a sequence-parallel layer before and after."""

import torch

import wholestep as ws
from tests.steps import mean_square as train_step
from tests.tp_models import NORMED_PLAN, Normed
from wholestep.passes.async_tensor_parallel import AsyncTensorParallel

SLOW = ws.Hardware.measured(flops_per_us=10, launch_us=0.001, link_us=0.001, link_bytes_per_us=1)


def picture(local: ws.LocalGraph) -> str:
    """The forward and the backward."""
    lines = [line for line in str(local).splitlines() if line.startswith("  %")]
    last = max(i for i, line in enumerate(lines) if "aten.mm(" in line)
    return "\n".join(lines[: last + 1])


def test_async_tensor_parallel(golden):
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = ws.capture(train_step, model, optimizer, torch.randn(2, 8, 10))
    parallel = ws.TensorParallel(NORMED_PLAN, async_tp="exact")
    local = ws.partition(graph, ws.plan(graph, "tp=2", parallel))
    made = ws.run_passes(local, [AsyncTensorParallel(SLOW, lambda cuts: {cut.name: 2 for cut in cuts})])
    golden("async_tensor_parallel", f"before\n{picture(local)}\n\nafter\n{picture(made)}")
