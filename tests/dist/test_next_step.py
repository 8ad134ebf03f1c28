"""Steps that end in the next call, on two ranks: against DDP, and against all that looks at parameters meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from tests.dist.compare import difference
from tests.dist.launch import run_ranks
from tests.steps import mse as train

STYLES = ("replicate", "zero1", "zero2", "fully_shard")
TOLERANCE = 1e-6


def _data(rank: int, call: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank))


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def _whole(model: nn.Module) -> list[Tensor]:
    """Parameters as they are, read directly."""
    return list(map(_whole_tensor, model.parameters()))


def _whole_tensor(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _worst(ours: list[Tensor], theirs: nn.Module) -> float:
    return max(difference(a, b) for a, b in zip(ours, theirs.parameters(), strict=True))


def _pair(rank: int, style: str) -> tuple[ws.CompiledStep, list[nn.Module], list[Optimizer]]:
    schedule = ws.Schedule(bucket_bytes=200, first_bucket_bytes=100, across_steps=True)
    step = ws.compile(train, parallel=ws.DataParallel(style), schedule=schedule)  # type: ignore[arg-type]
    models = [_mlp(), _mlp()]
    return step, models, [torch.optim.AdamW(m.parameters(), 0.1) for m in models]


def _against_ddp(rank: int, world: int, style: str) -> dict[str, float]:
    """Five steps, a changing rate, another batch size in between (another program), then a flush."""
    step, (ours, theirs), optimizers = _pair(rank, style)
    wrapped, losses = Ddp(theirs), 0.0
    for call, rows in enumerate((4, 4, 7, 4, 4)):
        batch = _data(rank, call, rows, 6), _data(rank, call + 50, rows, 3)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + call)
        found, expected = step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)
        losses = max(losses, difference(found, expected))
    before = _worst(_whole(ours), theirs)
    step.flush()
    after = _worst(_whole(ours), theirs)
    step.flush()
    return {"losses": losses, "before": before, "after": after, "again": _worst(_whole(ours), theirs)}


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s in ("zero1", "fully_shard") else pytest.mark.full) for s in STYLES]
)
def test_equal_to_ddp_after_a_flush(style: str) -> None:
    for found in run_ranks(_against_ddp, 2, style):
        assert found["losses"] < TOLERANCE
        assert found["before"] > 1e-3, "the last update is still to come"
        assert found["after"] < TOLERANCE
        assert found["again"] == found["after"]


class _LazyMomentum(torch.optim.Optimizer):
    """Makes its state in its first step; a norm over all ranks' shards leaves that step's update to the next call."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["buffers"] = [torch.zeros_like(param)]
            (momentum,) = state["buffers"]
            momentum.mul_(0.9).add_(param.grad)
            param.add_(momentum / (momentum.norm() + 0.1), alpha=-0.1)


def _makes_state(rank: int, world: int) -> list[float]:
    found: list[float] = []
    for calls in (1, 3):
        step, (ours, theirs), _ = _pair(rank, "zero1")
        wrapped, optimizers = Ddp(theirs), [_LazyMomentum(m.parameters()) for m in (ours, theirs)]
        for call in range(calls):
            batch = _data(rank, call, 4, 6), _data(rank, call + 50, 4, 3)
            found.append(difference(step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)))
            assert call or step.local_graph.across is not None, "the first call leaves its end to the next"  # type: ignore[union-attr]
        step.flush()
        found.append(_worst(_whole(ours), theirs))
        states = [[_whole_tensor(o.state[p]["buffers"][0]) for p in o.param_groups[0]["params"]] for o in optimizers]
        found += [difference(a, b) for a, b in zip(*states, strict=True)]
    return found


def test_the_first_call_may_make_state_that_its_end_reads() -> None:
    for found in run_ranks(_makes_state, 2):
        assert max(found) < TOLERANCE


def _own_sizes(rank: int, world: int, style: str) -> dict[str, float]:
    """Batches of sizes that each rank changes for itself: one completes its step while the other runs on."""
    step, (ours, theirs), optimizers = _pair(rank, style)
    wrapped, losses = Ddp(theirs), 0.0
    for call, rows in enumerate([(4, 4, 4, 7, 7, 4), (5, 6, 6, 6, 5, 5)][rank]):
        batch = _data(rank, call, rows, 6), _data(rank, call + 50, rows, 3)
        found, expected = step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)
        losses = max(losses, difference(found, expected))
    step.flush()
    return {"losses": losses, "params": _worst(_whole(ours), theirs)}


