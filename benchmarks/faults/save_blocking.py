"""How long a save blocks a step, beside a plain copy of the same bytes."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws

WIDTH = 4096
COPY, BESIDE, WAITED = "a plain copy of the state", "`ws.save(..., wait=False)`", "`ws.save(...)`"
Took = tuple[float, float]  # seconds, and those of the CPU in the calling thread: neighbours take no part of them
STATES = 3  # the parameters, and two moments of each


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Forward, backward, update."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(state_bytes: int, rounds: int) -> str:
    """The table: a copy of the state and the two ways to save it, in turns."""
    layers = max(1, round(state_bytes / STATES / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = ws.compile(train_step, progress=None)
    step(model, optimizer, torch.randn(1, WIDTH))
    state = list(_tensors(model, optimizer))
    kept = [tensor.clone() for tensor in state]
    size = sum(tensor.nbytes for tensor in state)
    folder = Path(tempfile.mkdtemp(prefix="wholestep-blocking-"))

    def copied() -> None:
        for source, target in zip(state, kept, strict=True):
            target.copy_(source)

    def saved_beside() -> None:
        saving.append(ws.save(folder, step, wait=False))

    saving: list[Any] = []
    rows: dict[str, list[Took]] = {name: [] for name in (COPY, BESIDE, WAITED)}
    try:
        first = _took(saved_beside)
        for _ in range(rounds):
            saving.pop().result()  # nothing is written while the next is timed
            step(model, optimizer, torch.randn(1, WIDTH))
            rows[WAITED].append(_took(lambda: ws.save(folder, step)))
            rows[COPY].append(_took(copied))
            rows[BESIDE].append(_took(saved_beside))
        saving.pop().result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [f"State of {size / 1e9:.2f} GB on the CPU, one rank; medians of {rounds}.", ""]
    lines += ["| | ms | least | of the CPU | beside the copy, CPU |", "|---|---|---|---|---|"]
    rows[f"the first {BESIDE}, into new memory"] = [first]
    copy = statistics.median(cpu for _, cpu in rows[COPY])
    lines += [_row(name, took, copy) for name, took in rows.items()]
    return "\n".join(lines) + "\n"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.detach()
        yield from (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))


def _took(call: Callable[[], object]) -> Took:
    begun, cpu = time.monotonic(), time.thread_time()
    call()
    return time.monotonic() - begun, time.thread_time() - cpu


def _row(name: str, took: list[Took], copy: float) -> str:
    wall, cpu = ([1e3 * one[column] for one in took] for column in range(2))
    middle = statistics.median(cpu)
    numbers = f"{statistics.median(wall):.0f} | {min(wall):.0f} | {middle:.0f} | {middle / copy / 1e3:.2f}"
    return f"| {name} | {numbers} |"
