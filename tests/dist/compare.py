"""What a rank runs to compare wholestep with DDP or FSDP2: both train on this rank's batches from the same start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS, Batch, Case, Recipe

STEPS = 5
KINDS = {
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "reduce_scatter",  # what gloo runs in its place
    "alltoall": "reduce_scatter",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Job:
    """One comparison. `lr` overrides the recipe's; `rows` gives each rank that many samples of its batch."""

    case: str
    recipe: str = "SGD-plain"
    parallel: ws.DataParallel = field(default_factory=ws.DataParallel)
    against: str = "ddp"
    mesh: str | None = None
    lr: float | None = None
    their_lr: float | None = None
    rows: tuple[int, ...] = ()
    keep_grads: bool = False
    transform: Callable[[ws.LocalGraph], ws.LocalGraph] | None = None
    schedule: Any = None
    mixed_precision: ws.MixedPrecision | None = None

    def __str__(self) -> str:
        return f"{self.case}/{self.recipe}/{self.parallel.style}"


@dataclass
class Found:
    """What one rank saw; differences are the largest, absolute, over all tensors and ranks' own pieces made whole."""

    param: float = 0.0
    state: float = 0.0
    buffer: float = 0.0
    loss: float = 0.0
    grad: float = 0.0
    planned: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    bytes_planned: int = 0
    bytes_held: int = 0
    bytes_whole: int = 0
    captures: int = 0
    layouts: dict[str, str] = field(default_factory=dict)
    program: str = ""
    params: list[Tensor] = field(default_factory=list)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def difference(ours: Tensor, theirs: Tensor) -> float:
    a, b = whole(ours), whole(theirs)
    assert a.shape == b.shape, f"{list(a.shape)} is not {list(b.shape)}"
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def counts(mode: CommDebugMode) -> dict[str, int]:
    """Collectives by kind, whatever library of torch started them."""
    out: dict[str, int] = {}
    for op, number in mode.get_comm_counts().items():
        kind = next(
            (kind for word, kind in KINDS.items() if word in str(op).replace("all_reduce", "allreduce")), "other"
        )
        out[kind] = out.get(kind, 0) + number
    return {kind: number for kind, number in out.items() if number}


def make(recipe: Recipe, model: nn.Module, lr: float | None) -> Optimizer:
    options = recipe.options | ({} if lr is None else {"lr": lr})
    return Recipe(recipe.name, recipe.kind, options, recipe.second).make(model.parameters())


def reference(job: Job, model: nn.Module) -> nn.Module:
    parallel = job.parallel
    if job.against == "ddp":
        unused = job.case == "partly-used"
        return DistributedDataParallel(
            model, broadcast_buffers=parallel.broadcast_buffers, find_unused_parameters=unused
        )
    precision = job.mixed_precision
    policy = MixedPrecisionPolicy(precision.param, precision.reduce) if precision else MixedPrecisionPolicy()
    return fully_shard(model, mp_policy=policy)  # type: ignore[return-value]


def first(change: Callable[[ws.LocalGraph], ws.LocalGraph]) -> Callable[..., Any]:
    """A list of passes with `change` before all others."""
    return lambda passes: [change, *passes]


def run_jobs(rank: int, world: int, jobs: list[Job]) -> list[Found]:
    return [run_job(rank, world, job) for job in jobs]


def run_job(rank: int, world: int, job: Job) -> Found:
    """Five steps of both. Ranks start from different weights: both take the first rank's."""
    case, recipe = CASES[job.case], OPTIMIZERS[job.recipe]
    seed = rank if job.against == "ddp" else 0
    ours, theirs = case.build(torch.float32, seed), case.build(torch.float32, seed)
    reference_model = reference(job, theirs)
    optimizer, other = make(recipe, ours, job.lr), make(recipe, theirs, job.their_lr or job.lr)
    step = ws.compile(
        case.step,
        parallel=job.parallel,
        mesh=job.mesh,
        keep_grads=job.keep_grads,
        passes=job.transform and first(job.transform),
        schedule=job.schedule,
        mixed_precision=job.mixed_precision,
    )
    found = Found()
    for i in range(STEPS):
        batch = batch_of(case, job, 10 * i + rank)
        if i == STEPS - 1:
            with CommDebugMode() as mode:
                loss = step(ours, optimizer, batch)
            found.seen = counts(mode)
        else:
            loss = step(ours, optimizer, batch)
        expected = case.step(reference_model, other, batch)
        found.loss = max(found.loss, difference(loss, expected))
    compare(found, step, ours, optimizer, theirs, other, job)
    return found


def batch_of(case: Case, job: Job, seed: int) -> Batch:
    batch = case.batches(seed, torch.float32)
    if job.rows:
        batch = {key: value[: job.rows[dist.get_rank()]] for key, value in batch.items()}
    return batch


def compare(
    found: Found,
    step: ws.CompiledStep,
    ours: nn.Module,
    optimizer: Optimizer,
    theirs: nn.Module,
    other: Optimizer,
    job: Job,
) -> None:
    assert step.plan is not None
    assert step.local_graph is not None
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, nn.Parameter), f"{name} is a {type(mine).__name__}"
        found.param = max(found.param, difference(mine, their))
        found.state = max(found.state, *_state(optimizer, mine, other, their), 0.0)
        if job.keep_grads and their.grad is not None:
            assert mine.grad is not None, f"{name} has no gradient"
            found.grad = max(found.grad, difference(mine.grad, their.grad))
        found.bytes_held += local(mine).numel() * mine.element_size()
        found.bytes_whole += mine.numel() * mine.element_size()
        for value in optimizer.state.get(mine, {}).values():
            found.bytes_held += local(value).numel() * value.element_size()
            found.bytes_whole += value.numel() * value.element_size()
        found.layouts[name] = step.plan.storage[name].show(mine.shape)
        found.params.append(whole(mine))
    grouped = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert grouped == {id(p) for p in ours.parameters()}, "the optimizer holds other parameters than the model"
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        found.buffer = max(found.buffer, difference(a, b))
    found.planned = {kind: total.count for kind, total in step.local_graph.collectives().items()}
    found.bytes_planned = step.plan.stored_bytes("param") + step.plan.stored_bytes("state")
    found.captures, found.program = step.captures, str(step.local_graph)


def _state(optimizer: Optimizer, mine: nn.Parameter, other: Optimizer, their: nn.Parameter) -> list[float]:
    kept, expected = optimizer.state.get(mine, {}), other.state.get(their, {})
    tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    assert tensors.keys() <= kept.keys(), f"state {tensors.keys() - kept.keys()} is missing"
    return [difference(kept[key], value) for key, value in tensors.items()]
