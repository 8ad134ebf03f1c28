"""The torch peers: each row of WRAPS turns the model of one device into what this rank trains."""

import copy
import datetime
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from tests.live_bytes import LiveBytes

from . import models
from .job import Job
from .spec import Spec
from .wire import BesideTheWire

BUCKETS_MB = (1.0, 4.0, 10.0, 25.0)
UNTIMED_STEPS, TUNING_STEPS = 2, 4  # buckets are laid out anew after the first backward
TIMEOUT = datetime.timedelta(seconds=200)
PIPE_TIMEOUT = datetime.timedelta(seconds=60)  # a schedule that deadlocks on gloo fails as a peer, soon
Step = Callable[[nn.Module, Optimizer, Tensor, Tensor], Tensor]


@dataclass
class Wrapped:
    """A model ready for distributed training, its optimizer, and the step to call them with."""

    model: nn.Module
    optimizer: Optimizer
    step: Step = models.train_step
    note: str = ""


def alone(model: nn.Module, job: Job) -> Wrapped:
    """Nothing is exchanged."""
    return Wrapped(_compiled(model, job.spec), models.adamw(model, job.config))


def wire(model: nn.Module, job: Job) -> Wrapped:
    """As many bytes on the wire as gradients need, and nothing waits for them before the end."""
    spec = job.spec
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    bucket = int(spec.number("bucket", 1.0) * (1 << 20))
    return Wrapped(
        model, models.adamw(model, job.config), BesideTheWire(size, bucket, spec.has("late"), spec.has("parts"))
    )


def ddp(model: nn.Module, job: Job) -> Wrapped:
    """DistributedDataParallel with the options that the spec names."""
    spec = job.spec
    if spec.has("tuned"):
        return _tuned_ddp(model, job)
    bucket = spec.number("bucket", 25.0)
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=bucket, gradient_as_bucket_view=spec.has("view"), static_graph=spec.has("static")
    )
    return Wrapped(_compiled(wrapped, spec), models.adamw(model, job.config))


def _tuned_ddp(model: nn.Module, job: Job) -> Wrapped:
    """Try every bucket size on copies of the model, in turns, and keep the fastest, the same on all ranks."""
    trials = [_bucket_view(copy.deepcopy(model), bucket) for bucket in BUCKETS_MB]
    x, y = models.zeros(job)
    seconds = torch.zeros(UNTIMED_STEPS + TUNING_STEPS, len(trials))
    for round_seconds in seconds:
        for number, trial in enumerate(trials):
            dist.barrier()
            begun = time.monotonic()
            models.loss_of(trial, x, y).backward()
            round_seconds[number] = time.monotonic() - begun
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    best = BUCKETS_MB[int(seconds[UNTIMED_STEPS:].amin(0).argmin())]
    return Wrapped(_bucket_view(model, best), models.adamw(model, job.config), note=f"buckets of {best:g} MB")


def _bucket_view(model: nn.Module, bucket: float) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=bucket, gradient_as_bucket_view=True, static_graph=True)


def zero(model: nn.Module, job: Job) -> Wrapped:
    """DDP whose optimizer keeps state for this rank's part alone, and broadcasts what it updated."""
    wrapped = _bucket_view(model, 25.0)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=True, lr=job.config.learning_rate, fused=True
    )
    return Wrapped(wrapped, optimizer)


def fsdp2(model: nn.Module, job: Job) -> Wrapped:
    """fully_shard of every block, then of the rest."""
    mesh, spec = init_device_mesh("cpu", (job.world,)), job.spec
    layers = models.blocks(model)
    for layer in layers:
        if spec.has("compile"):
            layer.compile()
        fully_shard(layer, mesh=mesh, reshard_after_forward=not spec.has("keep"))
    fully_shard(model, mesh=mesh, reshard_after_forward=not spec.has("keep"))
    if spec.has("async"):
        _gather_ahead(model, layers)
    return Wrapped(model, models.adamw(model, job.config))


def _gather_ahead(model: nn.Module, layers: list[nn.Module]) -> None:
    """Gathers overlap with arithmetic on gloo only when they are told to; no public name does that."""
    assert isinstance(model, FSDPModule), "wrapped by fully_shard"
    model._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
    for layer, following in pairwise(layers):
        assert isinstance(layer, FSDPModule), "wrapped by fully_shard"
        assert isinstance(following, FSDPModule), "wrapped by fully_shard"
        layer.set_modules_to_forward_prefetch([following])


def ours(model: nn.Module, job: Job) -> Wrapped:
    """Ours. Its module is imported here: it is no memory of other peers."""
    from .ours import compiled

    return Wrapped(model, models.adamw(model, job.config), *compiled(model, job))


def pipe(model: nn.Module, job: Job) -> Wrapped:
    """The layers of this rank, in a pipeline of torch, which is imported here."""
    from .pipes import torch_pipe

    return Wrapped(*torch_pipe(model, job))


