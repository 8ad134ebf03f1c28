"""A step on one GPU gives what eager mode gives. Skipped where there is none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


OPTIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {}}
WAYS = [(name, "eager", graphs) for name in OPTIONS for graphs in (False, True)]


@pytest.mark.filterwarnings("error:this step is not recorded")
@pytest.mark.parametrize(("name", "backend", "graphs"), [*WAYS, ("plain", "inductor", True)])
def test_six_steps_equal_eager_mode(name, backend, graphs):
    options = OPTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 33, bias=False), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 8)).cuda()
    other = copy.deepcopy(model)
    optimizer, another = (torch.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in (model, other))
    step = ws.compile(train_step, backend=backend, cuda_graphs=graphs)
    for _ in range(6):
        batch = {"x": torch.randn(16, 50, device="cuda"), "y": torch.randint(8, (16,), device="cuda")}
        loss, expected = step(model, optimizer, batch), train_step(other, another, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert step.captures == 1
    assert step.cuda_graph.startswith("recorded, " if graphs else "cuda_graphs=False")
