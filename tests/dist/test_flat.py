"""Shards side by side on two ranks: one piece of memory for each bucket, the same numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_memory import SCHEDULE, make, train


def _shards(model: nn.Module) -> list[Tensor]:
    return [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]


def _trained(rank: int, schedules: Sequence[ws.Schedule | None], folder: str) -> dict[str, Any]:
    """Six calls, of one compiled step after the other."""
    model, optimizer = make()
    steps = [ws.compile(train, parallel=ws.DataParallel("fully_shard"), schedule=one) for one in schedules]
    calls: list[int] = []
    for number in range(6):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        steps[number % len(steps)](model, optimizer, x)
        calls.append(len({shard.untyped_storage().data_ptr() for shard in _shards(model)}))
    ws.save(folder, steps[0])
    values = [param.full_tensor().detach().clone() for param in model.parameters() if isinstance(param, DTensor)]
    return {"values": values, "pieces": calls}


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _both(rank: int, world: int, schedules: Sequence[ws.Schedule], folder: str) -> list[dict[str, Any]]:
    return [_trained(rank, schedules, f"{folder}/merged"), _trained(rank, [None], f"{folder}/apart")]


def test_each_bucket_rests_in_one_piece_of_memory(tmp_path: Path):
    for merged, apart in run_ranks(_both, 2, [SCHEDULE], str(tmp_path)):
        assert merged["pieces"] == [1] * 6
        assert apart["pieces"] == [22] * 6
        assert _same(merged["values"], apart["values"])
    sizes = [sum(f.stat().st_size for f in (tmp_path / one).rglob("*.distcp")) for one in ("merged", "apart")]
    assert sizes[0] == sizes[1]  # a file of a view could hold all that it is a view of


def test_a_second_step_with_other_buckets(tmp_path: Path):
    """Its buckets are copied together; parameters stay where the first one put them."""
    small = ws.Schedule(ws.Hardware.default(), bucket_bytes=30 << 10, first_bucket_bytes=30 << 10)
    for merged, apart in run_ranks(_both, 2, [SCHEDULE, small], str(tmp_path)):
        assert merged["pieces"] == [1] * 6
        assert _same(merged["values"], apart["values"])