def tokens(model: nn.Module, job: Job) -> Wrapped:
    """DDP over parts of sequences, which is imported here."""
    from .sequences import over_tokens

    return Wrapped(*over_tokens(model, job))


def _compiled(model: nn.Module, spec: Spec) -> nn.Module:
    if not spec.has("compile"):
        return model
    compiled: Any = torch.compile(model)
    return compiled


Wrap = Callable[[nn.Module, Job], Wrapped]
WRAPS: dict[str, Wrap] = {
    "one": alone,
    "floor": alone,
    "wire": wire,
    "ddp": ddp,
    "zero": zero,
    "fsdp2": fsdp2,
    "wholestep": ours,
    "pipe": pipe,
    "stages": ours,
    "tokens": tokens,
    "context": ours,
}


class TorchTrainer:
    """A wrapped model and what is counted about it."""

    def __init__(self, wrapped: Wrapped, parameter_bytes: int, job: Job) -> None:
        self._wrapped, self._parameter_bytes, self._job, self.update_seconds = wrapped, parameter_bytes, job, 0.0

    @property
    def note(self) -> str:
        """What the peer chose by itself."""
        return self._wrapped.note

    def watch_updates(self) -> None:
        """Time the optimizer's own step."""
        optimizer = self._wrapped.optimizer

        def before(*_: Any) -> None:
            self.update_seconds -= time.monotonic()

        def after(*_: Any) -> None:
            self.update_seconds += time.monotonic()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def prepare(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Tensors over the same memory."""
        return torch.from_numpy(x), torch.from_numpy(y)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One step."""
        wrapped = self._wrapped
        return wrapped.step(wrapped.model, wrapped.optimizer, *batch).item()

    def finish(self) -> None:
        """A step of ours may end in the next one."""
        step: Any = self._wrapped.step
        if self._job.spec.is_ours:
            step.flush()

    def rest_bytes(self) -> int:
        """Each storage once."""
        optimizer: Any = self._wrapped.optimizer
        state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer holds this rank's part in .optim
        held = [*self._wrapped.model.parameters(), *(v for values in state.values() for v in values.values())]
        sizes: dict[int, int] = {}
        for value in held:
            if isinstance(value, Tensor):
                storage = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def parameter_bytes(self) -> int:
        """As built, before anything was sharded."""
        return self._parameter_bytes

    def tensor_bytes(self, batch: tuple[Tensor, Tensor]) -> int:
        """Counted after each op; of peers that run op by op on plain tensors: pipelines, and what trains alone."""
        spec = self._job.spec
        if spec.compiled or not (spec.is_pipe or spec.base in ("one", "floor")):
            return 0
        kinds = (Tensor, nn.Parameter)
        with LiveBytes(thing for thing in gc.get_objects() if type(thing) in kinds) as watch:
            self.step(batch)
            self.finish()
        return watch.peak

    def hardware(self) -> str:
        """As all ranks of a compiled step measure it now."""
        from .ours import measured_hardware

        step: Any = self._wrapped.step
        return measured_hardware(step)

    def simulated_ms(self, hardware: Sequence[str]) -> list[float]:
        """Of our pipelines what runs; of a peer that exchanges nothing its step, planned for one rank."""
        spec: Spec = self._job.spec
        step: Any = self._wrapped.step
        if not hardware or self._job.rank:
            return []
        from .ours import program_alone, program_of, simulated_ms

        if spec.measures:
            return simulated_ms(program_of(step) if spec.is_pipe else step.local_graph, hardware)
        if spec.base in ("one", "floor") and not spec.compiled:
            model = models.build(self._job.config)
            x, y = models.zeros(self._job)
            return simulated_ms(program_alone(model, models.adamw(model, self._job.config), x, y), hardware)
        return []

    def collectives(self, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
        """As the process group saw them. A profiler that ends before a collective of gloo does crashes (torch 2.13)."""
        with profile(activities=[ProfilerActivity.CPU]) as found:
            self.step(batch)
            self.finish()
        events: list[Any] = list(found.events() or [])
        names = [str(event.name) for event in events if event.name.startswith("c10d::")]
        return dict(Counter(name.removeprefix("c10d::").strip("_") for name in names))


def torch_trainer(job: Job) -> TorchTrainer:
    """Join the other ranks, then wrap the model that all peers start from."""
    torch.set_num_threads(1)
    if job.spec.exchanges:
        url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        patience = PIPE_TIMEOUT if job.spec.base == "pipe" else TIMEOUT
        dist.init_process_group("gloo", init_method=url, rank=job.rank, world_size=job.world, timeout=patience)
    model = models.build(job.config)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    trainer = TorchTrainer(WRAPS[job.spec.base](model, job), size, job)
    if job.spec.base == "floor":
        trainer.watch_updates()
    return trainer
