"""`semantics="global"` on gloo ranks: uneven parts, whole batches, random numbers, against one device in float64."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import wholestep as ws
from tests.dist.launch import RankError, run_ranks
from tests.steps import mean_square
from wholestep.distributed import host_exchange
from wholestep.runtime.guards import Guards

ROWS = (8, 8, 7, 9, 5, 8)
PARTS = {
    2: ((4, 4), (3, 5), (1, 6), (5, 4), (0, 5), (4, 4)),
    3: ((3, 3, 2), (2, 2, 4), (3, 3, 1), (9, 0, 0), (2, 2, 1), (1, 4, 3)),
}


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(drop), nn.Linear(33, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer.zero_grad()
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return {"loss": loss.detach(), "largest": losses.detach().amax()}


def batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(n, 12, generator=g), "y": torch.randint(0, 7, (n,), generator=g),
            "weight": torch.rand(n, generator=g),
        }
        for n in ROWS
    ]  # fmt: skip


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _trains(rank: int, world: int, style: str, inputs: str) -> tuple[float, list[int]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)  # the first rank's parameters are taken
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)
    torch.manual_seed(0)
    twin = Net()
    other = torch.optim.AdamW(twin.parameters(), lr=0.01, eps=1e-4, fused=True)
    step = ws.compile(train, parallel=ws.DataParallel(style, semantics="global", inputs=inputs))
    worst, captures = 0.0, []
    for batch, parts in zip(batches(), PARTS[world], strict=True):
        start = sum(parts[:rank])
        own = {k: v[start : start + parts[rank]] for k, v in batch.items()}
        found, expected = step(model, optimizer, own if inputs == "local" else batch), train(twin, other, batch)
        captures.append(step.captures)
        worst = max([worst, *((found[k] - expected[k]).abs().item() for k in expected)])
    for a, b in zip([*model.parameters(), *model.buffers()], [*twin.parameters(), *twin.buffers()], strict=True):
        worst = max(worst, (whole(a) - b).abs().max().item())
    return worst, captures


@pytest.mark.crossed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("inputs", ["local", "global"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_same_as_one_device(style: str, inputs: str, world: int) -> None:
    for worst, captures in run_ranks(_trains, world, style, inputs):
        assert worst < 1e-12
        assert captures[0] == 1
        assert captures[-1] == captures[-2]  # rows that ranks share otherwise are no reason to capture again


SIZES = [(4, 4), (4, 4), (4, 3), (4, 3), (4, 4), (3, 4), (4, 4), (4, 4)]


def _exchanges(rank: int, world: int, several_nodes: bool) -> list[int]:
    """In which calls ranks exchange their sizes, while losses are those of one device."""
    if several_nodes:
        host_exchange.lockstep = lambda ranks, label, words: None  # pyright: ignore[reportPrivateUsage]
    usual, found = host_exchange.HostExchange.rows, [0]

    def counted(self: Any) -> Any:
        found[-1] += 1
        return usual(self)

    host_exchange.HostExchange.rows = counted
    torch.manual_seed(0)
    model = nn.Linear(12, 1).double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    step = ws.compile(mean_square, parallel=ws.DataParallel("replicate", semantics="global"))
    for sizes in SIZES:
        x = torch.randn(sum(sizes), 12, dtype=torch.float64)
        own = x.split(list(sizes))[rank]
        loss = step(model, optimizers[0], own)
        torch.testing.assert_close(loss, mean_square(twin, optimizers[1], x).detach(), rtol=1e-12, atol=0)
        found.append(0)
    return found[:-1]


@pytest.mark.parametrize("several_nodes", [False, True])
def test_sizes_that_ranks_know_are_not_exchanged_again(several_nodes: bool) -> None:
    assert run_ranks(_exchanges, 2, several_nodes) == [[1, 0, 1, 0, 1, 1, 1, 0]] * 2


def _begun(rank: int, world: int, several_nodes: bool) -> tuple[list[str], list[str]]:
    """What a call does until it has sizes that are known, and sizes that are new; the call between failed after it had
    given its own.
    """
    if several_nodes:
        host_exchange.lockstep = lambda ranks, label, words: None  # pyright: ignore[reportPrivateUsage]
    model = nn.Linear(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(mean_square, parallel=ws.DataParallel("replicate", semantics="global"), dynamic={"x": (0,)})
    for _ in range(2):
        step(model, optimizer, torch.ones(4, 12))
    found: list[str] = []
    _noted(host_exchange.HostExchange, "give", found)
    _noted(host_exchange.HostExchange, "extremes", found)
    _noted(Guards, "check", found)
    _noted(dist, "all_gather", found)
    step(model, optimizer, torch.ones(4, 12))
    known = found.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guards, "check", _fails)
        with pytest.raises(KeyError):
            step(model, optimizer, torch.ones(6, 12))
    found.clear()
    step(model, optimizer, torch.ones(6 - rank, 12))
    return known, found


def _noted(owner: Any, name: str, found: list[str]) -> None:
    usual = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return usual(*args, **kwargs)

    setattr(owner, name, noted)


def _fails(*args: Any) -> Any:
    raise KeyError("a program that cannot be looked at")


@pytest.mark.parametrize("several_nodes", [False, True])
def test_a_rank_takes_sizes_of_others_last(several_nodes: bool) -> None:
    """It has compared all else by then. Between nodes, new sizes travel with the first exchange."""
    sent = ["all_gather"] if several_nodes else []
    for known, new in run_ranks(_begun, 2, several_nodes):
        assert known == ["give", *sent, "check", "extremes"]
        assert new == ["give", "extremes", *sent, "check", "extremes"]


def _drops(rank: int, world: int) -> tuple[list[float], list[float], list[Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5))
    scale = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(scale.parameters(), lr=0.0)

    def look(optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dropped = model(x)  # cut over ranks
        noise = torch.rand(3)  # the same on all ranks
        loss = scale(dropped).mean() * noise.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), noise, dropped

    step = ws.compile(look, model=[model, scale], parallel=ws.DataParallel("replicate", semantics="global"))
    torch.manual_seed(100 + rank)
    before, found = torch.get_rng_state(), []
    for _ in range(2):
        found.append(step(optimizer, torch.ones(8, 16)))
    assert torch.equal(before, torch.get_rng_state()), "the user's generator is left alone"
    return [float(f[0]) for f in found], [float(f[1].sum()) for f in found], [f[2] for f in found]


def test_random_numbers() -> None:
    """Whole tensors are drawn alike on all ranks, pieces differ, and so do steps."""
    (losses, noise, dropped), (losses_2, noise_2, dropped_2) = run_ranks(_drops, 2)
    assert losses == losses_2
    assert noise == noise_2
    assert noise[0] != noise[1]
    for a, b in zip(dropped, dropped_2, strict=True):
        assert torch.equal(a, b), "the result is the whole tensor on every rank"
        top, bottom = a.chunk(2)
        assert not torch.equal(top, bottom), "pieces are drawn from streams of their own"
        assert 0.2 < (a == 0).double().mean() < 0.8
    assert not torch.equal(dropped[0], dropped[1])


def _two_axes(rank: int, world: int, wrong: bool) -> float:
    """Ranks along an axis that cuts no batch are given the same one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    parallel = ws.DataParallel("fully_shard", axis="dp", semantics="global")
    step = ws.compile(train, parallel=parallel, mesh="dp=2,other=2")
    worst = 0.0
    for batch, parts in zip(batches()[:2], PARTS[2], strict=False):
        part = rank // 2
        start = sum(parts[:part])
        length = parts[part] - (1 if wrong and rank == 3 else 0)
        own = {k: v[start : start + length] for k, v in batch.items()}
        worst = max(worst, (step(model, optimizer, own)["loss"] - train(twin, other, batch)["loss"]).abs().item())
    return worst


