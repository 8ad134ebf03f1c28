"""The ways to run a step that are compared: each builds a model and returns a step of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import wholestep as ws

from .workload import Setting, train_step_of

Step = Callable[[Tensor, Tensor], Tensor]
BUDGET_SHARE = 0.85  # of what the peak without a bound adds to stored bytes: it asks for some recomputation, as usual


@dataclass
class Built:
    """A runner that is up; `compiled` is the step of wholestep behind it."""

    step: Step
    parameters: int
    compiled: ws.CompiledStep | None = None


@dataclass(frozen=True)
class Runner:
    """How a step is run. `inductor`: it compiles kernels, which takes long; `group`: it joins a process group first;
    `aside`: its time is not compared with the others', which trade no time for memory.
    """

    build: Callable[[Setting], Built]
    inductor: bool = False
    group: bool = False
    aside: bool = False
    described: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def torch_runner(setting: Setting, mode: str | None = "eager") -> Built:
    """The step as written; any mode but eager compiles model and loss as one graph with torch.compile."""
    model, optimizer = setting.build()
    loss: Any = setting.loss if mode == "eager" else torch.compile(setting.loss, fullgraph=True, mode=mode)
    step = train_step_of(setting, loss)
    return Built(lambda x, y: step(model, optimizer, x, y), sum(p.numel() for p in model.parameters()))


def fsdp2(setting: Setting) -> Built:
    """`fully_shard` of each layer and the whole, on one rank."""
    from torch.distributed.fsdp import fully_shard

    model, _ = setting.build()
    count = sum(p.numel() for p in model.parameters())
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block)
    fully_shard(model)
    optimizer, step = setting.optimizer_of(model), train_step_of(setting)
    return Built(lambda x, y: step(model, optimizer, x, y), count)


def wholestep(setting: Setting, **options: Any) -> Built:
    """The whole step, compiled with these options."""
    model, optimizer = setting.build()
    count = sum(p.numel() for p in model.parameters())
    compiled = ws.compile(train_step_of(setting), device=_device(setting), progress=None, **options)
    return Built(lambda x, y: compiled(model, optimizer, x, y), count, compiled)


def with_less_memory(setting: Setting) -> Built:
    """The whole step under a bound on its memory: a share of what it takes without one, by the prediction."""
    free = wholestep(setting)
    free.step(*setting.batch(0))
    local: Any = getattr(free.compiled, "local_graph", None)
    peak = ws.peak_memory(local)
    del free
    budget = peak.rest_bytes + BUDGET_SHARE * (peak.size_bytes - peak.rest_bytes)
    return wholestep(setting, memory_bytes=int(budget))


def _device(setting: Setting) -> str:
    return "cuda:0" if setting.device == "cuda" else setting.device


RUNNERS: dict[str, Runner] = {
    "eager": Runner(torch_runner),
    "fsdp2": Runner(fsdp2, group=True, described="FSDP2 on one rank"),
    "wholestep:eager": Runner(lambda s: wholestep(s, cuda_graphs=False), described="op by op"),
    "wholestep": Runner(wholestep, described="recorded, as by default"),
    "wholestep:nccl": Runner(
        lambda s: wholestep(s, parallel=ws.DataParallel("fully_shard")),
        group=True,
        described="in an NCCL job of one rank",
    ),
    "wholestep:recompute": Runner(
        with_less_memory, aside=True, described=f"memory_bytes: {BUDGET_SHARE:.0%} of the peak beyond what is stored"
    ),
    "wholestep:offload": Runner(lambda s: wholestep(s, offload="cpu"), aside=True),
    "compile": Runner(lambda s: torch_runner(s, None), inductor=True, described="torch.compile of model and loss"),
    "compile:reduce-overhead": Runner(lambda s: torch_runner(s, "reduce-overhead"), inductor=True),
    "wholestep:inductor": Runner(lambda s: wholestep(s, backend="inductor", cuda_graphs=False), inductor=True),
    "wholestep:inductor+graph": Runner(lambda s: wholestep(s, backend="inductor"), inductor=True),
}


def join_group(device: str) -> None:
    """A process group of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
        options: dict[str, Any] = {"device_id": torch.device("cuda", 0)}
    else:
        options = {}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1, **options
    )
