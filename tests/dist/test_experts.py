"""Mixtures of experts on gloo ranks that share tokens and the rows of experts, against one device."""

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.hf_models import entries
from tests.steps import mean_square

SHAPES = [(2, 12), (2, 7), (3, 5), (1, 1), (2, 12)]


def share_rows(rank: int, world: int, experts: Any = None, pieces: int = 1, backend: Any = "eager") -> None:
    """Other tokens in each call, of shapes that divide and not; the first expert has no tokens in one call.
    `experts`: each rank has its own, if it is given.
    """
    moe: Any = importlib.import_module("transformers.integrations.moe")
    moe._can_use_grouped_mm = _uses_torch
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    (entry,) = entries(["mixtral"])
    built: Any = entry.build()
    built.set_experts_implementation("grouped_mm")
    layer = built.model.layers[0].mlp
    model, other = Alone(layer), Alone(copy.deepcopy(layer))
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (model, other))
    parallel: list[Any] = [
        ws.ContextParallel(style="replicate"),
        *([experts] if experts else []),
        *([ws.MicroBatches(pieces)] if pieces > 1 else []),
    ]
    step = ws.compile(mean_square, mesh=f"cp={world}", parallel=parallel, backend=backend, count_expert_rows=True)
    rows_of = _rows_of_experts(other.experts.experts)
    warnings.filterwarnings("error", message="semantics=")  # which a note about experts is none of
    exact = {"rtol": 1e-10, "atol": 1e-12} if backend == "eager" else {"rtol": 1e-6, "atol": 1e-8}  # softmax in float32
    for call, (rows, length) in enumerate(SHAPES if backend == "eager" else SHAPES[:1]):
        x = torch.randn(rows, length, 32, generator=torch.Generator().manual_seed(call))
        x = x.abs() if call == 2 else x
        torch.testing.assert_close(step(model, optimizer, x), mean_square(other, plain, x), **exact)
        assert step.metrics()["experts.experts"].tolist() == rows_of.pop().tolist()
    assert step.plan is not None
    assert not step.plan.repeated
    held = [p.numel() for p in _local(model)]
    assert (sum(held) < 0.6 * sum(p.numel() for p in other.parameters())) == bool(experts)
    with ws.whole(model, writeback=False):
        assert [*model.state_dict()] == [*other.state_dict()]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], **exact)


