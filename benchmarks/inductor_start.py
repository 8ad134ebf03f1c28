"""The first step under Inductor of a deep model, beside that of one layer and that of `torch.compile` of one layer.

    python benchmarks/inductor_start.py                         # 12 layers, medians of 3, in turns
    python benchmarks/inductor_start.py --layers 24 --repeat 1
    python benchmarks/inductor_start.py --with ../other/src     # also 12 layers with another version of wholestep

Each start is a new process with an empty cache of Inductor. CPU seconds are those of the first step, in this process
and in all compilers that it has started; Python's and torch's own start is not in them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from .warm_start import GPT
else:
    from warm_start import GPT  # type: ignore[import-not-found, no-redef]

WIDTH, STEPS = 256, 12
Optimizer = torch.optim.Optimizer


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward with loss."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def update(model: nn.Module, optimizer: Optimizer) -> None:
    """Clipping and update."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward with loss, backward, clipping, update."""
    optimizer.zero_grad()
    loss = loss_of(model, tokens, labels)
    loss.backward()
    update(model, optimizer)
    return loss.detach()


def torch_step() -> Callable[..., Tensor]:
    """The same with `torch.compile`: forward and backward, and clipping with the update."""
    forward, change = torch.compile(loss_of), torch.compile(update)

    def step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(model, tokens, labels)
        loss.backward()
        change(model, optimizer)
        return loss.detach()

    return step


def cpu_seconds() -> float:
    """Of this process alone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one_start(who: str, layers: str) -> None:
    """What one process does; it prints what it saw."""
    import wholestep as ws

    torch.manual_seed(0)
    model = GPT(int(layers), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step: Callable[..., Tensor] = torch_step() if who == "torch.compile" else ws.compile(train_step, backend="inductor")
    batch = torch.randint(256, (16, 128))
    before, start = cpu_seconds(), time.perf_counter()
    losses = [step(model, optimizer, batch, batch).item()]
    said: dict[str, Any] = {"wall": time.perf_counter() - start, "self": cpu_seconds() - before}
    times: list[float] = []
    for _ in range(STEPS):
        at = cpu_seconds()
        losses.append(step(model, optimizer, batch, batch).item())
        times.append(cpu_seconds() - at)
    print(json.dumps({**said, "step": min(times), "losses": losses, "all": cpu_seconds()}))


def started(who: str, layers: int, source: str) -> dict[str, Any]:
    """One start: what it said, and `cpu`, seconds of all its processes for the first step."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {**os.environ, "PYTHONPATH": source, "TORCHINDUCTOR_CACHE_DIR": cache}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, __file__, "one-start", who, str(layers)]
        told = json.loads(subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**told, "cpu": told["self"] + total - told["all"]}


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--layers", type=int, default=12)
    asked.add_argument("--repeat", type=int, default=3)
    asked.add_argument("--with", dest="other", help="the source folder of another version of wholestep")
    given = asked.parse_args()
    own = str(Path(__file__).resolve().parents[1] / "src")
    rows = [("wholestep", given.layers, own), ("wholestep", 1, own), ("torch.compile", 1, own)]
    if given.other:
        rows.insert(1, ("wholestep, other", given.layers, str(Path(given.other).resolve())))
    seen = defaultdict[Any, list[dict[str, Any]]](list)
    for _ in range(given.repeat):
        for row in rows:
            seen[row].append(said := started(*row))
            print(f"{row[0]}, {row[1]}: {said['wall']:.1f} s, CPU {said['cpu']:.1f} s", file=sys.stderr, flush=True)
    print(f"{'':24} {'wall s':>7} {'cpu s':>7} {'own':>7} {'cpu ms a step':>14}  loss after {STEPS} steps")
    for (who, layers, _), starts in seen.items():
        wall, cpu, self, step = (statistics.median(s[name] for s in starts) for name in ("wall", "cpu", "self", "step"))
        name = f"{who}, {layers} layer{'s' if layers > 1 else ''}"
        print(f"{name:24} {wall:7.1f} {cpu:7.1f} {self:7.1f} {step * 1e3:14.1f}  {starts[-1]['losses'][-1]:.7f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one-start"]:
        one_start(*sys.argv[2:])
    else:
        main()
