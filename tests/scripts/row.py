"""One row of the table "does my script run?": a script, what is expected of it, and how it is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep as ws
from tests.eager import batches, same_as_eager

STYLES = ("replicate", "fully_shard")
Made = tuple[Any, ...]


@dataclass(frozen=True)
class Script:
    """`step(*made, *call)` for each of `calls(rank)`. `between(i, *made)` runs before call `i`."""

    step: Callable[..., Any]
    make: Callable[[], Made]
    calls: Callable[[int], Sequence[Made]]
    between: Callable[..., None] | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = 1e-12


@dataclass(frozen=True)
class Row:
    """`line` is what a script that is refused is to write instead; `before` is the script that lacks it.

    `runs` says whether `script` does. With `ranks` it is compared on two ranks too.
    """

    group: str
    what: str
    script: Callable[[], Script]
    runs: bool = True
    line: str = ""
    before: Callable[[], Script] | None = None
    ranks: bool = False


def outcome(script: Script, style: str) -> str:
    """Says "yes" when all numbers are those of eager; else the first line of the error.

    Raises:
        AssertionError: a number differs from eager's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same_as_eager(
                script.step, script.make, script.calls(0), between=script.between, tolerance=script.tolerance,
                parallel=ws.DataParallel(style), **script.options,
            )  # fmt: skip
    except ws.WholestepError as error:
        return error.found.splitlines()[0]
    finally:
        if dist.is_initialized():  # by a script that wants a process group
            dist.destroy_process_group()
    return "yes"


@cache
def cell(row: Row, style: str) -> str:
    """What the table says of a row."""
    found = outcome(row.script(), style)
    if row.before is not None:
        refused = outcome(row.before(), style)
        assert refused != "yes", f"{row.what!r} runs without the line that it is said to need"
        found = f"{found}, with: {row.line} (else: {refused})"
    elif found != "yes":
        found = f"no: {found}" + (f". Instead: {row.line}" if row.line else "")
    elif row.line:
        found = f"{found}; {row.line}"
    return found.replace("|", "\\|")


def process_group() -> None:
    """One rank with a process group of its own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def mlp() -> nn.Module:
    """Two layers, from 4 values to 3."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(model: nn.Module) -> Optimizer:
    """An optimizer with state."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def floats(*shapes: tuple[int, ...], count: int = 4) -> Callable[[int], list[Made]]:
    """Random tensors of these shapes for each call, others on each rank."""
    return lambda rank: batches(*shapes, count=(rank + 1) * count)[rank * count :]


def with_labels(classes: int = 3, rows: int = 5, count: int = 4) -> Callable[[int], list[Made]]:
    """Random (rows, 4) tensors and a class for each row."""

    def make(rank: int) -> list[Made]:
        generator = torch.Generator().manual_seed(11 + rank)
        labels = [torch.randint(0, classes, (rows,), generator=generator) for _ in range(count)]
        return [(*x, y) for x, y in zip(floats((rows, 4), count=count)(rank), labels, strict=True)]

    return make


def update(optimizer: Optimizer, loss: Tensor) -> Tensor:
    """The usual end of a step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    return model(x).square().mean()


def pair(model: Callable[[], nn.Module] = mlp, optimizer: Callable[[nn.Module], Optimizer] = sgd) -> Callable[[], Made]:
    """Makes a model and its optimizer."""

    def make() -> Made:
        made = model()
        return made, optimizer(made)

    return make


def train(
    loss: Callable[..., Tensor] = squares, model: Callable[[], nn.Module] = mlp, optimizer: Any = sgd,
    calls: Callable[[int], Sequence[Made]] | None = None, **more: Any,
) -> Callable[[], Script]:  # fmt: skip
    """A script that minimises `loss(model, *batch)`."""

    def step(model: nn.Module, optimizer: Optimizer, *batch: Any) -> Tensor:
        return update(optimizer, loss(model, *batch))

    return lambda: Script(step, pair(model, optimizer), calls or floats((5, 4)), **more)


def steps(
    step: Callable[..., Any], make: Callable[[], Made] | None = None,
    calls: Callable[[int], Sequence[Made]] | None = None, **more: Any,
) -> Callable[[], Script]:  # fmt: skip
    """A script with a step of its own."""
    return lambda: Script(step, make or pair(), calls or floats((5, 4)), **more)
