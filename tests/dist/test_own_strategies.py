"""A strategy of somebody's own on gloo ranks, each with its part of the tokens, against one device."""

import copy
from functools import partial

import pytest
import torch

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.unit.test_own_strategies import Reader, SharedTokens, read

SHARES = [(4, 4), (5, 2), (3, 6), (1, 0)]


def _trains(rank: int, world: int, stores: bool) -> float:
    torch.manual_seed(0)
    model = Reader().double()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, other))
    step, worst = ws.compile(read, mesh="seq=2", parallel=SharedTokens(stores=stores)), 0.0
    for call, shares in enumerate(SHARES):
        drawn = torch.Generator().manual_seed(call)
        batch = torch.randint(11, (2, 3, sum(shares)), generator=drawn)
        part = batch.narrow(2, sum(shares[:rank]), shares[rank])
        loss = step(model, optimizer, *part)
        worst = max(worst, abs(loss.item() - read(other, plain, *batch).item()))
    with ws.whole(model):
        ours, theirs = model.state_dict(), other.state_dict()
        return max(worst, *((ours[name] - theirs[name]).abs().max().item() for name in theirs))


@pytest.mark.parametrize("stores", [False, True])
def test_ranks_share_tokens_of_any_length(stores: bool) -> None:
    assert max(run_ranks(partial(_trains, stores=stores), 2)) < 1e-12