@pytest.mark.parametrize("style", [pytest.param(s, marks=() if s == "zero1" else pytest.mark.full) for s in STYLES])
def test_ranks_may_change_programs_alone(style: str) -> None:
    for found in run_ranks(_own_sizes, 2, style):
        assert found["losses"] < TOLERANCE
        assert found["params"] < TOLERANCE


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _looks(rank: int, world: int, style: str, folder: str) -> dict[str, float]:
    """Everything that completes a step by itself, each after a step of its own."""
    step, (ours, theirs), optimizers = _pair(rank, style)
    evaluate = ws.compile(_evaluate, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
    x = _data(rank, 99, 4, 6)
    wrapped = Ddp(theirs)
    looks: dict[str, Callable[[], Any]] = {
        "model.state_dict": ours.state_dict,
        "optimizer.state_dict": optimizers[0].state_dict,
        "submodule": ours[0].state_dict,  # type: ignore[index]
        "save": lambda: ws.save(folder, step),
        "load": lambda: ours.load_state_dict(ours.state_dict()),
        "another step": lambda: evaluate(ours, x),
    }
    if style == "replicate":
        looks["forward"] = lambda: ours(x)
    found: dict[str, float] = {}
    for call, (name, look) in enumerate(looks.items()):
        batch = _data(rank, call, 4, 6), _data(rank, call + 50, 4, 3)
        step(ours, optimizers[0], *batch)
        train(wrapped, optimizers[1], *batch)
        assert _worst(_whole(ours), theirs) > 1e-4, name
        made = look()
        found[name] = _worst(_whole(ours), theirs)
        if name in ("forward", "another step"):
            found[f"{name}: result"] = difference(made, theirs(x))
    return found


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.full), "fully_shard"])
def test_whoever_looks_sees_whole_steps(style: str, tmp_path: Path) -> None:
    for found in run_ranks(_looks, 2, style, str(tmp_path)):
        assert len(found) >= 7
        assert {name: value for name, value in found.items() if value > TOLERANCE} == {}


def _replaced(rank: int, world: int) -> str:
    step, (ours, _), (optimizer, _) = _pair(rank, "replicate")
    for call in range(2):
        step(ours, optimizer, _data(rank, call, 4, 6), _data(rank, call, 4, 3))
    ours[0].weight = nn.Parameter(torch.zeros(9, 6))  # type: ignore[index]
    try:
        step.flush()
    except ws.StateError as error:
        return str(error)
    return ""


def test_replaced_parameters_are_told_of() -> None:
    for text in run_ranks(_replaced, 2):
        assert "the end of the last step, which was left to the next one, cannot run: parameter '0.weight'" in text
        assert "call step.flush() before replacing them" in text


def _ends(rank: int, world: int) -> int:
    """A job that ends without a flush, collectives on their way."""
    step, (ours, _), (optimizer, _) = _pair(rank, "replicate")
    for call in range(3):
        step(ours, optimizer, _data(rank, call, 4, 6), _data(rank, call, 4, 3))
    return step.captures


def test_a_job_may_end_without_a_flush() -> None:
    assert run_ranks(_ends, 2) == [1, 1]


def test_one_rank_leaves_nothing() -> None:
    step, (ours, theirs), optimizers = _pair(0, "replicate")
    for call in range(2):
        batch = _data(0, call, 4, 6), _data(0, call + 50, 4, 3)
        step(ours, optimizers[0], *batch)
        train(theirs, optimizers[1], *batch)
    assert _worst(_whole(ours), theirs) < TOLERANCE


def test_inductor_is_refused() -> None:
    with pytest.raises(ws.BackendError, match="cannot leave collectives to the next call"):
        ws.compile(train, backend="inductor", schedule="across_steps")


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ws.PlanError, match=r"CompileOptions\(schedule='accross'\)"):
        ws.compile(train, schedule="accross")  # type: ignore[arg-type]
