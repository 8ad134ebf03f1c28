"""Steps of other shapes than the catalogue has, on two ranks against DDP: several models, changing calls."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from tests.around import bound
from tests.dist.compare import difference
from tests.dist.launch import run_ranks

STYLES = ("replicate", "fully_shard", "zero1", "zero2")
TOLERANCE = 1e-6


def _data(rank: int, call: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank))


def _mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def _worst(ours: nn.Module, theirs: nn.Module) -> float:
    return max(difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def _changing_calls(rank: int, style: str) -> dict[str, Any]:
    """A 0-dim argument, three batch sizes, ranks with other sizes than each other; the norm is returned."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) * scale, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), norm

    ours, theirs = _mlp(rank), _mlp(rank)
    wrapped = Ddp(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    step, results = ws.compile(train, parallel=ws.DataParallel(style)), 0.0  # type: ignore[arg-type]
    for call, rows in enumerate((4, 4, 7, 7, 2, 4)):
        batch = (_data(rank, call, rows + rank, 6), _data(rank, call, rows + rank, 3), torch.tensor(0.5 + call))
        found, expected = step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)
        results = max(results, *(difference(a, b) for a, b in zip(found, expected, strict=True)))
    return {"params": _worst(ours, theirs), "results": results, "captures": step.captures}


def _gan(rank: int, style: str) -> dict[str, Any]:
    """Two models and two optimizers in one step; the critic's gradient from the generator's loss is thrown away."""

    def train(g: nn.Module, c: nn.Module, og: Optimizer, oc: Optimizer, real: Tensor, noise: Tensor) -> list[Tensor]:
        fake = g(noise)
        oc.zero_grad()
        critic_loss = F.softplus(-c(real)).mean() + F.softplus(c(fake.detach())).mean()
        critic_loss.backward()
        oc.step()
        og.zero_grad()
        generator_loss = F.softplus(-c(fake)).mean()
        generator_loss.backward()
        og.step()
        return [critic_loss.detach(), generator_loss.detach()]

    pairs = [(_mlp(rank), nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(), nn.Linear(5, 1))) for _ in range(2)]
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())
    optimizers = [(torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(c.parameters(), 0.2)) for g, c in pairs]
    wrapped = [Ddp(m, broadcast_buffers=False) for m in pairs[1]]
    step, results = ws.compile(train, parallel=ws.DataParallel(style)), 0.0  # type: ignore[arg-type]
    for call in range(4):
        batch = _data(rank, call, 5, 3), _data(rank, call + 50, 5, 6)
        found, expected = step(*pairs[0], *optimizers[0], *batch), train(*wrapped, *optimizers[1], *batch)
        results = max(results, *(difference(a, b) for a, b in zip(found, expected, strict=True)))
    worst = max(_worst(a, b) for a, b in zip(*pairs, strict=True))
    return {"params": worst, "results": results, "captures": step.captures}


def _average(rank: int, style: str) -> dict[str, Any]:
    """A moving average of the parameters, updated inside the step."""

    def train(model: nn.Module, average: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(now, alpha=0.1)
        return loss.detach()

    (ours, kept), (theirs, expected) = [(_mlp(0), _mlp(1).requires_grad_(False)) for _ in range(2)]
    wrapped = Ddp(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    step = ws.compile(train, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
    results = 0.0
    for call in range(4):
        batch = _data(rank, call, 5, 6), _data(rank, call, 5, 3)
        loss = step(ours, kept, optimizers[0], *batch)
        results = max(results, difference(loss, train(wrapped, expected, optimizers[1], *batch)))
    return {"params": max(_worst(ours, theirs), _worst(kept, expected)), "results": results, "captures": step.captures}


def _held_parameters(rank: int, style: str) -> dict[str, Any]:
    """A list of parameters from before the first call is clipped, also by a program that was captured later."""

    def step_of(model: nn.Module, held: list[nn.Parameter], optimizer: Optimizer) -> Any:
        def train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(held, 0.1)
            optimizer.step()
            return loss.detach(), norm

        return train

    ours, theirs = _mlp(0), _mlp(0)
    held, wrapped = list(ours.parameters()), Ddp(theirs)
    expected = step_of(wrapped, list(theirs.parameters()), torch.optim.SGD(theirs.parameters(), 0.1))
    step = ws.compile(step_of(ours, held, torch.optim.SGD(ours.parameters(), 0.1)), parallel=ws.DataParallel(style))  # type: ignore[arg-type]
    results = 0.0
    for call, rows in enumerate((4, 7, 5)):
        batch = _data(rank, call, rows, 6), _data(rank, call, rows, 3)
        results = max(results, *(difference(a, b) for a, b in zip(step(*batch), expected(*batch), strict=True)))
    assert all(one is other for one, other in zip(held, ours.parameters(), strict=True))
    return {"params": _worst(ours, theirs), "results": results, "captures": step.captures}


class _Spectral(nn.Module):
    """A Fourier layer, whose weights are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64) / 5)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return self.head(torch.fft.irfft(spectrum @ self.weight @ self.weight.mH, n=8))


def _complex(rank: int, style: str) -> dict[str, Any]:
    """Complex parameters and gradients, with Adam."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    ours = _Spectral()
    theirs = copy.deepcopy(ours)
    wrapped = Ddp(theirs)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (ours, theirs)]
    step, results = ws.compile(train, parallel=ws.DataParallel(style)), 0.0  # type: ignore[arg-type]
    for call in range(4):
        batch = _data(rank, call, 5, 8), _data(rank, call, 5, 3)
        loss = step(ours, optimizers[0], *batch)
        results = max(results, difference(loss, train(wrapped, optimizers[1], *batch)))
    return {"params": _worst(ours, theirs), "results": results, "captures": step.captures}


def _around(rank: int, style: str) -> dict[str, Any]:
    """Optimizers around others, in closures and objects, against one device with the batches of both ranks; parameters
    are rounded before the last call.
    """
    worst, captures = 0.0, 0
    for name in ("sam", "lookahead of an agent", "slow list", "method of an agent"):
        (ours, step), (theirs, expected) = [(model := _mlp(0).double(), bound(name, model)) for _ in range(2)]
        compiled = ws.compile(step, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
        for call in range(4):
            every = [(_data(r, call, 5, 6).double(), _data(r, call, 5, 3).double()) for r in range(2)]
            for model in (ours, theirs) if call == 3 else ():
                model.float().double()  # the parameters are the same objects, with rounded values
            compiled(*every[rank])
            expected(*map(torch.cat, zip(*every, strict=True)))
        with ws.whole(ours):
            worst, captures = max(worst, _worst(ours, theirs)), max(captures, compiled.captures)
    return {"params": worst, "results": 0.0, "captures": captures}


STEPS = {
    "complex": (_complex, 1),
    "changing calls": (_changing_calls, 3),
    "around": (_around, 3),
    "held": (_held_parameters, 2),
    "gan": (_gan, 1),
    "moving average": (_average, 1),
}


def _train(rank: int, world: int, name: str, style: str) -> dict[str, Any]:
    return STEPS[name][0](rank, style)


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", STEPS)
def test_same_as_ddp(name: str, style: str) -> None:
    for one in run_ranks(_train, 2, name, style):
        assert one["params"] <= TOLERANCE
        assert one["results"] <= TOLERANCE
        assert one["captures"] <= STEPS[name][1] + (
            name == "gan"
        )  # the critic holds a gradient from the second call on
