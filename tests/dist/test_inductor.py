"""`backend="inductor"` on gloo ranks: the numbers of `backend="eager"`, and its collectives in its order."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from tests.dist.launch import run_ranks
from wholestep.passes.schedule import Schedule
from wholestep.runtime import random_state

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
SMALL = Schedule(bucket_bytes=3000, first_bucket_bytes=500)
STEPS = 3


@dataclass(frozen=True)
class Job:
    style: str
    semantics: str = "per_rank"
    drop: float = 0.0
    schedule: Any = "auto"
    momentum: float = 0.9  # without, the first step is as all others: half as much is compiled

    def __str__(self) -> str:
        named = "auto" if self.schedule == "auto" else "small"
        return f"{self.style}-{self.semantics}-{self.drop}-{named}"


JOBS = [
    *(Job(style) for style in ("replicate", "zero1", "zero2", "fully_shard")),
    *(Job(style, schedule=SMALL) for style in ("replicate", "zero1", "fully_shard")),
    Job("fully_shard", drop=0.5),
    *(Job(style, "global", 0.5) for style in ("replicate", "fully_shard")),
]
USUAL = (Job("fully_shard", "global", 0.5),)


class Order(TorchDispatchMode):
    """Collectives, waits and matrix products in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            self.calls.append(f"{packet} {args[0].numel()}")
        elif packet == "alltoall_base_":  # eager's, into memory that it keeps
            self.calls.append(f"all_to_all_single {args[1].numel()}")
        elif packet in ("mm", "addmm"):
            self.calls.append("product")
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    """Dropout, and noise that Inductor would draw by itself."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop) * (1 + 0.1 * torch.rand_like(x)) if self.drop else x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _train(rank: int, job: Job, backend: Any) -> tuple[list[Tensor], list[str], Tensor]:
    random_state.of_steps.clear()  # both begin the stream that they share
    torch.manual_seed(0)
    first, second = Noisy(job.drop), Noisy(job.drop / 2)
    model = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), first, nn.Linear(33, 33), second, nn.Linear(33, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=job.momentum, weight_decay=0.1)
    parallel = ws.DataParallel(job.style, semantics=job.semantics)  # type: ignore[arg-type]
    step = ws.compile(train, parallel=parallel, backend=backend, schedule=job.schedule, measure=True)
    torch.manual_seed(10 + rank)
    made: list[Tensor] = []
    order = Order()
    for i in range(STEPS):
        x, y = torch.randn(6, 20), torch.randn(6, 4)
        if i == STEPS - 1:
            with order:
                made.append(step(model, optimizer, x, y))
        else:
            made.append(step(model, optimizer, x, y))
        optimizer.param_groups[0]["lr"] *= 0.5
    assert step.waited_seconds > 0
    assert step.captures <= 2, step.misses  # one for the first step, which makes the momentum
    return made + [whole(p.detach()) for p in model.parameters()], order.calls, torch.rand(2)


def _both(rank: int, world: int, jobs: Sequence[Job]) -> list[tuple[float, list[str], list[str], bool]]:
    out = []
    for job in jobs:
        (a, eager, after), (b, compiled, later) = (_train(rank, job, name) for name in ("eager", "inductor"))  # type: ignore[arg-type]
        worst = max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))
        out.append((worst, eager, compiled, torch.equal(after, later)))
    return out


def _cut(rank: int, world: int) -> float:
    """A layer cut over one axis, stored over the other: sizes that ranks look up when they run."""
    made: list[list[Tensor]] = []
    for backend in ("eager", "inductor"):
        random_state.of_steps.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cut = ws.TensorParallel({"0": "colwise", "2": "rowwise"}, axis="tp")
        strategies = [ws.DataParallel("fully_shard", axis="dp", semantics="global"), cut]
        step = ws.compile(train, parallel=strategies, mesh="dp=2,tp=2", backend=backend, schedule=SMALL)
        torch.manual_seed(10 + rank // 2)
        results = [step(model, optimizer, torch.randn(6, 20), torch.randn(6, 5)) for _ in range(2)]
        made.append(results + [whole(p.detach()) for p in model.parameters()])
        assert " outline(" in str(step.local_graph), "the case that this is about"
    return max((a - b).abs().max().item() for a, b in zip(*made, strict=True))


@pytest.mark.full
def test_two_axes() -> None:
    assert max(run_ranks(_cut, 4, timeout=290)) < 2e-6


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=() if job in USUAL else pytest.mark.full) for job in JOBS], ids=str
)
def test_the_numbers_and_the_order_of_eager(job: Job) -> None:
    for ((worst, eager, compiled, same_draws),) in run_ranks(_both, 2, [job], timeout=290):
        assert worst < 2e-6
        assert _collapsed(compiled) == _collapsed(eager)
        assert same_draws, "the caller's generator was left elsewhere"
        assert "wait_tensor" in " ".join(eager)
        assert "product" in compiled


def _collapsed(calls: Sequence[str]) -> list[str]:
    """With products between two collectives or waits counted."""
    out: list[str] = []
    number = 0
    for call in calls:
        if call == "product":
            number += 1
        else:
            out += [f"{number} products", call]
            number = 0
    return [*out, f"{number} products"]


def _collectives(calls: Sequence[str]) -> list[str]:
    """Collectives alone; Inductor reduces in place what it has to copy."""
    return [call.replace("all_reduce_", "all_reduce") for call in calls if not call.startswith(("product", "wait"))]
