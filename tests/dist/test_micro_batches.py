"""Micro-batches on gloo ranks: what the ranks compute without them, with all passes, in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import wholestep as ws
from tests.dist.launch import run_ranks
from wholestep.graph.loop import loop_of
from wholestep.runtime.random_state import of_steps

ROWS = (8, 8, 5, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 33), nn.LayerNorm(33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    optimizer.zero_grad()
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _trained(
    rank: int, parallel: Any, options: dict[str, Any], times: int = 1, sizes: Sequence[int] = ROWS
) -> tuple[list[Tensor], ws.CompiledStep]:
    """Losses and parameters."""
    of_steps.clear()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)
    step = ws.compile(train, parallel=parallel, **options)
    generator, found = torch.Generator().manual_seed(rank), list[Tensor]()
    for number, rows in enumerate(times * rows for rows in sizes):
        batch = {
            "x": torch.randn(rows, 12, generator=generator), "y": torch.randint(0, 7, (rows,), generator=generator),
            "weight": torch.rand(rows, generator=generator),
        }  # fmt: skip
        torch.manual_seed(10 * number + rank)
        found.append(step(model, optimizer, batch))
    step.flush()
    return [*found, *map(whole, model.parameters())], step


def _trains(rank: int, world: int, data: dict[str, Any], pieces: int, options: dict[str, Any]) -> tuple[float, int]:
    torch.set_default_dtype(torch.float64)
    one = ws.DataParallel(**data)
    expected, _ = _trained(rank, one, options)
    found, step = _trained(rank, [one, ws.MicroBatches(pieces)], options)
    assert step.local_graph is not None
    loops = sum(1 for node in step.local_graph.graph.nodes if loop_of(node))
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)), loops


STYLES = [
    {"style": "replicate"}, {"style": "zero1"}, {"style": "zero2"}, {"style": "fully_shard"},
    {"style": "fully_shard", "reshard_after_forward": True},
]  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "across_steps"}, {"on_nonfinite": "skip"}], ids=["", "across", "skip"]
)
@pytest.mark.parametrize("pieces", [2, 3, 8])
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("data", STYLES, ids=lambda data: "-".join(map(str, data.values())))
def test_the_same_as_without(data: dict[str, Any], semantics: str, pieces: int, options: dict[str, Any]) -> None:
    """In float64, and with dropout."""
    for worst, loops in run_ranks(_trains, 2, data | {"semantics": semantics}, pieces, options):
        assert worst < 1e-10
        assert loops == 2


def _other_pieces(rank: int, world: int) -> float:
    torch.set_default_dtype(torch.float64)
    one, sizes = ws.DataParallel("zero1"), (8, 8 - 4 * rank)
    expected, _ = _trained(rank, one, {}, sizes=sizes)
    found, _ = _trained(rank, [one, ws.MicroBatches(3)], {}, sizes=sizes)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_ranks_may_have_other_numbers_of_pieces() -> None:
    """Eight rows in three pieces beside four in two: the second rank compiles its program alone."""
    assert max(run_ranks(_other_pieces, 2, timeout=40)) < 1e-10


def _refuses(rank: int, world: int, style: str, sizes: Sequence[tuple[int, int]]) -> tuple[str, int]:
    """What the last call is refused with, and the calls before it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train, parallel=[ws.DataParallel(style), ws.MicroBatches(4)], agree_timeout=20)
    try:
        for rows in (pair[rank] for pair in sizes):
            step(
                model,
                optimizer,
                {"x": torch.randn(rows, 12), "y": torch.zeros(rows).long(), "weight": torch.ones(rows)},
            )
    except ws.errors.RankMismatchError as error:
        return str(error), step.calls
    return "", step.calls


@pytest.mark.parametrize(
    ("style", "sizes", "why"),
    [
        ("zero2", [(8, 8), (8, 2)], "ranks exchange gradients in each"),
        ("zero2", [(1, 1), (8, 8), (8, 1)], "one exchanges once what others exchange in each"),
        pytest.param(
            "zero1", [(8, 8), (8, 1)], "one exchanges once what others exchange in each", marks=pytest.mark.full
        ),
        pytest.param("zero1", [(1, 8)], "one exchanges once what others exchange in each", marks=pytest.mark.full),
    ],
)
def test_numbers_of_pieces_that_do_not_meet_are_refused_on_all_ranks(style: str, sizes: Any, why: str) -> None:
    for rank, (said, calls) in enumerate(run_ranks(_refuses, 2, style, sizes, timeout=60)):
        assert f"this one through {sizes[-1][rank]} samples" in said
        assert why in said
        assert calls == len(sizes) - 1


def _chooses(rank: int, world: int, share: float) -> tuple[float, int, str, float]:
    """Beside the same without micro-batches: the worst difference, the pieces, what the plan says, the share of the
    peak that is left.
    """
    torch.set_default_dtype(torch.float64)
    data = ws.DataParallel("fully_shard", semantics="global")
    expected, plain = _trained(rank, data, {}, times=16)
    assert plain.local_graph is not None
    peak = ws.peak_memory(plain.local_graph).size_bytes
    cut = [data, ws.MicroBatches("auto")]
    found, step = _trained(rank, cut, {"memory_bytes": int(share * peak)}, times=16)
    assert step.local_graph is not None
    assert step.plan is not None
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    said = next(note for note in step.plan.notes if note.startswith('MicroBatches("auto") chose '))
    return worst, step.strategies.pieces, said, ws.peak_memory(step.local_graph).size_bytes / peak


@pytest.mark.full
def test_the_first_rank_chooses_the_number_for_all() -> None:
    """The choice stays for the smaller batch of the third call."""
    first, second = run_ranks(_chooses, 2, 0.8)
    assert first[1:3] == second[1:3]
    assert first[1] > 1
    for worst, _, _, left in (first, second):
        assert worst < 1e-10
        assert left <= 0.8
