"""One rank: `python -m benchmarks.truth.worker SIZE RATE OUT TURNS STEPS STYLE...`, in a process group of its own."""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from benchmarks.peers import machine, models
from benchmarks.peers.sizes import CONFIGS
from wholestep.cost.simulation import simulate
from wholestep.distributed.launch import join
from wholestep.hardware.hardware import Hardware
from wholestep.passes.schedule import Schedule
from wholestep.profiling.measure_hardware import measure_hardware
from wholestep.runtime.step import CompiledStep

from .results import Scene, Style, Turn

WARM_STEPS = 3
Measured = tuple[float, float]  # milliseconds of a step, cores that others took


@dataclass
class Trained:
    """A style and the model that it trains."""

    name: str
    step: CompiledStep
    model: nn.Module
    optimizer: AdamW
    measured: list[Measured] = field(default_factory=list[Measured])


def parallel(name: str) -> Any:
    """The strategy of a style, `auto` or `auto=BYTES`; words behind a comma: keep, reshard, bucket=MB."""
    style, *words = name.split(",")
    if style.startswith("auto"):
        _, _, size = style.partition("=")
        return ws.Auto(size or None)
    again = True if "reshard" in words else False if "keep" in words else None
    given: Any = style
    return ws.DataParallel(given, reshard_after_forward=again)


def scheduled(name: str, known: Schedule | None) -> Any:
    """As what was measured says, with the bucket that the name has."""
    sizes = [float(word.partition("=")[2]) for word in name.split(",") if word.startswith("bucket=")]
    return "auto" if known is None else replace(known, bucket_bytes=int(sizes[0] * (1 << 20)) if sizes else None)


def main(size: str, rate: str, out: str, turns: int, steps: int, names: list[str]) -> None:
    """Train, simulate, write; the first rank writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIGS[size]
    torch.manual_seed(rank)
    x = torch.randint(0, config.vocabulary, (config.rows // world, config.context))
    y = x if config.kind == "gpt" else x[:, 0].contiguous()
    trained: list[Trained] = []
    for name in names:
        known = scheduled(name, trained[0].step.schedule if trained else None)  # measured once, for all
        trained.append(_built(name, size, known, x, y))
    place = join(None, "cpu")
    moments = [measure_hardware(place)]
    for turn in range(turns):
        for number in range(len(trained)):  # another one is first in each
            one = trained[(turn + number) % len(trained)]
            one.measured.append(_turn(one, x, y, steps))
        moments.append(measure_hardware(place))  # what neighbours leave changes within seconds
    styles = tuple(_looked_at(one, moments, x, y) for one in trained)
    if rank == 0:
        Path(out).write_text(Scene(size, rate, world, styles).to_json())
    dist.barrier()
    os._exit(0)  # no tidy end: groups of several steps would have to be left in one order


def _built(name: str, size: str, schedule: Any, x: Tensor, y: Tensor) -> Trained:
    model = models.build(CONFIGS[size])
    step = ws.compile(models.train_step, parallel=parallel(name), schedule=schedule)
    one = Trained(name, step, model, AdamW(model.parameters(), fused=True))
    for _ in range(WARM_STEPS):
        step(model, one.optimizer, x, y)
    return one


def _turn(one: Trained, x: Tensor, y: Tensor, steps: int) -> Measured:
    """Steps of one style. A step ends when the last rank is done; the first one does not count."""
    busy, own = machine.busy_seconds(), machine.own_seconds()
    dist.barrier()
    begun = time.monotonic()
    marks = [begun]
    for _ in range(1 + steps):
        one.step(one.model, one.optimizer, x, y).item()
        marks.append(time.monotonic())
    used = torch.tensor([machine.own_seconds() - own])
    ends = torch.tensor(marks, dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    took = time.monotonic() - begun
    others = max(machine.busy_seconds() - busy - float(used), 0.0) / took
    last = [float(end) for end in ends[1:]]
    return statistics.median(after - before for before, after in pairwise(last)) * 1e3, others


def _looked_at(one: Trained, moments: Sequence[Hardware], x: Tensor, y: Tensor) -> Style:
    found = one.step.profile(one.model, one.optimizer, x, y)
    schedule, simulated = one.step.schedule, found.predicted.simulated
    known = schedule.hardware if schedule else None
    classes = {name: (p / 1e3, m / 1e3) for name, (p, m) in found.classes().items()}
    waited = simulated.exposed_us / 1e3, found.measured.simulated.exposed_us / 1e3
    local = one.step.programs[-1].local
    kinds = {kind: total.count for kind, total in local.collectives().items()}
    data = one.step.strategies.options
    kept = {None: "", True: ", reshard", False: ", keep"}[data.reshard_after_forward]
    chosen = f"{data.kind.name}{kept}" if one.name.startswith("auto") else ""
    at = [simulate(local, moment).step_us / 1e3 for moment in moments]
    turns = [Turn(*its, sum(both) / 2) for its, both in zip(one.measured, pairwise(at), strict=True)]
    return Style(
        one.name, simulated.step_us / 1e3, tuple(turns), waited, kinds, classes,
        asdict(known) if isinstance(known, Hardware) else {}, chosen,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
