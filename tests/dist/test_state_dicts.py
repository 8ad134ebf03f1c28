"""State leaves and enters a step as torch does it: state dicts, torch.distributed.checkpoint, eager steps between.

Each case runs a step, does something with the state, and runs on. What must not change anything is compared bitwise
with a run without it; an eager step is compared with DDP's arithmetic.
"""

import copy
import io
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import mse as train_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, fused=True),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
}
CASES = [
    ("replicate", "adamw"), ("zero1", "adamw"), ("zero1", "adam fused amsgrad"), ("zero1", "sgd dampening"),
    ("fully_shard", "adam fused amsgrad"), ("fully_shard", "sgd dampening"),
]  # fmt: skip


def make(optimizer: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model whose sizes divide by nothing, in two groups of parameters, one of no dims."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 11), nn.LayerNorm(11), nn.PReLU(), nn.Linear(11, 3))
    model[2].weight = nn.Parameter(torch.tensor(0.25))
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[1:].parameters()], "lr": 0.03},
    ]
    return model, OPTIMIZERS[optimizer](groups)


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(6, 5, generator=draw), torch.randn(6, 3, generator=draw)


def whole(value: Any) -> Any:
    """Every DTensor inside, gathered."""
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(v) for v in value)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same(one: Any, other: Any, path: str = "") -> None:
    """Bitwise, whatever it is nested in."""
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), (path, one, other)
    else:
        assert one == other, (path, one, other)


# -- what is done between two calls, on all ranks; `folder` does not exist yet ---------------------------------------


def load_own_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def load_copied_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    optimizer.load_state_dict(whole(optimizer.state_dict()))


def load_own_model_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def distributed_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    ours, theirs = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=copy.deepcopy(ours), optim_state_dict=copy.deepcopy(theirs))


