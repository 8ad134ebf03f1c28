"""`torch.amp.GradScaler` in a compiled step: scaled, checked, skipped and updated as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

import wholestep as ws
from tests.eager import batches, same_as_eager

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.1),
    "AdamW-fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "Adam-foreach": lambda p: Adam(p, lr=0.1, foreach=True, amsgrad=True),
}
STYLES = ("replicate", "fully_shard")


def calls(bad: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[tuple[Any, ...]]:
    """Six batches, of which those numbered in `bad` give gradients that are not finite."""
    made = batches((5, 4), count=6, dtype=dtype)
    for i in bad:
        made[i][0][0, 0] = torch.inf
    return made


def scaled(optimizer: str, growth_interval: int = 2, dtype: torch.dtype = torch.float64) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Optimizer, GradScaler]:
        model = nn.Linear(4, 3, dtype=dtype)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        return model, OPTIMIZERS[optimizer](model.parameters()), scaler

    return make


def plain(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def clipped(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, x: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), norm.nan_to_num()


def scales(fn: Callable[..., Any], make: Any, given: Any, **options: Any) -> list[float]:
    """The scale before each call, after a comparison of everything with eager."""
    seen: list[dict[str, Any]] = []

    def note(i: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        seen.append(scaler.state_dict())

    assert same_as_eager(fn, make, given, between=note, **options).captures == 1
    eager, ours = seen[::2], seen[1::2]
    assert ours == eager
    return [state["scale"] for state in eager]


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_and_skipped_steps(optimizer: str, style: str) -> None:
    found = scales(plain, scaled(optimizer), calls((2,)), parallel=ws.DataParallel(style))
    assert found == [1024, 1024, 2048, 1024, 1024, 2048]  # grown, backed off, grown again


@pytest.mark.parametrize("style", STYLES)
def test_unscaled_for_clipping(style: str) -> None:
    found = scales(clipped, scaled("AdamW"), calls((1, 3)), parallel=ws.DataParallel(style))
    assert found == [1024, 1024, 512, 512, 256, 256]


def test_half_precision() -> None:
    def step(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach().nan_to_num()

    given = calls((), torch.float32)
    given[2][0][0, 0] = 1e6  # more than half precision holds
    found = scales(step, scaled("SGD", dtype=torch.float32), given, tolerance=1e-6)
    assert found == [1024, 1024, 2048, 1024, 1024, 2048]


def test_two_optimizers_and_one_scaler_that_is_closed_over() -> None:
    scalers = {name: GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for name in ("eager", "ours")}

    def step_with(scaler: GradScaler) -> Callable[..., Tensor]:
        def step(models: list[nn.Module], optimizers: list[Optimizer], x: Tensor) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = models[0](x).square().mean() + models[1](x.nan_to_num(posinf=1)).square().mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    def make() -> tuple[list[nn.Module], list[Optimizer]]:
        torch.manual_seed(0)
        models: list[nn.Module] = [nn.Linear(4, 3).double() for _ in range(2)]
        return models, [OPTIMIZERS["SGD"](models[0].parameters()), OPTIMIZERS["AdamW"](models[1].parameters())]

    (theirs, their_optimizers), (ours, our_optimizers) = make(), make()
    eager, compiled = step_with(scalers["eager"]), ws.compile(step_with(scalers["ours"]))
    for (x,) in calls((2,)):
        eager(theirs, their_optimizers, x)
        compiled(ours, our_optimizers, x)
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(dict(b.state_dict()), dict(a.state_dict()), rtol=1e-12, atol=0)
        assert scalers["ours"].state_dict() == scalers["eager"].state_dict()


def test_options_that_change_and_a_state_that_is_loaded() -> None:
    model, optimizer, scaler = scaled("SGD", growth_interval=1)()
    step = ws.compile(plain)
    (x,) = calls(())[0]
    step(model, optimizer, scaler, x)
    assert scaler.get_scale() == 2048
    scaler.set_growth_factor(4.0)
    step(model, optimizer, scaler, x)
    assert scaler.get_scale() == 8192
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    step(model, optimizer, scaler, x)
    assert scaler.get_scale() == 64


def test_a_scaler_that_is_off() -> None:
    def make() -> tuple[nn.Module, Optimizer, GradScaler]:
        model, optimizer, _ = scaled("SGD")()
        return model, optimizer, GradScaler("cpu", enabled=False)

    same_as_eager(plain, make, calls(()))


def test_what_cannot_be_done_is_refused_and_leaves_nothing_behind() -> None:
    def no_update(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return loss.detach()

    model, optimizer, scaler = scaled("SGD")()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(no_update)(model, optimizer, scaler, calls(())[0][0])
    assert caught.value.found == "the step uses a GradScaler and does not call its update()"
    assert ws.compile(plain)(model, optimizer, scaler, calls(())[0][0]).isfinite()

    late = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(plain)(model, late, scaler, calls(())[0][0])
    assert caught.value.found == "GradScaler may skip a step of SGD, which creates or assigns 'momentum_buffer'"
    assert "scaler.step(optimizer)" in caught.value.where


class Counting(Optimizer):
    """Keeps a number of Python in its groups or in its state."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.place = place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                kept = group if self.place == "group" else self.state[param]
                kept["count"] = kept.get("count", 0) + 1
                param.add_(param.grad, alpha=-0.1 / kept["count"])


@pytest.mark.parametrize("place", ["group", "state"])
def test_numbers_of_python_that_a_skipped_step_would_keep_are_refused(place: str) -> None:
    model, _, scaler = scaled("SGD")()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(plain)(model, Counting(model.parameters(), place), scaler, calls(())[0][0])
    assert caught.value.found == "GradScaler may skip a step of Counting, which creates or assigns 'count'"
