"""`offload="cpu"` on one GPU: what rests is in host memory, numbers are those of eager mode. Skipped without one."""

import copy

import pytest
import torch
from torch import nn

import wholestep as ws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("start", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "plain"])
def test_state_rests_in_host_memory(options, start):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 33, bias=False), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 8)).to(start)
    other = copy.deepcopy(model).cuda()
    optimizer, another = (torch.optim.AdamW(m.parameters(), lr=1e-2, **options) for m in (model, other))
    step = ws.compile(train_step, parallel=ws.DataParallel("fully_shard"), offload="cpu", device="cuda:0")
    for rows in (16, 16, 12):
        x, y = torch.randn(rows, 50, device="cuda"), torch.randn(rows, 8, device="cuda")
        loss, expected = step(model, optimizer, x, y), train_step(other, another, x, y)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.device.type == "cpu"
        assert {v.device.type for v in optimizer.state[mine].values()} == {"cpu"}
        torch.testing.assert_close(mine, theirs.cpu(), rtol=1e-5, atol=1e-6)
    assert {b.device.type for b in model.buffers()} == {"cuda"}
    with torch.no_grad():
        model.eval(), other.eval()
        torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-6)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
