"""Rows about optimizers, schedules and averages of parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, RMSprop, SparseAdam, lr_scheduler, swa_utils

from tests.scripts.models import ids
from tests.scripts.row import Made, Row, Script, floats, mlp, pair, squares, steps, train, update


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


def grouped(model: nn.Module) -> SGD:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.1, momentum=0.9)


def scheduled_outside() -> Script:
    schedulers: dict[int, Any] = {}

    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        if i == 0:
            schedulers[id(optimizer)] = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        else:
            schedulers[id(optimizer)].step()

    return Script(lambda m, o, x: update(o, squares(m, x)), pair(mlp, adamw), floats((5, 4)), between)


def with_scheduler() -> Made:
    model, optimizer = pair()()
    return model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)


def scheduled_inside(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    scheduler.step()
    return loss


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param -= 0.1 * param.grad
            param.grad = None
    return loss.detach()


def by_data(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = squares(model, x)
    model.zero_grad()
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        param.data = param.data - 0.1 * param.grad
    return loss.detach()


def closed(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def averaged(model: nn.Module, optimizer: Any, average: nn.Module, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)
    return loss


def with_average() -> Made:
    model, optimizer = pair()()
    return model, optimizer, copy.deepcopy(model).requires_grad_(False)


def with_averaged_model() -> Made:
    model, optimizer = pair()()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    return model, optimizer, average


def swa(model: nn.Module, optimizer: Any, average: swa_utils.AveragedModel, x: Tensor) -> Tensor:
    loss = update(optimizer, squares(model, x))
    average.update_parameters(model)
    return loss


def average_outside() -> Script:
    return Script(
        lambda m, o, a, x: update(o, squares(m, x)), with_average, floats((5, 4)), lambda i, m, o, a: _average(m, a)
    )


def _average(model: nn.Module, average: nn.Module) -> None:
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)


def sharp(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Sharpness-aware minimisation: a step up along the gradient, its gradient there, and back."""
    optimizer.zero_grad()
    squares(model, x).backward()
    moves = list[Tensor]()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            moves.append(0.05 * param.grad / (param.grad.norm() + 1e-12))
            param.add_(moves[-1])
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    with torch.no_grad():
        for param, move in zip(model.parameters(), moves, strict=True):
            param.sub_(move)
    optimizer.step()
    return loss.detach()


def rate_inside(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    return update(optimizer, squares(model, x))


def rate_between() -> Script:
    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    return Script(lambda m, o, x: update(o, squares(m, x)), pair(), floats((5, 4)), between)


def group_inside(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))], "lr": 0.5})
    return update(optimizer, squares(model, x))


def group_between() -> Script:
    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        if i == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})

    first = lambda m: SGD(m[0].parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    return Script(lambda m, o, x: update(o, squares(m, x)), pair(mlp, first), floats((5, 4)), between)


def unfrozen_between() -> Script:
    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        model[0].requires_grad_(i >= 2)

    return Script(lambda m, o, x: update(o, squares(m, x)), pair(), floats((5, 4)), between)


def restored_between() -> Script:
    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})

    return Script(lambda m, o, x: update(o, squares(m, x)), pair(mlp, adamw), floats((5, 4)), between)


def kept(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = squares(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def plateau() -> Script:
    schedulers: dict[int, Any] = {}

    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        made = schedulers.setdefault(id(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        made.step(1.0)

    return Script(lambda m, o, x: update(o, squares(m, x)), pair(), floats((5, 4)), between)


G = "Optimizers and schedules"
ROWS = (
    Row(
        G,
        "SGD, Adam, AdamW, RMSprop and the others of torch.optim",
        train(optimizer=lambda m: RMSprop(m.parameters(), momentum=0.9)),
        ranks=True,
    ),
    Row(G, "fused and foreach forms", train(optimizer=lambda m: AdamW(m.parameters(), fused=True))),
    Row(G, "`torch.optim.Adafactor`", train(optimizer=lambda m: Adafactor(m.parameters())), ranks=True),
    Row(G, "parameter groups with options of their own", train(optimizer=grouped), ranks=True),
    Row(
        G,
        "`LBFGS`",
        steps(closed, pair(mlp, lambda m: LBFGS(m.parameters()))),
        line="call it outside the compiled step",
        runs=False,
    ),
    Row(
        G,
        "`SparseAdam`",
        train(model=lambda: nn.Embedding(7, 3, sparse=True), optimizer=lambda m: SparseAdam(m.parameters()), calls=ids),
        line="`Adam`: gradients are dense",
        runs=False,
    ),
    Row(G, "`optimizer.step(closure)` of other optimizers", steps(closed)),
    Row(G, "`scheduler.step()` between calls", scheduled_outside, ranks=True),
    Row(G, "`scheduler.step()` inside the step", steps(scheduled_inside, with_scheduler), ranks=True),
    Row(G, "`ReduceLROnPlateau` between calls", plateau),
    Row(G, 'sets `param_groups[0]["lr"]` between calls', rate_between, ranks=True),
    Row(G, 'sets `param_groups[0]["lr"]` inside the step', steps(rate_inside)),
    Row(G, "`add_param_group` between calls", group_between),
    Row(G, "`add_param_group` inside the step", steps(group_inside), runs=False),
    Row(G, "unfreezes layers between calls", unfrozen_between),
    Row(G, "`load_state_dict` of model and optimizer between calls", restored_between),
    Row(G, "`zero_grad(set_to_none=False)`, gradients that stay", steps(kept)),
    Row(G, "an update written by hand, under `no_grad`", steps(by_hand, lambda: (mlp(),)), ranks=True),
    Row(G, "an update by `param.data = ...`", steps(by_data), ranks=True),
    Row(G, "an average of the parameters (EMA) inside the step", steps(averaged, with_average), ranks=True),
    Row(G, "an average of the parameters between calls", average_outside),
    Row(G, "`AveragedModel.update_parameters` inside the step", steps(swa, with_averaged_model), ranks=True),
    Row(G, "sharpness-aware minimisation (SAM)", steps(sharp)),
)
