"""On two ranks a step sees the parameters that the user made, also after they are spread over the ranks."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import wholestep as ws

from ..identities import RULES, AllRules, Marked, Step, partial_step
from .launch import run_ranks


def batch(rank: int, call: int) -> torch.Tensor:
    rows = 4 if call < 3 else 2  # another size is another capture
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * call + rank), dtype=torch.float64)


def train(rank: int, world: int, style: str) -> Any:
    spread, alone = AllRules(), AllRules()
    step = ws.compile(spread.step, parallel=ws.DataParallel(style), schedule=None, progress=None)
    for call in range(5):
        spread.between(call)
        found = step(batch(rank, call))
        losses = [alone_loss(alone, batch(one, call)) for one in range(world)]
        update(alone, [batch(one, call) for one in range(world)])
        torch.testing.assert_close(found, losses[rank], rtol=1e-9, atol=1e-12)
    assert spread.noted == [alone.answers(False)] * 5
    spread.between(5)
    with ws.whole(spread.model, writeback=False):
        for one, other in zip(spread.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-9, atol=1e-12)
    return len(step.programs)


def alone_loss(alone: AllRules, x: torch.Tensor) -> torch.Tensor:
    return alone.forward(x).square().mean().detach()


def update(alone: AllRules, batches: list[torch.Tensor]) -> None:
    """The step of one device, with the mean of the gradients of all batches."""
    alone.optimizer.zero_grad()
    answers = alone.answers(False)
    sum(alone.forward(x).square().mean() / len(batches) for x in batches).backward()
    for number, param in enumerate(alone.model.parameters()):
        param.grad.mul_(sum(row[number] for row in answers.values()) / len(RULES))
    alone.optimizer.step()


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_a_step_sees_its_own_parameters(style: str) -> None:
    assert max(run_ranks(train, 2, style)) >= 2


KINDS = nn.Parameter, Marked, DTensor


def old_and_new(rank: int, world: int, parallel: ws.DataParallel | ws.Pipeline, mesh: str, folder: str) -> None:
    """Parameters of before the first call go on, whatever is done with them between calls."""
    spread = Step()
    model, optimizer, params = spread.model, spread.optimizer, [*spread.model.parameters()]
    spread.bias.no_decay = True
    ranks = range(world) if isinstance(parallel, ws.DataParallel) else [0]  # whose samples differ; stages share them
    mine = rank if len(ranks) > 1 else 0
    before = spread.model(batch(mine, 0)).square().mean()
    step = ws.compile(partial(partial_step, spread), parallel=parallel, mesh=mesh, schedule=None, progress=None)
    step(batch(mine, 0))
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert all(p in optimizer.state and isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in params)
    assert [vars(p) for p in params] == [{"no_decay": True} if p is spread.bias else {} for p in params]
    with pytest.raises(ws.StateError, match=r"a backward reaches '.*' as it was before a compiled step placed it"):
        before.backward()
    for param in params:
        assert param.grad is None or param.grad.shape == param.shape
        values = param.full_tensor().detach().clone()
        other = copy.deepcopy(param)
        assert [isinstance(other, kind) for kind in KINDS] == [isinstance(param, kind) for kind in KINDS]
        torch.testing.assert_close(cast(DTensor, other).full_tensor(), values, rtol=0.0, atol=0.0)
        with torch.no_grad():
            assert param.mul_(2.0) is param
        torch.testing.assert_close(param.full_tensor().detach(), 2 * values, rtol=0.0, atol=0.0)
        param.data = other.data
        torch.testing.assert_close(param.full_tensor().detach(), values, rtol=0.0, atol=0.0)
        with pytest.raises(ws.StateError, match="of a parameter that ranks share becomes a Tensor"):
            param.data = values
    copied = pickle.loads(pickle.dumps(spread.bias))
    assert vars(copied).get("no_decay")
    assert torch.equal(copied.to_local(), cast(DTensor, spread.bias).to_local())
    ws.save(folder, step)
    step(batch(mine, 1))
    ws.load(folder, step)
    optimizer.load_state_dict(optimizer.state_dict())
    step(batch(mine, 2))
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert all(one is other for one, other in zip(optimizer.state, params, strict=True))
    assert step.captures == 1
    with ws.whole(model, writeback=False):
        assert [isinstance(p, Marked) for p in model.parameters()] == [isinstance(p, Marked) for p in params]
        alone = Step()
        for call in (0, 2):
            partial_step(alone, torch.cat([batch(of, call) for of in ranks]))
        for one, other in zip(model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-9, atol=1e-12)


PLACED = {
    "fully_shard": (ws.DataParallel("fully_shard", semantics="global"), "dp=2"),
    "stages": (ws.Pipeline(micro_batches=2), "pp=2"),
}


@pytest.mark.parametrize("kind", PLACED)
def test_parameters_go_on(kind: str, tmp_path: Path) -> None:
    run_ranks(old_and_new, 2, *PLACED[kind], str(tmp_path))
