"""`on_nonfinite` on several ranks: what one rank's batch spoils is skipped on every rank, and every rank is told."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.unit.test_nonfinite import BAD, OPTIMIZERS, Batch, Net, Told, batch, made, same, train_step

from .launch import run_ranks

STYLES = ("replicate", "zero1", "zero2", "fully_shard")
CALLS = ("", *BAD, "", "")
Calls = list[tuple[int, tuple[str, ...]]]


def held(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of this rank's pieces of parameters, buffers and optimizer state."""
    tensors: dict[str, Any] = dict(model.state_dict())
    for i, param in enumerate(model.parameters()):
        tensors |= {f"{i}/{key}": value for key, value in optimizer.state[param].items()}
    return {n: (t.to_local() if hasattr(t, "to_local") else t).clone() for n, t in tensors.items()}


def given(rank: int, world: int, call: int, bad: str) -> Batch:
    """The last rank's batch is bad; all ranks have other data, but for `world` of 1. What is added to the loss is a
    number of all ranks.
    """
    *own, _ = batch(100 * call + rank, bad if rank == world - 1 else "")
    return (*own, batch(call, bad)[-1])  # type: ignore[return-value]


def train(rank: int, world: int, optimizer: str, **options: Any) -> Calls:
    """Skipped calls change nothing; the others compute, bit for bit, what they compute without the bad ones."""
    told, ours, good = Told(), made(optimizer), made(optimizer)
    step = ws.compile(train_step, on_nonfinite=told, **options)
    plain = ws.compile(train_step, **options)
    for call, bad in enumerate(CALLS):
        before = held(*ours) if call else {}
        step(*ours, *given(rank, world, call, bad))
        if bad:
            assert same(held(*ours), before), (options, bad)
        else:
            plain(*good, *given(rank, world, call, bad))
            assert same(held(*ours), held(*good)), (options, call)
    step.flush()
    return told.calls


def every_style(rank: int, world: int, first: int) -> list[Calls]:
    kinds = [(style, ("AdamW-fused", "SGD-momentum")[(first + n) % 2]) for n, style in enumerate(STYLES)]
    return [train(rank, world, optimizer, parallel=ws.DataParallel(style)) for style, optimizer in kinds]  # type: ignore[arg-type]


def in_stages(rank: int, world: int) -> list[Calls]:
    """All stages have the same batch."""
    whole = ws.Pipeline(schedule="1f1b")
    return [train(0, 1, name, mesh=f"pp={world}", parallel=whole) for name in ("AdamW-fused", "SGD-momentum")]


def squares(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_pieces_of_stages(rank: int, world: int) -> list[int]:
    """The last sample of one rank in `dp` is bad: the last piece of four."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    ours = model, torch.optim.AdamW(model.parameters())
    parallel = [ws.DataParallel("zero1", axis="dp"), ws.Pipeline(micro_batches=4)]
    step = ws.compile(squares, on_nonfinite="skip", mesh="pp=2,dp=2", parallel=parallel)
    skipped = list[int]()
    for call in range(4):
        shard = rank % 2
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * call + shard))
        x[-1, 0] = torch.inf if call % 2 and shard else x[-1, 0]
        before = held(*ours) if call else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step(*ours, x)
            step.flush()
        skipped.append(step.skipped)
        assert not call or same(held(*ours), before) == bool(call % 2)
    return skipped


def other_options(rank: int, world: int) -> list[Calls]:
    tensor = {"0": "colwise", "2": "rowwise"}
    shards = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel(tensor, axis="tp")]
    return [
        *(train(rank, world, name, parallel=ws.DataParallel("fully_shard")) for name in OPTIMIZERS),
        train(rank, world, "AdamW", parallel=ws.DataParallel("fully_shard"), backend="inductor"),
        train(rank, world, "AdamW", parallel=ws.DataParallel("fully_shard"), memory_bytes="1MiB"),
        train(rank, world, "AdamW", parallel=ws.DataParallel("zero1"), schedule="across_steps"),
        train(rank, world, "AdamW", parallel=ws.DataParallel("fully_shard", semantics="global")),
        train(rank, world, "AdamW", parallel=ws.DataParallel("fully_shard"), offload="cpu"),
        train(rank, world, "AdamW", mesh="replicate=2,shard=2", parallel=ws.DataParallel("hybrid")),
        train(rank // 2, world // 2, "AdamW", mesh="dp=2,tp=2", parallel=shards),
    ]  # fmt: skip


EXPECTED = [(call + 1, BAD[bad]) for call, bad in enumerate(CALLS) if bad]


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_rank_skips_what_one_rank_spoils(first: int) -> None:
    for rank in run_ranks(every_style, 2, first):
        assert rank == [EXPECTED] * len(rank)


def test_every_stage_skips_what_one_finds() -> None:
    for rank in run_ranks(in_stages, 2):
        assert rank == [EXPECTED] * len(rank)


@pytest.mark.full
def test_stages_skip_what_one_piece_of_one_rank_spoils() -> None:
    assert run_ranks(in_pieces_of_stages, 4) == [[0, 1, 1, 2]] * 4


@pytest.mark.full
def test_every_optimizer_mesh_and_backend_skips_it() -> None:
    for rank in run_ranks(other_options, 4, timeout=300):
        for told in rank:
            assert told == EXPECTED


def raised(rank: int, world: int) -> list[str]:
    """The error of each call, and of the flush at the end."""
    job, found = made("AdamW"), list[str]()
    step = ws.compile(train_step, on_nonfinite="raise", parallel=ws.DataParallel("fully_shard"))
    for call, bad in enumerate(("", "forward", "", "backward of the first layer")):
        try:
            step(*job, *given(rank, world, call, bad))
        except ws.NonFiniteError as error:
            found.append(f"{call}: {error.found}")
            dist.barrier()  # every rank is here: none waits in a collective of the step
            step(*job, *given(rank, world, call, bad))
    try:
        step.flush()
    except ws.NonFiniteError as error:
        found.append(f"flush: {error.found}")
    return found


def test_every_rank_raises_before_the_same_call() -> None:
    first = "2: call 2 of the step: the gradient of '0.weight' is not finite (and those of 5 more), nor is the loss"
    last = "flush: call 4 of the step: the gradient of '0.weight' is not finite (and those of 1 more)"
    assert run_ranks(raised, 2) == [[first, last]] * 2


def differs(rank: int, world: int) -> str:
    step = ws.compile(train_step, on_nonfinite="raise" if rank else "skip")
    try:
        step(*made("SGD"), *batch(rank))
    except ws.RankMismatchError as error:
        return error.found
    return ""


def own_loss(rank: int, world: int) -> tuple[Calls, bool]:
    """The loss of one rank alone is infinite, and no gradient."""
    job, told = made("AdamW"), Told()
    step = ws.compile(train_step, on_nonfinite=told)
    step(*job, *batch(rank))
    before = held(*job)
    step(*job, *batch(rank, "loss" if rank else ""))
    step.flush()
    return told.calls, same(held(*job), before)


def test_the_loss_of_one_rank_counts() -> None:
    assert run_ranks(own_loss, 2) == [([(2, ("loss",))], True)] * 2


def test_ranks_with_other_options_are_refused() -> None:
    text = "ranks differ in options of the step: on_nonfinite: raise on rank 1, skip on rank 0"
    assert run_ranks(differs, 2) == [text] * 2


def test_the_model_of_these_tests_is_finite_without_bad_batches() -> None:
    assert Net()(*batch(0)[:3]).isfinite().all()
