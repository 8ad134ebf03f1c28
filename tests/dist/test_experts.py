"""Mixtures of experts on gloo ranks that share tokens and the rows of experts, against one device."""

import copy
import importlib
import warnings
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


def share_rows(rank: int, world: int, method: Any) -> None:
    """Other tokens in each call, of shapes that divide and not; the first expert has no tokens in one call.
    `method`: each rank has its own experts, if it is given.
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
    optimizer, plain = (AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, other))
    parallel: list[Any] = [
        ws.ContextParallel(style="replicate"),
        *([ws.ExpertParallel("cp", method)] if method else []),
    ]
    step = ws.compile(mean_square, mesh=f"cp={world}", parallel=parallel)
    warnings.filterwarnings("error", message="semantics=")  # which a note about experts is none of
    for call, (rows, length) in enumerate(SHAPES):
        x = torch.randn(rows, length, 32, generator=torch.Generator().manual_seed(call))
        x = x.abs() if call == 2 else x
        torch.testing.assert_close(step(model, optimizer, x), mean_square(other, plain, x), rtol=1e-10, atol=1e-12)
    assert step.plan is not None
    assert not step.plan.repeated
    held = [p.numel() for p in _local(model)]
    assert (sum(held) < 0.6 * sum(p.numel() for p in other.parameters())) == bool(method)
    with ws.whole(model, writeback=False):
        assert [*model.state_dict()] == [*other.state_dict()]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["", "gather_rows", "rows"])
def test_ranks_share_rows(method: str) -> None:
    run_ranks(share_rows, 2, method)