def test_ranks_of_one_part() -> None:
    assert max(run_ranks(_two_axes, 4, False)) < 1e-12
    with pytest.raises(RankError, match="the same batch on ranks that differ only outside dp"):
        run_ranks(_two_axes, 4, True)


def _reads(rank: int, world: int) -> float:
    """How far a loss is from that of one device; one rank's part of the mask is true throughout, the other's is not."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, mask: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * (2.0 if mask.all() else 1.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    twin, x = copy.deepcopy(model), torch.randn(8, 3)
    mask = torch.arange(8) != 5
    step = ws.compile(train, parallel=ws.DataParallel("replicate", semantics="global"))
    worst, optimizers = 0.0, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for all_of_it in (mask, torch.ones(8, dtype=torch.bool), mask):
        parts = (one.tensor_split(world)[rank] for one in (x, all_of_it))
        expected = train(twin, optimizers[1], x, all_of_it)
        worst = max(worst, (step(model, optimizers[0], *parts) - expected).abs().item())
    return worst


def test_a_branch_on_a_part_is_that_of_the_whole() -> None:
    assert max(run_ranks(_reads, 2)) < 1e-6


def _resumes(rank: int, world: int, folder: str) -> list[float]:
    """Losses of four steps, the last two of them run twice: as they came, and again from the checkpoint."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net(drop=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard", semantics="global"))
    losses: list[float] = []
    for i, (batch, parts) in enumerate(zip(batches()[:4], PARTS[world], strict=False)):
        start = sum(parts[:rank])
        own = {k: v[start : start + parts[rank]] for k, v in batch.items()}
        losses.append(float(step(model, optimizer, own)["loss"]))
        if i == 1:
            ws.save(folder, step=step)
    ws.load(folder, step=step)
    for batch, parts in zip(batches()[2:4], PARTS[world][2:4], strict=True):
        start = sum(parts[:rank])
        own = {k: v[start : start + parts[rank]] for k, v in batch.items()}
        losses.append(float(step(model, optimizer, own)["loss"]))
    return losses


def test_resumes_with_the_random_numbers_it_would_have_drawn(tmp_path: Path) -> None:
    for losses in run_ranks(_resumes, 2, str(tmp_path / "run")):
        assert losses[2:4] == losses[4:6]
        assert losses[2] != losses[3]


class Sorts(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).sort(0)[0])


def _repeats(rank: int, world: int) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = Sorts(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    other = copy.deepcopy(model)
    mine, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = ws.compile(mean_square, parallel=ws.DataParallel("fully_shard", semantics="global"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(3):
            x = torch.randn(6, 6, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
            step(model, mine, x.chunk(world)[rank])
            mean_square(other, expected, x)
    said = [str(warning.message) for warning in caught if "of the products" in str(warning.message)]
    with ws.whole(model):
        return said, max(
            float((a - b).abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )


def test_what_every_rank_repeats_is_said_once_and_gradients_are_computed_in_parts() -> None:
    """The gradient of the last weight is a part of a product of whole tensors on each rank."""
    (first, worst), (second, other) = run_ranks(_repeats, 2)
    assert max(worst, other) < 1e-13
    assert (len(first), second) == (1, [])
    assert first[0].startswith("every rank of dp repeats 33% of the products\n    33% since aten.sort at ")
    assert "return self[1](self[0](x).sort(0)[0])" in first[0]
