"""Rows about what Python does around tensors: values read, randomness, time, logs, state that is kept."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.scripts.row import Made, Row, pair, process_group, squares, steps, train, update


def returned(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    return update(optimizer, squares(model, x))


def item(model: nn.Module, optimizer: Any, x: Tensor) -> float:
    return update(optimizer, squares(model, x)).item()


def printed(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    print(loss)
    return loss


def formatted(model: nn.Module, optimizer: Any, x: Tensor) -> str:
    return f"{update(optimizer, squares(model, x)):.3f}"


def swallowed(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = squares(model, x)
    try:
        scale = 2.0 if loss.item() > 0 else 1.0
    except Exception:
        scale = 0.5
    return update(optimizer, loss * scale)


def looped(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    while out.norm() > 1:
        out = out / 2
    return out.sum()


def flipped(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, -x if random.random() < 0.5 else x)


def numpy_noise(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x + torch.from_numpy(np.random.rand(5, 4)))


def reseeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return squares(model, x + torch.randn_like(x))


def own_generator(model: nn.Module, optimizer: Any, generator: torch.Generator, x: Tensor) -> Tensor:
    return update(optimizer, squares(model, x + torch.randn(5, 4, generator=generator)))


def with_generator() -> Made:
    return *pair()(), torch.Generator().manual_seed(3)


def timed(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, bool]:
    start = time.time()
    loss = update(optimizer, squares(model, x * (1 + start % 1)))
    return loss, time.time() > start


def to_numpy(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    return update(optimizer, squares(model, x)).numpy()


def alone() -> Made:
    process_group()
    return pair()()


def reduced(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    dist.all_reduce(loss)
    return loss


def gathered(model: nn.Module, x: Tensor) -> Tensor:
    mine = model(x)
    everyones = [torch.zeros_like(mine)]
    dist.all_gather(everyones, mine)
    everyones[0] = mine
    return torch.cat(everyones).square().mean()


def asserted(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    assert out.shape == (5, 3)
    assert not torch.isnan(out).any()
    return out.square().mean()


def asserted_shapes(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    assert out.shape == (5, 3)
    return out.square().mean()


def generated(model: nn.Module, optimizer: Any, numbers: Any, x: Tensor) -> Tensor:
    return update(optimizer, squares(model, x) * next(numbers))


def with_iterator() -> Made:
    return *pair()(), iter([1.0, 2.0, 3.0, 4.0])


def comprehended(model: nn.Module, x: Tensor) -> Tensor:
    parts = {i: model(row[None]) for i, row in enumerate(x.unbind())}
    return torch.stack([v.square().sum() for _, v in sorted(parts.items(), reverse=True)]).mean()


def default_dtype(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) * torch.ones(()) + torch.zeros(3).sum()


class Log:
    """What a training loop keeps beside the model."""

    def __init__(self) -> None:
        self.steps, self.mean, self.losses = 0, torch.zeros(()), list[float]()


def with_log() -> Made:
    return *pair()(), Log()


def counted(model: nn.Module, optimizer: Any, log: Log, x: Tensor) -> tuple[Tensor, int]:
    log.steps += 1
    return update(optimizer, squares(model, x)), log.steps


def smoothed(model: nn.Module, optimizer: Any, log: Log, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    log.mean = 0.9 * log.mean + 0.1 * loss
    return log.mean.clone()


def appended(model: nn.Module, optimizer: Any, log: Log, x: Tensor) -> tuple[Tensor, int]:
    loss = update(optimizer, squares(model, x))
    log.losses.append(loss.item())
    return loss, len(log.losses)


def called_back(model: nn.Module, optimizer: Any, log: Log, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    ws.callback(lambda value: log.losses.append(float(value)), loss)
    return loss


def every_other(model: nn.Module, optimizer: Any, log: Log, x: Tensor) -> Tensor:
    log.steps += 1
    loss = squares(model, x)
    return update(optimizer, loss) if log.steps % 2 else loss.detach()


G = "Python around it"
ROWS = (
    Row(G, "returns the loss, and reads it after the call", steps(returned), ranks=True),
    Row(
        G,
        "`loss.item()`, `float(loss)` in the step",
        steps(returned),
        before=steps(item),
        line="return the tensor, `step(...).item()`",
    ),
    Row(
        G,
        "`print(loss)` in the step",
        steps(returned),
        before=steps(printed),
        line="return the tensor and print it after the call",
    ),
    Row(
        G,
        'f-strings of tensors: `f"{loss:.3f}"`',
        steps(returned),
        before=steps(formatted),
        line="return the tensor and format it after the call",
    ),
    Row(
        G,
        "`.numpy()` in the step",
        steps(returned),
        before=steps(to_numpy),
        line="return the tensor, `step(...).numpy()`",
    ),
    Row(G, "reads a value inside `try: ... except Exception:`", steps(swallowed), runs=False),
    Row(G, "a counter that the step raises: `self.step += 1`", steps(counted, with_log)),
    Row(G, "a running mean in an attribute: `self.mean = 0.9 * self.mean + ...`", steps(smoothed, with_log)),
    Row(
        G,
        "logs each loss: `log.append(loss.item())`",
        steps(called_back, with_log),
        before=steps(appended, with_log),
        line="`ws.callback(log.append, loss)`",
    ),
    Row(G, "updates every n-th call, by a counter of its own", steps(every_other, with_log)),
    Row(G, "`while` on values", train(looped)),
    Row(G, "loops, dicts, comprehensions over shapes and lists", train(comprehended), ranks=True),
    Row(G, "`assert` on shapes", train(asserted_shapes)),
    Row(
        G,
        "`assert` on values",
        train(asserted),
    ),
    Row(
        G,
        "`random.random()`",
        train(flipped),
        line="draw it before the step and pass it in, or `torch.rand`",
        runs=False,
    ),
    Row(
        G,
        "random numbers of numpy",
        train(numpy_noise),
        line="draw them before the step and pass them in, or `torch.rand`",
        runs=False,
    ),
    Row(G, "`torch.manual_seed` inside the step", train(reseeded), runs=False),
    Row(G, "a `torch.Generator` of one's own", steps(own_generator, with_generator), runs=False),
    Row(G, "`time.time()` in the step", steps(timed), runs=False),
    Row(G, "`next()` of an iterator that is passed in", steps(generated, with_iterator), runs=False),
    Row(G, "collectives of `torch.distributed` in the step", steps(reduced, alone), runs=False),
    Row(
        G,
        "an all-gather of embeddings (contrastive, CLIP)",
        steps(lambda m, o, x: update(o, gathered(m, x)), alone),
        runs=False,
    ),
)
