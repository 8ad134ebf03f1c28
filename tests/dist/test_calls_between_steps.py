"""The model between two calls of a step: eager forwards, a compiled evaluation, and calls that ranks do not share.

The oracle is one process that trains on the batches of all ranks together, and evaluates on each rank's data.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks

STYLES = ["replicate", "zero1", "fully_shard"]
TP = {"up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    """A tied head, a parameter that the model itself reads, a buffer that training moves; no size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(self.table(x)))))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 1:
            raise ValueError("one token is no text")
        if self.training:
            self.seen.add_(1.0)
        return self.head(self.encode(x)) * self.scale

    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def batch(number: int, rank: int) -> Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(100 * number + rank))


class Both:
    """The same training twice: by a step on this mesh, and in one process on the batches of all ranks."""

    def __init__(self, rank: int, ranks: int, parallel: Any, mesh: str | None = None, **options: Any) -> None:
        (self.model, self.optimizer), (self.oracle, self.its_optimizer) = make(), make()
        self.step = ws.compile(train_step, parallel=parallel, mesh=mesh, **options)
        self.rank, self.ranks, self.number = rank, ranks, 0

    def train(self, times: int = 1) -> None:
        for _ in range(times):
            self.step(self.model, self.optimizer, batch(self.number, self.rank))
            train_step(self.oracle, self.its_optimizer, torch.cat([batch(self.number, r) for r in range(self.ranks)]))
            self.number += 1

    def compare(self) -> None:
        self.step.flush()
        for name, param in self.model.named_parameters():
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            torch.testing.assert_close(whole.detach(), self.oracle.get_parameter(name).detach(), msg=name)


