"""`with ws.whole(...)`: plain, whole tensors to read and write between two steps.

The oracle is one process that trains on the batches of all ranks together and does the same between its steps.
"""

import copy
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_calls_between_steps import STYLES, TP, Both, Net, batch


def same(both: Both) -> None:
    """Parameters, buffers and optimizer state are those of the oracle."""
    with ws.whole(both.model, both.optimizer, writeback=False):
        torch.testing.assert_close(both.model.state_dict(), both.oracle.state_dict())
        torch.testing.assert_close(both.optimizer.state_dict(), both.its_optimizer.state_dict())


def write(model: Any, optimizer: torch.optim.Optimizer, replaces: bool = False) -> None:
    """Surgery on all there is: in place, through `.data`, by another Parameter, by load_state_dict; state too."""
    assert all(type(p) is nn.Parameter and not isinstance(p.data, DTensor) for p in model.parameters())
    with torch.no_grad():
        model.table.weight[3] = 0.5
        model.up.weight.data = model.up.weight.data * 0.9
        model.down.load_state_dict({k: v + 0.01 for k, v in model.down.state_dict().items()})
        model.seen.add_(5)
    weight = model.norm.weight.detach() * 1.1
    if replaces:
        model.norm.weight = nn.Parameter(weight)
    else:
        model.norm.weight.data = weight
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["exp_avg"].mul_(0.5)
    assert model.head.weight is model.table.weight


def _writes(rank: int, world: int, parallel: Any, mesh: str | None, ranks: int, options: dict[str, Any]) -> None:
    both = Both(rank if ranks == world else rank // (world // ranks), ranks, parallel, mesh, **options)
    both.train(2)
    before = list(both.model.parameters())
    captures = both.step.captures
    same(both)
    with ws.whole(both.model, both.optimizer):
        write(both.model, both.optimizer, replaces=True)
    write(both.oracle, both.its_optimizer)
    assert all(p is q for p, q in zip(both.model.parameters(), before, strict=True))
    assert all(p is q for p, q in zip(both.optimizer.param_groups[0]["params"], before, strict=True))
    same(both)
    both.train(2)
    same(both)
    assert both.step.captures == captures, both.step.misses


@pytest.mark.usual("replicate-1", "fully_shard-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_is_kept(style: str, world: int) -> None:
    run_ranks(_writes, world, ws.DataParallel(style), None, world, {})


def test_across_steps() -> None:
    run_ranks(_writes, 2, ws.DataParallel("fully_shard"), None, 2, {"schedule": "across_steps"})


@pytest.mark.full
def test_hybrid_and_two_axes() -> None:
    run_ranks(_writes, 4, ws.DataParallel("hybrid"), "replicate=2,shard=2", 4, {})
    two = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel(TP, axis="tp")]
    run_ranks(_writes, 4, two, "dp=2,tp=2", 2, {})


def test_without_a_step_and_without_ranks() -> None:
    model, optimizer = nn.Linear(3, 2), None
    before = model.weight
    start = model.weight.detach().clone()
    with ws.whole(model, optimizer), torch.no_grad():
        model.weight.zero_()
        assert torch.equal(before, start)
    assert model.weight is before
    assert torch.equal(before, torch.zeros(2, 3))


def _dropped(rank: int, world: int, style: str) -> None:
    both = Both(rank, world, ws.DataParallel(style))
    both.train(2)
    before = list(both.model.parameters())
    with ws.whole(both.model, both.optimizer, writeback=False):
        write(both.model, both.optimizer)
    same(both)
    with pytest.raises(ValueError, match="mine"), ws.whole(both.model, both.optimizer):  # noqa: PT012
        write(both.model, both.optimizer)
        raise ValueError("mine")
    same(both)
    assert all(p is q for p, q in zip(both.model.parameters(), before, strict=True))
    both.train()
    same(both)


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s == "fully_shard" else pytest.mark.full) for s in STYLES]
)
def test_what_is_not_to_be_kept_is_dropped(style: str) -> None:
    run_ranks(_dropped, 2, style)


def _refused(rank: int, world: int) -> None:
    both = Both(rank, world, ws.DataParallel("fully_shard"), agree_timeout=2.0)
    both.train()
    captures = both.step.captures
    with ws.whole(both.model):
        with pytest.raises(ws.StateError) as nested, ws.whole(both.model):
            pass
        with pytest.raises(ws.StateError) as step:
            both.step(both.model, both.optimizer, batch(9, rank))
    assert str(nested.value) == (
        "'scale' is an unsharded copy, for `with ws.whole(...)`, which a step cannot update\n"
        "  needed: the parameters themselves, which are restored after it\n"
        "  next: end it first: a compiled step, or another `ws.whole`, cannot run inside"
    )
    assert str(step.value) == str(nested.value)
    same(both)

    with pytest.raises(ws.RankMismatchError) as caught, ws.whole(both.model, both.optimizer), torch.no_grad():
        both.model.up.weight[0] += rank
    assert str(caught.value) == (
        "up.weight is not the same on ranks 0 and 1 at the end of `with ws.whole(...)`\n"
        "  needed: the same values on all ranks, each of which keeps its own part\n"
        "  next: write on every rank, not on one; draw random numbers from one seed; nothing was kept"
    )
    same(both)
    with pytest.raises(ws.StateError) as caught, ws.whole(both.model):
        both.model.up.weight = nn.Parameter(torch.zeros(14, 6, dtype=torch.float64))
    assert str(caught.value) == (
        "'up.weight' has become float64[14, 6] inside `with ws.whole(...)`\n"
        "  needed: a plain tensor like the one that was there, float64[13, 6]\n"
        "  next: change shapes and dtypes before the first call of the step"
    )
    same(both)
    kind = ws.StateError if rank else ws.RankMismatchError
    with pytest.raises(kind) as caught, ws.whole(both.model):  # noqa: PT012
        if rank:
            both.model.down.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    there = "" if rank else "on rank 1, "
    found = "'down.bias' has become float64[7] inside `with ws.whole(...)`"
    assert str(caught.value).splitlines()[0] == there + found
    same(both)
    start = time.monotonic()
    if rank == 0:
        text = r"`with ws.whole\(Net\)`: rank 0 is there, ranks \[1\] did not"
        with pytest.raises(ws.RankMismatchError, match=text), ws.whole(both.model, timeout=1.0):
            pass
        assert time.monotonic() - start < 10
    both.train()
    same(both)
    assert both.step.captures == captures, both.step.misses


