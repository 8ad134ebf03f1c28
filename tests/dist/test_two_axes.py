"""Sums over two axes on gloo, shared out along one of them: the numbers of plain all-reduces."""

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import clipped

SHARES = ws.Hardware.measured(link_us=1e-6, launch_us=1e-6)  # bytes count alone
STARTS = ws.Hardware.measured(link_us=1e9)  # the number of collectives counts alone


def trained(
    rank: int, ranks: int, hardware: ws.Hardware, schedule: ws.Schedule | None
) -> tuple[list[Tensor], set[str]]:
    """Parameters after three steps, and the kinds of collectives that made them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parallel = ws.DataParallel("replicate")
    step = ws.compile(clipped, parallel=parallel, mesh="node=2,gpu=2", hardware=hardware, schedule=schedule)
    for number in range(3):
        x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))
        step(model, optimizer, x)
    params = [param.detach().clone() for param in model.parameters()]
    return params, set(step.local_graph.collectives())


@pytest.mark.parametrize(
    "schedule", [pytest.param(None, marks=pytest.mark.full), ws.Schedule(bucket_bytes=3000, first_bucket_bytes=500)]
)
def test_shared_sums_are_the_sums(schedule: ws.Schedule | None) -> None:
    """Up to the order in which ranks are added."""
    found = run_ranks(trained, 4, SHARES, schedule)
    plain = run_ranks(trained, 4, STARTS, schedule)
    for (ours, kinds), (theirs, others) in zip(found, plain, strict=True):
        assert kinds == {"reduce_scatter", "all_reduce", "all_gather"}
        assert others == {"all_reduce"}
        for one, other, first in zip(ours, theirs, found[0][0], strict=True):
            assert torch.equal(one, first), "all ranks hold the same bits"
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