def distributed_state_whole(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    options = StateDictOptions(full_state_dict=True)
    ours, theirs = get_state_dict(model, optimizer, options=options)
    assert not any(isinstance(v, DTensor) for v in ours.values())
    ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
    scramble(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=ours, optim_state_dict=theirs, options=options)


def own_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    scramble(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def own_checkpoint_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    ours, theirs = get_state_dict(model, optimizer)
    dcp.save({"model": ours, "optimizer": theirs}, checkpoint_id=folder)
    scramble(model, optimizer)
    ours, theirs = get_state_dict(model, optimizer)
    dcp.load({"model": ours, "optimizer": theirs}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=ours, optim_state_dict=theirs)


def consolidated_file(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    options = StateDictOptions(full_state_dict=True)
    file = io.BytesIO()
    torch.save(get_model_state_dict(model, options=options), file)
    plain = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    fresh, _ = make("adamw", seed=9)
    fresh.load_state_dict(plain)
    scramble(model, optimizer, state=False)
    set_model_state_dict(model, plain, options=options)


def first_ranks_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(model, optimizer, options=options)
    ours, theirs = copy.deepcopy(state) if dist.get_rank() == 0 else ({}, {})
    scramble(model, optimizer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, ours, options=options)
    set_optimizer_state_dict(model, optimizer, theirs, options=options)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model.state_dict(), optimizer.state_dict()


def scramble(model: nn.Module, optimizer: torch.optim.Optimizer, state: bool = True) -> None:
    """Spoil every value, so that a load that does nothing is seen."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    tensors += [v for e in optimizer.state.values() for v in e.values() if isinstance(v, torch.Tensor)] if state else []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.detach().fill_(7.0)


BETWEEN = {
    f.__name__: f
    for f in (
        nothing, load_own_optimizer_state, load_copied_optimizer_state, load_whole_optimizer_state,
        load_own_model_state, distributed_state, distributed_state_whole, own_checkpoint, own_checkpoint_by_name,
        consolidated_file, first_ranks_state,
    )
}  # fmt: skip


class Training:
    """A model that is trained call by call; the learning rate falls at each."""

    def __init__(self, style: Any, optimizer: str) -> None:
        self.model, self.optimizer = make(optimizer)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.shares = style == "stages"  # its ranks take the same batch
        parallel, mesh = (ws.Pipeline(), "pp=2") if self.shares else (ws.DataParallel(style), "dp=2")
        self.step = ws.compile(train_step, parallel=parallel, mesh=mesh)
        self.calls = 0

    def train(self, rank: int) -> torch.Tensor:
        loss = self.step(self.model, self.optimizer, *batch(self.calls, 0 if self.shares else rank))
        self.schedule.step()
        self.calls += 1
        return loss

    def state(self) -> Any:
        return whole({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def _unchanged(rank: int, world: int, style: str, optimizer: str, folder: str) -> dict[str, str]:
    wrong: dict[str, str] = {}
    plain, handled = Training(style, optimizer), Training(style, optimizer)
    for training in (plain, plain, handled, handled):
        training.train(rank)
    for name, between in BETWEEN.items():
        try:
            between(handled.model, handled.optimizer, str(Path(folder) / name))
            for _ in range(2):
                same(handled.train(rank), plain.train(rank), "loss")
            same(handled.state(), plain.state())
            assert handled.step.captures == plain.step.captures, handled.step.misses
        except Exception:
            wrong[name] = traceback.format_exc()
            break
    return wrong


@pytest.mark.usual("zero1-sgd dampening", "fully_shard-adam fused amsgrad", "stages-adamw")
@pytest.mark.parametrize(("style", "optimizer"), [*CASES, ("stages", "adamw")])
def test_unchanged(style: str, optimizer: str, tmp_path: Path) -> None:
    """Taking state out and putting it back leaves the rest of the run as it was, bit by bit."""
    for wrong in run_ranks(_unchanged, 2, style, optimizer, str(tmp_path)):
        assert not wrong, "\n".join(wrong.values())


def _eager_between(rank: int, world: int, style: str, optimizer: str) -> None:
    training = Training(style, optimizer)
    model, made = make(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    for i in range(6):
        loss = nn.functional.mse_loss(model(batch(i, rank)[0]), batch(i, rank)[1])
        made.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= world
        made.step()
        schedule.step()
        torch.testing.assert_close(training.train(rank), loss.detach())
        if i in (0, 2, 3):
            if i == 3:  # state that is whole, which no call has sharded since
                training.optimizer.load_state_dict(copy.deepcopy(made.state_dict()))
            by_hand(model, i)
            made.step()
            by_hand(training.model, i)
            training.optimizer.step()
        ours, theirs = training.state(), whole({"model": model.state_dict(), "optimizer": made.state_dict()})
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-5, atol=1e-6, msg=lambda m, i=i: f"{i}: {m}")
        torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=1e-5, atol=1e-6)


def by_hand(model: nn.Module, number: int) -> None:
    """Set every gradient, the same on all ranks."""
    draw = torch.Generator().manual_seed(number)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=draw)
        param.grad = (
            distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
        )


@pytest.mark.usual("zero1-sgd dampening", "fully_shard-adam fused amsgrad")
@pytest.mark.parametrize(("style", "optimizer"), CASES)
def test_eager_step_between(style: str, optimizer: str) -> None:
    """`optimizer.step()` with gradients set by hand, between compiled steps, does what it does for DDP."""
    run_ranks(_eager_between, 2, style, optimizer)


class Views(nn.Linear):
    """Buffers that are views of 16 numbers: one expanded from three, one of every other."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.memory = torch.arange(32.0).view(2, 16) + 100 * rank
        self.register_buffer("expanded", self.memory[0, :3].view(3, 1).expand(3, 4))
        self.register_buffer("spaced", self.memory[1, ::2])


def first_ranks_views(rank: int, world: int) -> tuple[torch.Tensor, ...]:
    model = Views(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) * model.expanded.sum() + model.spaced.sum()).sum().backward()
        optimizer.step()

    ws.compile(train)(model, optimizer, torch.ones(2, 4))
    return model.expanded, model.spaced, model.memory


def test_buffers_that_are_views_take_the_first_ranks_values_and_no_memory_beside_them() -> None:
    (expanded, spaced, _), (found, every_other, memory) = run_ranks(first_ranks_views, 2)
    assert torch.equal(found, expanded)
    assert torch.equal(every_other, spaced)
    own = Views(1).memory
    assert torch.equal(memory[0, 3:], own[0, 3:])
    assert torch.equal(memory[1, 1::2], own[1, 1::2])
