"""Pipelines on gloo ranks against one process, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.stage_models import batches, maker, train
from wholestep.runtime.random_state import of_steps

TOLERANCE = 1e-10


def _alone(tied: bool, drop: float, steps: int) -> list[Tensor]:
    """Losses and parameters of one process, which draws what the ranks draw together."""
    torch.manual_seed(0)
    model, optimizer = maker(3, tied, drop)()
    torch.manual_seed(5)
    torch.manual_seed(int(torch.randint(0, 2**62, (1,))) % 2**63)
    losses = [train(model, optimizer, *batch) for batch in batches(8, steps)]
    return [*losses, *(p.detach() for p in model.parameters())]


def _piped(rank: int, world: int, tied: bool, drop: float, pipeline: dict[str, Any]) -> tuple[float, int, int]:
    torch.set_default_dtype(torch.float64)
    expected = _alone(tied, drop, 3)
    of_steps.clear()
    torch.manual_seed(0)
    model, optimizer = maker(3, tied, drop)()
    step = ws.compile(train, parallel=ws.Pipeline(**pipeline), mesh=f"pp={world}")
    torch.manual_seed(5 + rank)
    found = [step(model, optimizer, *batch) for batch in batches(8, 3)]
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
    with ws.whole(model, writeback=False):
        found += [p.detach().clone() for p in model.parameters()]
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst, held, sum(p.numel() for p in model.parameters())


@pytest.mark.crossed
@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zero_bubble", "auto"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_two_ranks_compute_what_one_process_does(tied: bool, drop: float, pieces: int, order: str) -> None:
    found = run_ranks(_piped, 2, tied, drop, {"micro_batches": pieces, "schedule": order})
    assert max(worst for worst, _, _ in found) < TOLERANCE
    assert sum(held for _, held, _ in found) == found[0][2], "each parameter rests on one rank"
    assert min(held for _, held, _ in found) > 0
