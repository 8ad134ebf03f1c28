"""Float8 on one GPU gives what the same step gives on a CPU, up to the order of sums. Skipped where there is none."""

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep as ws

OLDEST = (8, 9)  # compute capability with products of 8 bits
has_float8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST
pytestmark = pytest.mark.skipif(not has_float8, reason="needs a CUDA device with float8")


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_steps_equal_those_on_a_cpu(recipe: Literal["tensorwise", "rowwise"]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)).bfloat16()
    other = copy.deepcopy(model).cuda()
    option = ws.Float8(recipe, modules=["*"])
    steps = [ws.compile(train_step, float8=option) for _ in range(2)]
    optimizers = [SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for _ in range(4):
        x = torch.randn(32, 64, dtype=torch.bfloat16)
        expected = steps[0](model, optimizers[0], x)
        found = steps[1](other, optimizers[1], x.cuda())
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=1e-3)
    assert steps[1].local_graph is not None
    assert "_scaled_mm" in str(steps[1].local_graph)
