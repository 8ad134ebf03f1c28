"""What a rank does: train, save, say how far it is. Data follow from the step and the rank alone."""

import hashlib
import math
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

import wholestep as ws
from tests.dist.launch import USUAL

from .cases import STEPS, Setup

ROWS, FEWER_ROWS, INPUTS, OUTPUTS = 5, 3, 6, 3
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.utime", "os.truncate")
Say = Callable[..., None]


@dataclass(frozen=True)
class Life:
    """One start of a job. `folder` is None for the run that nothing interrupts; `resume`: it has a checkpoint.
    `victim` kills itself before operation number `operation` on files in the first save from call `call` on.
    """

    setup: Setup
    folder: str | None = None
    resume: bool = False
    every: int = 1
    keep: int = 1
    wait: bool = True
    victim: int = -1
    call: int = 0
    operation: int = 0


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward, clipping, update."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def make_model() -> nn.Module:
    """Sizes that divide by nothing, fewer rows than ranks, tied weights, dropout, buffers that differ between ranks."""
    model = nn.Sequential(
        nn.Linear(INPUTS, 11), nn.BatchNorm1d(11), nn.GELU(), nn.Dropout(0.3),
        nn.Linear(11, 11), nn.LayerNorm(11), nn.Linear(11, 11), nn.Dropout(0.1), nn.Linear(11, OUTPUTS),
    )  # fmt: skip
    first, second = model[4], model[6]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = first.weight
    return model


def make_optimizer(model: nn.Module) -> AdamW:
    """Two groups, so that their options differ."""
    params = list(model.parameters())
    return AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.1}], lr=0.01)


def make_scheduler(name: str, optimizer: AdamW) -> LRScheduler:
    """`one_cycle` moves betas as well."""
    if name == "one_cycle":
        return OneCycleLR(optimizer, [0.05, 0.03], total_steps=STEPS + 1)
    return CosineAnnealingLR(optimizer, STEPS)


def batch(setup: Setup, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows of one rank for one step; no other rank has them. Python's and numpy's generators add to them."""
    rows = FEWER_ROWS if setup.two_sizes and number % 4 == 3 else ROWS
    draw = torch.Generator().manual_seed(1000 * number + rank)
    x, y = torch.randn(rows, INPUTS, generator=draw), torch.randn(rows, OUTPUTS, generator=draw)
    return x * (1 + random.random() / 8) + float(np.random.rand()) / 8, y


def compiled(setup: Setup) -> ws.CompiledStep:
    """The step of a job. Hardware is told, not measured: all starts schedule alike."""
    kept: Any = {"none": None}.get(setup.schedule, setup.schedule)
    style: Any = setup.style
    semantics: Any = setup.semantics
    parallel = ws.DataParallel(style, semantics=semantics)
    return ws.compile(
        train_step, parallel=parallel, mesh=setup.mesh or None, schedule=kept, hardware=USUAL, progress=None
    )


def train(life: Life, rank: int, say: Say) -> None:
    """Train to the end, or until killed. Says `resumed`, `step`, `saving`, `saved` and `done`."""
    setup = life.setup
    warnings.simplefilter("ignore")  # batch norm of per_rank semantics
    torch.manual_seed(7)
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(setup.scheduler, optimizer)
    step = compiled(setup)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    first = 0
    if life.folder is not None and life.resume:
        checkpoint = ws.load(life.folder, step)
        scheduler.load_state_dict(checkpoint.extra["scheduler"])
        first = checkpoint.number
    say("resumed", first)
    saving: Future[Path] | None = None
    operations = OperationCounter(life.folder) if life.operation and rank == life.victim else None
    for number in range(first, STEPS):
        by_hand = 0.01 * (1 + number % 3)  # nothing in the groups tells of it
        optimizer.param_groups[0]["weight_decay"] = by_hand
        loss = step(model, optimizer, *batch(setup, number, rank))
        scheduler.step()
        optimizer.param_groups[1]["weight_decay"] = by_hand
        say("step", number, hex_of(loss))
        if life.folder is not None and (number + 1) % life.every == 0:
            armed = operations if number + 1 - first >= life.call else None
            saving = _save(life, step, scheduler, armed, say)
    step.flush()
    if saving is not None:
        saving.result()
    say("done", digest(model, optimizer))


def _save(
    life: Life, step: ws.CompiledStep, scheduler: LRScheduler, armed: "OperationCounter | None", say: Say
) -> "Future[Path] | None":
    """Save; the future where the save goes on beside the next steps."""
    assert life.folder is not None
    number, begun = step.calls, time.monotonic()
    say("saving", number)
    if armed is not None:
        armed.kill_at = life.operation

    def ended(saved: Any) -> None:
        if isinstance(saved, Future) and saved.exception() is not None:
            return  # the next save raises it
        if armed is not None:
            os.kill(os.getpid(), signal.SIGKILL)  # it had fewer operations: right after it
        say("saved", number, time.monotonic() - begun)

    extra = {"scheduler": scheduler.state_dict()}
    if life.wait:
        ended(ws.save(life.folder, step, extra=extra, keep=life.keep))
        return None
    saving = ws.save(life.folder, step, extra=extra, keep=life.keep, wait=False)
    assert isinstance(saving, Future)
    saving.add_done_callback(ended)
    return saving


class OperationCounter:
    """Counts what this process does to files below `folder`; it dies before operation number `kill_at`."""

    def __init__(self, folder: str | None) -> None:
        self.folder, self.kill_at, self.count = str(folder), 0, 0
        sys.addaudithook(self._seen)

    def _seen(self, event: str, args: tuple[Any, ...]) -> None:
        if self.kill_at and event in FILE_EVENTS and args and self.folder in _path(args[0]):
            self.count += 1
            if self.count >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def _path(name: Any) -> str:
    return os.fsdecode(name) if isinstance(name, (str, bytes, Path)) else ""


def hex_of(loss: Tensor) -> str:
    """All bits of a number."""
    value = float(loss)
    assert math.isfinite(value)
    return value.hex()


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Of all that this rank holds: parameters, buffers, optimizer state and options, and its random generators."""
    found = hashlib.sha256()
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    tensors["random"] = torch.get_rng_state()
    for name, tensor in sorted(tensors.items()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(name.encode() + local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for group in optimizer.param_groups:
        options: dict[str, Any] = {key: value for key, value in group.items() if isinstance(value, (int, float, tuple))}
        found.update(repr(sorted(options.items())).encode())
    found.update(f"{random.random()} {np.random.rand()}".encode())
    return found.hexdigest()[:24]
