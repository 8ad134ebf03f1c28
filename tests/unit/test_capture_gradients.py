"""Gradients that autograd does not simply make: none at all, or through `torch.func`. Against eager, one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws
from tests.eager import batches, same_as_eager
from tests.steps import mse as train

pytestmark = pytest.mark.usefixtures("double")

CALLS = batches((5, 6), (5, 3), count=4)


class Stops(torch.autograd.Function):
    """`x * w`, with a backward that gives `w` no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


class Scaled(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.scale, self.use = nn.Linear(6, 3), nn.Parameter(torch.full((3,), 2.0)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.body(x), self.scale)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function of one's own": Stops.apply,  # type: ignore[dict-item]
    "a norm that counts": lambda x, w: x + w.norm(p=0),
    "twice, one without": lambda x, w: Stops.apply(x, w) * w,  # type: ignore[operator]
}


@pytest.mark.smoke
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_backward_may_give_none(use: str, kept: bool) -> None:
    """The parameter keeps no gradient, so no decay and no state either."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Scaled(USES[use])
        return model, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)

    assert same_as_eager(train, make, CALLS, grads=kept, keep_grads=kept).captures == 1


@pytest.mark.parametrize("what", ["updates first", "reads the norms first"])
def test_gradients_of_the_last_call_are_read_before_they_are_reset(what: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        norms = [p.grad.norm() for p in model.parameters() if what != "updates first" and p.grad is not None]
        if what == "updates first":
            optimizer.step()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach(), norms

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(6, 3)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    same_as_eager(step, make, CALLS, grads=True)


def test_gradients_wait_for_an_update_in_another_call() -> None:
    """Accumulation that resets at the start of every second call, and updates at the end of the next one."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
        if not last:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if last:
            optimizer.step()
        return loss.detach()

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(6, 3)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    same_as_eager(step, make, [(*call, bool(i % 2)) for i, call in enumerate(CALLS)], grads=True)


# -- torch.func -----------------------------------------------------------------------------
def per_sample(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A gradient for each sample, each clipped, as private training does it."""

    def loss_of(params: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, params, (xi[None],)), yi[None])

    params = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
    for name, param in model.named_parameters():
        norms = each[name].flatten(1).norm(dim=1).clamp_min(0.1)
        param.grad = (each[name] / norms.view(-1, *[1] * param.dim())).mean(0)
    optimizer.step()
    return F.mse_loss(model(x), y).detach()


def by_grad(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    params = {name: p.detach() for name, p in model.named_parameters()}
    grads, loss = grad_and_value(lambda p: F.mse_loss(functional_call(model, p, (x,)), y))(params)
    for name, param in model.named_parameters():
        param.grad = grads[name]
    optimizer.step()
    return loss


def with_penalty(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The gradient by the input is part of the loss."""
    optimizer.zero_grad()
    by_input = vmap(grad(lambda xi: model(xi[None]).sum()))(x)
    loss = F.mse_loss(model(x), y) + by_input.square().sum(1).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_jacobian(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    jacobian = vmap(jacrev(lambda xi: model(xi[None])[0]))(x)
    loss = F.mse_loss(model(x), y) + jacobian.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("fn", [per_sample, by_grad, with_penalty, with_jacobian])
def test_transforms_of_functions(fn: Callable[..., Tensor]) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    step = same_as_eager(fn, make, CALLS)
    assert step.train_graph is not None
    assert len(step.train_graph.losses) == (1 if "with" in fn.__name__ else 0), "losses of transforms are none"


def test_a_transform_of_parameters_differs_between_ranks() -> None:
    """Gradients that autograd did not reduce are not put into parameters."""
    model = nn.Linear(6, 3)
    made = model, torch.optim.SGD(model.parameters(), 0.1)
    graph = ws.capture(per_sample, *made, *CALLS[0])
    with pytest.raises(ws.PlanError, match="would be updated with a value that differs between ranks"):
        ws.plan(graph, "dp=2")