def _rows_of_experts(experts: torch.nn.Module) -> list[Tensor]:
    """How many rows each expert has, of each call of the layer from now on."""
    rows: list[Tensor] = []

    def count(module: Any, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        rows.append(torch.bincount(arguments[1].flatten(), minlength=module.num_experts))

    experts.register_forward_pre_hook(count)
    return rows


def _local(model: torch.nn.Module) -> list[Tensor]:
    """What this rank has of the parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def _uses_torch(*arguments: Tensor) -> bool:
    """Torch's grouped product knows no double precision."""
    return False


class Alone(torch.nn.Module):
    """A layer of experts, and what goes around it."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


ROWS = ws.ExpertParallel("cp", "rows")
IN_ROOM = ws.ExpertParallel("cp", "rows", host_reads=False)
WAYS: dict[str, tuple[Any, ...]] = {
    "all rows": (),
    "gathered": (ws.ExpertParallel("cp", "gather_rows"),),
    "sent": (ROWS,),
    "sent in pieces": (ROWS, 2),
    "sent in room": (IN_ROOM, 2),
    "sent in regions": (IN_ROOM, 1, "inductor"),
}


@pytest.mark.usual("all rows", "gathered", "sent in pieces", "sent in room")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_share_rows(way: str) -> None:
    run_ranks(share_rows, 2, *WAYS[way], timeout=280)


def own_batches(rank: int, world: int, style: str, host_reads: bool) -> None:
    """Each rank has other tokens, in some calls more than the other; gradients are averages over ranks, or sums."""
    moe: Any = importlib.import_module("transformers.integrations.moe")
    moe._can_use_grouped_mm = _uses_torch
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    (entry,) = entries(["gpt_oss"])  # with biases of experts
    built: Any = entry.build()
    built.set_experts_implementation("grouped_mm")
    layer = built.model.layers[0].mlp
    model, other = Alone(Hidden(layer)), Alone(Hidden(copy.deepcopy(layer)))
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (model, other))
    reduce: Any = "mean" if host_reads else "sum"
    parallel: list[Any] = [ws.DataParallel(style, reduce=reduce), ws.ExpertParallel("dp", "rows", host_reads)]
    step = ws.compile(clipped, mesh=f"dp={world}", parallel=parallel, count_expert_rows=True)
    rows_of = _rows_of_experts(other.experts.layer.experts)
    for call, sizes in enumerate([(2, 2), (2, 2), (3, 1), (1, 2)] if host_reads else [(2, 2), (2, 2)]):
        draws = torch.Generator().manual_seed(call)
        batches = [torch.randn(rows, 6, 32, generator=draws) for rows in sizes]
        step(model, optimizer, batches[rank])
        clipped(other, plain, *batches, reduce=reduce)
        assert step.metrics()["experts.layer.experts"].tolist() == rows_of[-world:][rank].tolist(), "of its own batch"
    held = [p.numel() for p in _local(model)]
    assert sum(held) < 0.6 * sum(p.numel() for p in other.parameters())
    with ws.whole(model, writeback=False):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


def clipped(model: torch.nn.Module, optimizer: AdamW, *batches: Tensor, reduce: str = "mean") -> Tensor:
    """A step on the average or sum of the losses of the batches."""
    optimizer.zero_grad()
    losses = torch.stack([model(x).square().mean() for x in batches])
    loss = losses.mean() if reduce == "mean" else losses.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def resumes(rank: int, world: int, experts: Any, root: str, first: int) -> tuple[list[float], list[Any], list[float]]:
    """Losses of two calls from the checkpoint on, which are saved; the state before and after them; losses of eager."""
    moe: Any = importlib.import_module("transformers.integrations.moe")
    moe._can_use_grouped_mm = _uses_torch
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(first)
    (entry,) = entries(["mixtral"])
    built: Any = entry.build()
    built.set_experts_implementation("grouped_mm")
    model, other = Alone(built.model.layers[0].mlp), Alone(copy.deepcopy(built.model.layers[0].mlp))
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (model, other))
    batches = [torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(call)) for call in range(6)]
    expected = [mean_square(other, plain, x).item() for x in batches]
    parallel: list[Any] = [ws.ContextParallel(style="fully_shard"), *([experts] if experts else [])]
    step, states = ws.compile(mean_square, mesh=f"cp={world}", parallel=parallel), list[Any]()
    if first:
        assert ws.load(root, step).number == first
    step.on_placed.append(lambda _: states.append(_whole(model, optimizer)))
    losses = [step(model, optimizer, x).item() for x in batches[first : first + 2]]
    ws.save(root, step)
    held = [p.numel() for p in _local(model)]
    assert sum(held) < 1.3 / world * sum(p.numel() for p in other.parameters())
    return losses, [states[0], _whole(model, optimizer)], expected


def _whole(model: torch.nn.Module, optimizer: AdamW) -> list[Tensor]:
    """Parameters, and the state of the optimizer."""
    values = [*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_checkpoint_of_experts_on_their_ranks_is_one_of_any_ranks(ranks: int, tmp_path: Path) -> None:
    """Then experts are gathered on half of the ranks, then on their ranks of two: the same bits, and one curve."""
    losses, held, expected = list[float](), list[Tensor](), list[float]()
    for first, world, experts in ((0, ranks, ROWS), (2, ranks // 2, None), (4, 2, WAYS["gathered"][0])):
        mine, (before, after), eager = run_ranks(resumes, world, experts, str(tmp_path), first, timeout=280)[0]
        pairs = zip(before, held or before, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "what the checkpoint holds"
        losses, held, expected = losses + mine, after, expected or eager
    assert losses == pytest.approx(expected, rel=1e-10)


class Hidden(torch.nn.Module):
    """What a layer that returns scores, too, makes of tokens."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("style", "host_reads"), [("fully_shard", True), ("replicate", False)])
def test_ranks_send_rows_of_batches_of_their_own(style: str, host_reads: bool) -> None:
    run_ranks(own_batches, 2, style, host_reads, timeout=280)
