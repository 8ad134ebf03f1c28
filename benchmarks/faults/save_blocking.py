"""How long a save blocks a step, beside a plain copy of the same bytes."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import wholestep as ws

WIDTH = 4096
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

    try:
        first = _seconds(lambda: ws.save(folder, step, wait=False))
        ws.save(folder, step)  # waits for it
        copies, blocked, whole = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            copies.append(_seconds(copied))
            step(model, optimizer, torch.randn(1, WIDTH))
            blocked.append(_seconds(lambda: ws.save(folder, step, wait=False)))
            whole.append(_seconds(lambda: ws.save(folder, step)))  # waits for the other one first
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    copy = statistics.median(copies)
    rows = {
        "a plain copy of the state, into memory of before": copies,
        "`ws.save(..., wait=False)`": blocked,
        "`ws.save(..., wait=False)`, then `ws.save(...)`: the second": whole,
    }
    lines = [f"State of {size / 1e9:.2f} GB on the CPU, one rank; medians of {rounds}.", ""]
    lines += ["| | ms | beside the copy | least | most |", "|---|---|---|---|---|"]
    lines += [_row(name, seconds, copy) for name, seconds in rows.items()]
    lines.append(_row("the first `ws.save(..., wait=False)`, into new memory", [first], copy))
    return "\n".join(lines) + "\n"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.detach()
        yield from (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def _row(name: str, seconds: list[float], copy: float) -> str:
    middle = statistics.median(seconds)
    return (
        f"| {name} | {middle * 1e3:.0f} | {middle / copy:.2f} | {min(seconds) * 1e3:.0f} | {max(seconds) * 1e3:.0f} |"
    )
