"""`cuda_graphs=True` on several ranks, with a recorder that runs again: all ranks replay a collective, or none."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.recorders import Again
from wholestep.backend import recordable, recordings
from wholestep.runtime import installer

from .launch import run_ranks


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def each_call(rank: int, world: int, rows: Sequence[Sequence[int]], fails: int) -> tuple[list[str], str]:
    """What this rank did in each call; `rows` of the batch by rank and call. Rank `fails` cannot record."""
    again = Again(error=RuntimeError("a library says no") if rank == fails else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installer, "cuda_recorder", lambda device: again)
        for module in (installer, recordings, recordable):
            patch.setattr(module, "transport", lambda kind: "nccl")
        torch.manual_seed(0)
        models = [nn.Linear(6, 4), nn.Linear(6, 4)]
        models[1].load_state_dict(models[0].state_dict())
        adamw = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        plain, step = ws.compile(train, cuda_graphs=False), ws.compile(train, cuda_graphs=True)
        did: list[str] = []
        for call, count in enumerate(rows[rank]):
            x = torch.randn(count, 6, generator=torch.Generator().manual_seed(10 * call + rank))
            before = again.recorded, again.replayed
            found, expected = step(models[1], adamw[1], x), plain(models[0], adamw[0], x)
            assert torch.equal(found, expected), call
            recorded, replayed = again.recorded - before[0], again.replayed - before[1]
            did.append("record" if recorded else "replay" if replayed else "run")
    assert all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(*(m.state_dict().values() for m in models), strict=True)
    )  # type: ignore[attr-defined]
    return did, step.cuda_graph


@pytest.mark.filterwarnings("ignore:semantics")
def test_ranks_replay_together_what_they_recorded_together() -> None:
    """Rank 1 has another batch in two calls: rank 0 runs op by op in these as well."""
    rows = [[4] * 7, [4, 4, 4, 4, 6, 6, 4]]
    (first, about), (second, _) = run_ranks(each_call, 2, rows, -1)
    assert first == second == ["run", "run", "record", "replay", "run", "run", "replay"]
    assert about.startswith("recorded, ")


def test_what_one_rank_cannot_record_no_rank_replays() -> None:
    found: list[Any] = run_ranks(each_call, 2, [[4] * 5] * 2, 1)
    assert [about for _, about in found] == [
        "not recorded: another rank cannot record it",
        "not recorded: it cannot be recorded: a library says no",
    ]
    assert [did.count("replay") for did, _ in found] == [0, 0]
