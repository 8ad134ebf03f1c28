"""Objects of 21 classes as batches, with other data on each rank: as DDP computes, or one device on the whole batch.
Each class on one device: `tests/unit/test_capture_arguments.py`.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.batch_classes import CLASSES

from .launch import run_ranks

STYLES, SEMANTICS = ("replicate", "zero2", "fully_shard"), ("per_rank", "global")
CALLS = 6
COMBINED = [*itertools.product(STYLES, SEMANTICS, (True, False))]


def data(call: int, rank: int, equal: bool) -> tuple[Tensor, Tensor, float, str]:
    generator = torch.Generator().manual_seed(10 * call + rank)
    rows = 6 if equal or rank == 0 else 4
    x, y = torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)
    return x.double(), y.double(), 1.0 + call / 10, f"image{call}-{rank}.png"


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


def train(net: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(net(batch.x), batch.y) * batch.k
    loss.backward()
    optimizer.step()
    return loss.detach()


def expected(rank: int, semantics: str, equal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of DDP, or of one device on the rows of all ranks."""
    net, optimizer = model()
    wrapped = DistributedDataParallel(net) if semantics == "per_rank" else net
    losses: list[Tensor] = []
    for call in range(CALLS):
        own = [data(call, rank, equal)] if semantics == "per_rank" else [data(call, r, equal) for r in range(2)]
        rows = [torch.cat([one[i] for one in own]) for i in range(2)]
        losses.append(train(wrapped, optimizer, CLASSES["plain"](rows[0], rows[1], own[0][2], "")))
    return losses, [p.detach() for p in net.parameters()]


def rows(rank: int, world: int, only: str) -> None:
    """Each class in all combinations of a style; without one, every fourth class in one combination of any style."""
    wanted = {(semantics, equal): expected(rank, semantics, equal) for _, semantics, equal in COMBINED}
    few = [(name, COMBINED[5 * i % len(COMBINED)]) for i, name in enumerate([*CLASSES][::4])]
    of_style = [combination for combination in COMBINED if combination[0] == only]
    for name, (style, semantics, equal) in itertools.product(CLASSES, of_style) if only else few:
        net, optimizer = model()
        step = ws.compile(train, parallel=ws.DataParallel(style, semantics=semantics), schedule=None)
        losses, weights = wanted[semantics, equal]
        what = f"{name}, {style}, {semantics}, equal={equal}"
        for call in range(CALLS):
            batch = CLASSES[name](*data(call, rank, equal))
            kept = batch.x.clone()
            torch.testing.assert_close(step(net, optimizer, batch), losses[call], msg=lambda m, w=what: f"{w}: {m}")
            assert torch.equal(batch.x, kept), what
        assert step.captures <= 2, (what, step.misses)
        with ws.whole(net, writeback=False):
            for own, other in zip(net.parameters(), weights, strict=True):
                torch.testing.assert_close(own.detach(), other, msg=lambda m, w=what: f"{w}: {m}")


def test_batches_are_objects() -> None:
    """Each style, semantics and kind of sizes with some class."""
    run_ranks(rows, 2, "")


@pytest.mark.full
@pytest.mark.parametrize("style", STYLES)
def test_batches_are_objects_in_all_combinations(style: str) -> None:
    run_ranks(rows, 2, style, timeout=280.0)