def test_what_cannot_be_kept_is_refused() -> None:
    run_ranks(_refused, 2)


def _frozen(rank: int, world: int, style: str) -> None:
    both = Both(rank, world, ws.DataParallel(style))
    both.train()
    with ws.whole(both.model):
        both.model.up.requires_grad_(False)
    both.oracle.up.requires_grad_(False)
    assert not both.model.up.weight.requires_grad
    both.train(2)
    same(both)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.full), "fully_shard"])
def test_what_is_frozen_inside_stays_so(style: str) -> None:
    run_ranks(_frozen, 2, style)


# -- averages of the weights -----------------------------------------------------------------------------------------


class ModelEma:
    """What image libraries do: a copy of the model whose state dict follows the model's."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, now in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * now)

    def read(self) -> Iterable[Tensor]:
        return self.module.parameters()


class Swa:
    """torch's own average."""

    def __init__(self, model: nn.Module) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def update(self, model: nn.Module) -> None:
        self.average.update_parameters(model)

    def read(self) -> Iterable[Tensor]:
        return self.average.module.parameters()


class Diffusers:
    """A list of shadows of `model.parameters()`."""

    def __init__(self, model: nn.Module) -> None:
        from diffusers.training_utils import EMAModel

        self.ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=False)

    def update(self, model: nn.Module) -> None:
        self.ema.step(model.parameters())

    def read(self) -> Iterable[Tensor]:
        return self.ema.shadow_params


def _averaged(rank: int, world: int, style: str, kind: Callable[[nn.Module], Any], way: str) -> None:
    both = Both(rank, world, ws.DataParallel(style))
    if way != "late":
        mean = kind(both.model)
    theirs = kind(both.oracle)
    for number in range(3):
        both.train()
        theirs_before = theirs if number or way != "late" else (theirs := kind(both.oracle))
        if number == 0 and way == "late":  # made when the model is cut already
            mean = kind(both.model)
        if way == "early":
            with ws.whole(both.model, writeback=False):
                mean.update(both.model)
        else:
            mean.update(both.model)
        theirs_before.update(both.oracle)
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in mean.read()]
    torch.testing.assert_close(whole, list(theirs.read()))
    if hasattr(mean, "module"):
        x = batch(50, rank)
        with torch.no_grad():
            torch.testing.assert_close(mean.module(x), theirs.module(x))
    same(both)


@pytest.mark.crossed
@pytest.mark.parametrize("way", ["early", "late"])
@pytest.mark.parametrize("kind", [ModelEma, Swa, Diffusers])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_averages_follow_between_steps(style: str, kind: Callable[[nn.Module], Any], way: str) -> None:
    """Early: made before the first step, updated inside a block. Late: made of the cut model, updated as it is."""
    if kind is Diffusers:
        pytest.importorskip("diffusers")
    run_ranks(_averaged, 2, style, kind, way)


def _swapped_in(rank: int, world: int) -> None:
    """The averages take the place of the weights for an evaluation, as samplers do."""
    both = Both(rank, world, ws.DataParallel("fully_shard"))
    mean = Diffusers(both.model)
    theirs = Diffusers(both.oracle)
    x = batch(50, rank)
    for _ in range(3):
        both.train()
        both.model.eval(), both.oracle.eval()
        with ws.whole(both.model, writeback=False), torch.no_grad():
            mean.update(both.model)
            mean.ema.copy_to(both.model.parameters())
            found = both.model(x)
        theirs.update(both.oracle)
        theirs.ema.store(both.oracle.parameters())
        theirs.ema.copy_to(both.oracle.parameters())
        with torch.no_grad():
            torch.testing.assert_close(found, both.oracle(x))
        theirs.ema.restore(both.oracle.parameters())
        both.model.train(), both.oracle.train()
    same(both)


def test_averages_take_the_place_of_weights() -> None:
    pytest.importorskip("diffusers")
    run_ranks(_swapped_in, 2)


def _exported(rank: int, world: int, folder: str) -> None:
    both = Both(rank, world, ws.DataParallel("fully_shard"))
    both.train(2)
    with ws.whole(both.model, writeback=False):
        if rank == 0:
            torch.save(both.model.state_dict(), Path(folder) / "model.pt")
    dist.barrier()
    fresh = Net().double()
    fresh.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
    torch.testing.assert_close(fresh.state_dict(), both.oracle.state_dict())


def test_export(tmp_path: Path) -> None:
    run_ranks(_exported, 2, str(tmp_path))
