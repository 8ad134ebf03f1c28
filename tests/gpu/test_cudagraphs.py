"""`backend="cudagraphs"` on one GPU: the steps of `backend="eager"`, replayed. Skipped where there is none."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from wholestep.backend.cudagraphs import WARM_CALLS, CudaGraphs, record_on_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW-plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD-plain": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
}


class Counting:
    """CUDA graphs, counted."""

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        made, replay = record_on_cuda(run)
        self.recorded += 1

        def counted() -> None:
            self.replayed += 1
            replay()

        return made, counted


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.detach(), "logits": logits.detach()}


@pytest.mark.parametrize("recipe", OPTIMIZERS)
def test_ten_steps_equal_those_of_eager(recipe: str) -> None:
    """Dropout, a schedule, a checkpoint loaded in the middle, results looked at in the end."""
    torch.manual_seed(0)
    parts = [nn.Linear(50, 33, bias=False), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 8)]
    models = [nn.Sequential(*parts).cuda()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [OPTIMIZERS[recipe](m.parameters()) for m in models]
    counting = Counting()
    steps = [
        ws.compile(train_step, device="cuda:0", backend=backend)
        for backend in ("eager", CudaGraphs("cuda", counting.record))
    ]
    found: list[list[dict[str, Tensor]]] = [[], []]
    saved: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for i in range(10):
            torch.manual_seed(100 + i)
            batch = {"x": torch.randn(16, 50, device="cuda"), "y": torch.randint(8, (16,), device="cuda")}
            for k in (0, 1):
                torch.manual_seed(1000 + i)
                found[k].append(steps[k](models[k], optimizers[k], batch))
                optimizers[k].param_groups[0]["lr"] = 1e-2 / (i + 2)
            if i == 4:
                saved = [
                    copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in zip(models, optimizers, strict=True)
                ]
            if i == 7:
                for model, optimizer, (ours, theirs) in zip(models, optimizers, saved, strict=True):
                    model.load_state_dict(ours)
                    optimizer.load_state_dict(theirs)
    for ours, theirs in zip(*found, strict=True):
        for key in ours:
            torch.testing.assert_close(theirs[key], ours[key], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert counting.recorded == 2, "once more after the optimizer's state was loaded"
    assert counting.replayed >= 10 - 1 - 2 * WARM_CALLS


def test_draws_go_on_from_step_to_step() -> None:
    """Two replays do not drop the same elements, and the generator is where eager mode leaves it."""

    def step(model, x):
        return F.dropout(model(x), 0.5)

    model = nn.Linear(64, 64).cuda()
    x = torch.ones(8, 64, device="cuda")
    outs, states = [], []
    for backend in ("eager", "cudagraphs"):
        compiled = ws.compile(step, backend=backend, device="cuda:0")
        torch.manual_seed(0)
        outs.append([compiled(model, x) for _ in range(6)])
        states.append(torch.cuda.get_rng_state())
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(outs[1][4], outs[1][5])
    assert torch.equal(*states)


def test_what_copies_to_the_host_runs_as_eager() -> None:
    def step(model, x):
        return model(x).cpu().sum()

    model = nn.Linear(8, 8).cuda()
    compiled = ws.compile(step, backend="cudagraphs", device="cuda:0")
    x = torch.ones(4, 8, device="cuda")
    with pytest.warns(UserWarning, match="computes on cpu"):
        results = [compiled(model, x) for _ in range(5)]
    assert all(torch.equal(r, results[0]) for r in results)
