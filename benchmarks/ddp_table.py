"""The same models compiled inside DDP, split on its buckets, and captured as one whole step: what each is made of.

    python -m benchmarks.ddp_table [--only TEXT]

One process, one gloo rank, the inner backend "eager": it counts graphs and compilations, and measures no time. Columns:

    dynamo         graphs that dynamo hands over for one forward; with breaks between them if there are several
    torch          compilations by torch's own splitter (`torch._dynamo.config.optimize_ddp`)
    wholestep.ddp  compilations by ours, and the bytes of gradients that are complete after each, input to output
    DDP            the buckets that DDP's reducer logs once it has made them anew under ours, in the same order
    whole step     graphs and graph breaks of `ws.compile` for forward, backward and optimizer, and its all-reduces
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import wholestep as ws
from tests.ddp_models import CASES, Case

HEAD = ("model", "cap", "dynamo", "torch", "wholestep.ddp", "DDP", "whole step")


class Counting:
    """Counts the graphs that it is given to compile."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, part: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile nothing."""
        self.calls += 1
        return part.forward


def wrapped(case: Case) -> Ddp:
    model = case.make()
    if case.ignore:
        Ddp._set_params_and_buffers_to_ignore_for_model(model, list(case.ignore))
    return Ddp(model, bucket_cap_mb=case.cap_mb)


def train(model: Callable[..., Tensor], case: Case, steps: int) -> None:
    torch._dynamo.reset()
    for _ in range(steps):
        loss = model(*case.inputs()).float().square().mean()
        if not loss.requires_grad:
            return
        loss.backward()


def by_torch(case: Case) -> int:
    inner = Counting()
    with torch._dynamo.config.patch(optimize_ddp=True):
        train(torch.compile(wrapped(case), backend=inner), case, 1)
    return inner.calls


def by_us(case: Case) -> tuple[int, list[int], str]:
    inner, ddp = Counting(), wrapped(case)
    backend = ws.ddp_backend(inner=inner)
    train(torch.compile(ddp, backend=backend), case, 3)  # DDP logs its buckets with the third
    logged = str(ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))
    sizes = [bucket.size_bytes for bucket in backend.buckets]
    assert inner.calls == sum(len(split.buckets) for split in backend.splits)
    return len(backend.splits), sizes, _sum([int(size) for size in reversed(logged.split(",")) if size])


def _sum(sizes: list[int]) -> str:
    if len(set(sizes)) == 1 < len(sizes):
        return f"{len(sizes)} x {sizes[0]:,}"
    return " + ".join(f"{size:,}" for size in sizes)


def whole(case: Case) -> str:
    model = case.make()
    for name in case.ignore:
        model.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(*args).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    try:
        graph = ws.capture(train_step, model, optimizer, *case.inputs())
    except (ws.CaptureError, RuntimeError):
        return "nothing to train"
    moved = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate"))).collectives()["all_reduce"]
    return f"1 graph, 0 breaks; {moved.count} all-reduces, {moved.bytes:,} bytes"


def row(case: Case) -> tuple[str, ...]:
    graphs, sizes, logged = by_us(case)
    ours = _sum(sizes)
    return (case.name, f"{case.cap_mb:g} MiB", str(graphs), str(by_torch(case)), ours, logged or "-", whole(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name holds this")
    only = parser.parse_args().only
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for case in CASES:
        if only in case.name:
            print("| " + " | ".join(row(case)) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
