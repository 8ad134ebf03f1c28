"""On gloo ranks, tensors are views of buckets and of gathered memory: what goes by memory is as on one device."""

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_global import whole
from tests.steps import mean_square as _step


class Net(nn.Module):
    """Convolutions in channels_last, a pool whose backward is made of views by strides, complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bend = nn.Conv2d(8, 6, 3)
        self.odd = nn.Parameter(torch.rand(3))
        self.waves = nn.Parameter(torch.randn(4, 2))
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(6, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.bend(self.conv(x).relu()).flatten(2)
        turned = self.head(self.pool(seen).flatten(1)) * torch.view_as_complex(self.waves)
        return turned.abs().square() * self.odd.sum() + torch.as_strided(self.head.weight, (4,), (6,), 2)


def _trains(rank: int, world: int, style: str, semantics: str) -> float:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4, fused=True) for m in (model, twin))
    step = ws.compile(_step, parallel=ws.DataParallel(style, semantics=semantics))
    source = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = torch.randn(2 * world, 3, 6, 6, generator=source).to(memory_format=torch.channels_last)
        step(model, optimizer, batch[2 * rank : 2 * rank + 2])
        _step(twin, other, batch)  # equal parts: the mean of the ranks' means is that of the whole batch
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((whole(a.detach()) - b).abs().max().item() for a, b in pairs)


@pytest.mark.crossed
@pytest.mark.parametrize("semantics", ["global", "per_rank"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_what_goes_by_memory(style: str, semantics: str) -> None:
    assert max(run_ranks(_trains, 2, style, semantics)) < 1e-10
