"""Parameters, buffers and batch tensors are the user's own objects while a step is traced, and between calls."""

import pytest
import torch

import wholestep as ws

from ..identities import CALLS, STEPS, AllRules, Step


def run(step: Step, compiled: bool) -> tuple[list[float], list[torch.Tensor]]:
    call, generator = (
        ws.compile(step.step, schedule=None, progress=None) if compiled else step.step,
        torch.Generator().manual_seed(3),
    )
    losses = list[float]()
    for number in range(CALLS):
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        step.between(number)
        losses.append(float(call(step.batch(x, number))))
    step.between(CALLS)
    return losses, [p.detach().clone() for p in step.model.parameters()]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_sees_its_own_tensors(name: str) -> None:
    eager, compiled = STEPS[name](), STEPS[name]()
    expected, params = run(eager, compiled=False)
    losses, found = run(compiled, compiled=True)
    if isinstance(eager, AllRules) and isinstance(compiled, AllRules):
        assert compiled.noted == eager.noted
    assert losses == pytest.approx(expected, rel=1e-9)
    for one, other in zip(found, params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