def _uses(rank: int, world: int, parallel: Any, mesh: str | None, ranks: int, options: dict[str, Any]) -> None:
    both = Both(rank if ranks == world else rank // (world // ranks), ranks, parallel, mesh, **options)
    model, oracle = both.model, both.oracle
    x = batch(99, both.rank)
    both.train(2)
    before = list(model.parameters())
    placed = [isinstance(p, DTensor) for p in before]
    captures = both.step.captures
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model.eval(), oracle.eval()
            for use in USES:
                torch.testing.assert_close(use(model, x), use(oracle, x), msg=use.__name__)
                assert all(p is q for p, q in zip(model.parameters(), before, strict=True)), use.__name__
            with pytest.raises(ValueError, match="one token is no text"):
                model(x[:1, :1])
            assert model.head.weight is model.table.weight
            assert [isinstance(p, DTensor) for p in model.parameters()] == placed
        model.train(), oracle.train()
        both.train()
    both.compare()
    assert both.step.captures == captures, both.step.misses


def call(model: Any, x: Tensor) -> Tensor:
    return model(x)


def call_a_method(model: Any, x: Tensor) -> Tensor:
    return model.encode(x)


def call_a_part(model: Any, x: Tensor) -> Tensor:
    return model.head(model.down(model.up(model.table(x))))


def generate(model: Any, x: Tensor) -> Tensor:
    return model.generate(x, 3)


def a_functional_call(model: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def a_copy(model: Any, x: Tensor) -> Tensor:
    return copy.deepcopy(model)(x)


USES: list[Callable[[Any, Tensor], Tensor]] = [call, call_a_method, call_a_part, generate, a_functional_call, a_copy]


@pytest.mark.usual("replicate-1", "fully_shard-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_model_is_used_between_steps(style: str, world: int) -> None:
    run_ranks(_uses, world, ws.DataParallel(style), None, world, {})


def test_across_steps() -> None:
    run_ranks(_uses, 2, ws.DataParallel("fully_shard"), None, 2, {"schedule": "across_steps"})


@pytest.mark.full
def test_hybrid_and_two_axes() -> None:
    run_ranks(_uses, 4, ws.DataParallel("hybrid"), "replicate=2,shard=2", 4, {})
    two = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel(TP, axis="tp")]
    run_ranks(_uses, 4, two, "dp=2,tp=2", 2, {})


def _alone(rank: int, world: int) -> None:
    both = Both(rank, world, ws.DataParallel("fully_shard"), agree_timeout=3.0)
    both.train()
    if rank == 0:
        start = time.monotonic()
        with (
            torch.no_grad(),
            pytest.raises(ws.RankMismatchError) as caught,
            pytest.warns(UserWarning, match="waits for other ranks") as said,
        ):
            both.model(batch(99, rank))
        assert "rank 0 waits for other ranks at a call of Net outside of a compiled step" in str(said[0].message)
        assert time.monotonic() - start < 10
        text = str(caught.value)
        assert "a call of Net outside of a compiled step: rank 0 is there, ranks [1] did not come within" in text
        assert f"at: {__file__}" in text
        assert "both.model(batch(99, rank))" in text
        assert "call it on every rank (not under `if rank == 0`), equally often and in the same order" in text
    both.train()  # the other rank waits here, in the step
    x = batch(99, rank)
    with torch.no_grad():
        part = both.model.up if rank else both.model.norm
        with pytest.raises(ws.RankMismatchError) as caught:
            part(torch.zeros(2, 6, dtype=torch.float64))
        there = "norm" if rank else "up"
        assert f"rank {1 - rank} is at a call of {type(getattr(both.model, there)).__name__} '{there}'" in str(
            caught.value
        )
        torch.testing.assert_close(both.model(x), both.oracle(x))
    both.train()
    both.compare()


def test_a_call_on_one_rank_alone_is_an_error_and_no_hang() -> None:
    run_ranks(_alone, 2)


def _no_rank_alone(rank: int, world: int) -> None:
    both = Both(rank, world, ws.DataParallel("replicate"), agree_timeout=20.0)
    both.train()
    if rank == 0:
        torch.testing.assert_close(evaluate(both.model, batch(9, 0)), evaluate(both.oracle, batch(9, 0)))
    both.train()
    both.compare()


def test_what_is_whole_on_each_rank_may_be_called_on_one() -> None:
    run_ranks(_no_rank_alone, 2)


def _backward(rank: int, world: int) -> None:
    both = Both(rank, world, ws.DataParallel("fully_shard"))
    both.train()
    out = both.model(batch(99, rank))
    torch.testing.assert_close(out, both.oracle(batch(99, rank)))  # without no_grad, too
    with pytest.raises(ws.StateError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "a backward outside of the compiled step reaches parameters of Net, which were gathered for that "
        "call\n"
        "  needed: gradients of a compiled step, which reduces them over ranks\n"
        "  next: call the model under torch.no_grad(), or put forward, backward and update into a function for "
        "wholestep.compile"
    )
    assert all(p.grad is None for p in both.model.parameters())
    part = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)  # gradients of what is given are its own
    theirs = part.detach().requires_grad_()
    (ours,) = torch.autograd.grad(both.model.up(part).square().sum(), part)
    (wanted,) = torch.autograd.grad(both.oracle.up(theirs).square().sum(), theirs)
    torch.testing.assert_close(ours, wanted)
    both.train()
    both.compare()


def test_a_backward_outside_of_the_step_is_refused() -> None:
    run_ranks(_backward, 2)


def _compiled_evaluation(rank: int, world: int, style: str, first: bool) -> None:
    both = Both(rank, world, ws.DataParallel(style))
    check = ws.compile(evaluate, parallel=ws.DataParallel(style))
    if first:
        torch.testing.assert_close(check(both.model, batch(98, rank)), evaluate(both.oracle, batch(98, rank)))
    both.train(2)
    pieces = {id(p): (p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in both.model.parameters()}
    for number in (96, 97):
        both.model.eval(), both.oracle.eval()
        found = check(both.model, batch(number, rank))
        torch.distributed.all_reduce(found)
        wanted = sum(evaluate(both.oracle, batch(number, r)) for r in range(world))
        torch.testing.assert_close(found, wanted)
        both.model.train(), both.oracle.train()
        both.train()
    assert pieces == {
        id(p): (p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in both.model.parameters()
    }
    assert both.step.captures == 1, both.step.misses
    both.compare()


@pytest.mark.usual("zero1-True", "fully_shard-False")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_compiled_evaluation_shares_the_placed_model(style: str, first: bool) -> None:
    run_ranks(_compiled_evaluation, 2, style, first)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


OTHER_PLACES: list[Callable[[Any], Any]] = [
    lambda model: nn.utils.parametrize.register_parametrization(model.up, "weight", Twice()),
    lambda model: nn.utils.weight_norm(model.up),
    lambda model: setattr(model.down, "bias", None),
]


def _elsewhere(rank: int, world: int) -> None:
    for move in OTHER_PLACES:
        (ours, mine), (alone, theirs), step = make(), make(), ws.compile(train_step)
        for number in range(4):
            for model in (ours, alone) if number == 2 else ():
                move(model)
            train_step(alone, theirs, torch.cat([batch(number, other) for other in range(world)]))
            step(ours, mine, batch(number, rank))
        torch.testing.assert_close(evaluate(ours, batch(9, 0)), evaluate(alone, batch(9, 0)), rtol=1e-9, atol=1e-12)


def test_a_parameter_is_elsewhere_or_gone() -> None:
    """A module makes its weight of it, or has none any more: the step is captured again."""
    run_ranks(_elsewhere, 2)


def _updates(rank: int, world: int, style: str) -> None:
    both = Both(rank, world, ws.DataParallel(style))  # type: ignore[arg-type]
    both.train()
    updates = [torch.compile(o.step, backend="eager") for o in (both.optimizer, both.its_optimizer)]
    for _ in range(2):
        both.train()
        for model, update in zip((both.model, both.oracle), updates, strict=True):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            update()
        both.compare()


@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
def test_an_update_between_steps_may_be_compiled_by_torch(style: str) -> None:
    run_ranks(_updates, 2, style)
