"""`on_nonfinite` on one GPU: calls that are not finite are skipped, and reported a call later. Skipped without one."""

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.unit.test_nonfinite import BAD, OPTIMIZERS, Net, Told, batch, same, state_of, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


WAYS = [(name, "eager", graphs) for name in ("AdamW-fused", "AdamW-foreach", "SGD") for graphs in (False, True)]


@pytest.mark.filterwarnings("error:this step is not recorded")
@pytest.mark.parametrize(("optimizer", "backend", "graphs"), [*WAYS, ("SGD", "inductor", True)])
def test_bad_calls_leave_no_trace(optimizer: str, backend: str, graphs: bool) -> None:
    told, model = Told(), Net().cuda()
    job = model, OPTIMIZERS[optimizer](model.parameters())
    step, calls = (
        ws.compile(train_step, on_nonfinite=told, backend=backend, cuda_graphs=graphs),
        ["", *BAD, *[""] * 6, *BAD, ""],
    )
    for i, bad in enumerate(calls):
        before = state_of(*job) if i else {}
        step(*job, *(given.cuda() for given in batch(i, bad)))
        assert not bad or same(state_of(*job), before)
    step.flush()
    assert told.calls == [(i + 1, BAD[bad]) for i, bad in enumerate(calls) if bad]


def test_raise_comes_before_the_call_after_the_next() -> None:
    model = nn.Linear(4, 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step = ws.compile(train, on_nonfinite="raise")
    good, bad = torch.randn(2, 4, device="cuda"), torch.full((2, 4), torch.nan, device="cuda")
    step(model, optimizer, bad)
    step(model, optimizer, good)
    with pytest.raises(ws.NonFiniteError, match="call 1 of the step"):
        step(model, optimizer, good)
    step(model, optimizer, bad)
    with pytest.raises(ws.NonFiniteError, match="call 3 of the step"):
        step.flush()
