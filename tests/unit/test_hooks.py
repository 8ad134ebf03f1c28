"""Hooks of modules, parameters and optimizers: those that there are now run in a compiled step, as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep as ws
from tests.eager import batches, same_as_eager
from tests.steps import mean_square as train

pytestmark = pytest.mark.usefixtures("double")


def make() -> tuple[nn.Sequential, Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def shrink(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.1)


HOOKS: dict[str, Callable[[Any, Optimizer], Any]] = {
    "forward": lambda m, o: m[0].register_forward_hook(lambda module, given, out: out * 1.5),
    "forward-pre": lambda m, o: m[0].register_forward_pre_hook(lambda module, given: (given[0] * 1.5,)),
    "backward": lambda m, o: m[2].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,)),
    "gradient": lambda m, o: m[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
    "accumulated": lambda m, o: m[0].weight.register_post_accumulate_grad_hook(halve),
    "optimizer": lambda m, o: o.register_step_pre_hook(shrink),
    "all-modules": lambda m, o: nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out * 1.1 if module is m[1] else None
    ),
}


@pytest.mark.crossed
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_and_go(kind: str, first: int, style: str) -> None:
    handles: dict[int, Any] = {}

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == first:
            handles[id(model)] = HOOKS[kind](model, optimizer)
        if i == 4:
            handles[id(model)].remove()

    calls = batches((5, 4), count=6)
    step = same_as_eager(train, make, calls, between=between, parallel=ws.DataParallel(style))
    assert step.captures == 2
    assert set(step.misses) == {"hooks were registered or removed"}


def test_hooks_elsewhere_cost_no_capture() -> None:
    model, optimizer = make()
    step, other = ws.compile(train), nn.Linear(2, 2)
    for (x,) in batches((5, 4), count=3):
        step(model, optimizer, x)
        other.register_forward_hook(lambda *a: None)
        model.register_state_dict_post_hook(lambda *a: None)
    assert step.captures == 1
