"""Optimizers, schedulers, clipping, gradients that live on, changed options: compiled against eager, one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS, Recipe
from tests.eager import batches, same_as_eager
from tests.optimizers import Counting
from tests.steps import mse as train

pytestmark = pytest.mark.usefixtures("double")

Made = tuple[nn.Module, Optimizer]
CALLS = batches((6, 6), (6, 3), count=4)


def tiny(recipe: str | Recipe = "AdamW-plain", dtype: torch.dtype = torch.float64) -> Callable[[], Made]:
    chosen = OPTIMIZERS[recipe] if isinstance(recipe, str) else recipe

    def make() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 3)).to(dtype)
        return model, chosen.make(model.parameters())

    return make


USUAL = ("SGD-momentum", "SGD-dampening", "AdamW-plain", "Adam-fused", "NAdam-foreach")
# each class with each option: test_optimizer_matrix
FEW = [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in OPTIMIZERS]


@pytest.mark.parametrize("recipe", FEW)
def test_first_and_later_steps(recipe: str) -> None:
    """From empty state, with no warm-up. Only SGD's dampening makes a first step that differs in kind."""
    step = same_as_eager(train, tiny(recipe), CALLS)
    assert step.captures == (2 if recipe == "SGD-dampening" else 1)


@pytest.mark.parametrize("recipe", FEW)
def test_first_step_in_single_precision(recipe: str) -> None:
    torch.set_default_dtype(torch.float32)
    calls = batches((6, 6), (6, 3), dtype=torch.float32)
    same_as_eager(train, tiny(recipe, torch.float32), calls, tolerance=2e-6)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum="SGD" in str(type(o))),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}
RECAPTURES = {"OneCycleLR": 1, "CyclicLR": 1}  # those that move momentum or betas too


@pytest.mark.crossed
@pytest.mark.parametrize("recipe", ["SGD-momentum", "AdamW-plain", "Adam-fused", "AdamW-two-groups", "NAdam-foreach"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_do_not_recapture(scheduler: str, recipe: str) -> None:
    schedulers: dict[int, Any] = {}

    def make() -> Made:
        made = tiny(recipe)()
        schedulers[id(made[1])] = SCHEDULERS[scheduler](made[1])
        return made

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i:
            schedulers[id(optimizer)].step()

    step = same_as_eager(train, make, batches((6, 6), (6, 3), count=6), between=between)
    assert step.captures <= 1 + RECAPTURES.get(scheduler, 0)


@pytest.mark.smoke
def test_learning_rate_set_by_hand() -> None:
    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    assert same_as_eager(train, tiny("Adam-fused"), CALLS, between=between).captures == 1


def test_learning_rate_beside_a_count_of_updates() -> None:
    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    made = tiny(Recipe("Counting", Counting))
    assert same_as_eager(train, made, batches((6, 6), (6, 3), count=5), between=between).captures == 2


def _in_place(group: dict[str, Any]) -> None:
    group["lr"].detach().mul_(0.9)


def _anew(group: dict[str, Any]) -> None:
    group["lr"] = group["lr"] * 0.9


def _not(group: dict[str, Any]) -> None:
    pass


RATES: dict[str, Callable[[Any, Any], Optimizer]] = {
    "SGD": lambda groups, rate: torch.optim.SGD(groups, rate, momentum=torch.tensor(0.9)),
    "AdamW": lambda groups, rate: torch.optim.AdamW(groups, rate, foreach=False),
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("change", [_in_place, _anew, _not], ids=lambda change: change.__name__)
def test_a_learning_rate_that_is_a_tensor(change: Callable[[Any], None], name: str) -> None:
    """Which two groups share, until it is another one."""

    def make() -> Made:
        model = nn.Linear(6, 3).double()
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        return model, RATES[name](groups, torch.tensor(0.1))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        for group in optimizer.param_groups:
            change(group)
        return loss + optimizer.param_groups[1]["lr"].clone().add_(1)

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 3:
            optimizer.param_groups[0]["lr"].mul_(0.5)

    compiled = same_as_eager(step, make, CALLS, between=between)
    assert compiled.captures == (2 if change is _anew else 1)


def test_a_schedule_in_the_step_of_a_learning_rate_that_is_a_tensor() -> None:
    """Traced again, the step has another rate among the tensors that no op reads."""

    def step(model: nn.Module, optimizer: Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        schedule.step()
        return loss

    runs: list[tuple[list[Tensor], float]] = []
    for function in (step, ws.compile(step, verify=True)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        losses = [function(model, optimizer, schedule, x, y) for x, y in CALLS]
        runs.append((losses, float(optimizer.param_groups[0]["lr"])))
    torch.testing.assert_close(*runs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("key", ["betas", "weight_decay", "eps", "amsgrad"])
def test_changed_options_never_run_a_stale_graph(key: str) -> None:
    later = {"betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 1e-3, "amsgrad": True}[key]

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 2:
            optimizer.param_groups[0][key] = later
            for entry in optimizer.state.values() if key == "amsgrad" else ():
                entry["max_exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])

    assert same_as_eager(train, tiny(), CALLS, between=between).captures == 2


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_scheduled_number_may_become_zero(key: str) -> None:
    """Optimizers leave out what is zero: another program, and still no capture for each further value."""
    values = [0.5, 0.4, 0.3, 0.0, 0.0, 0.2, 0.1]

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0][key] = values[i]

    step = same_as_eager(train, tiny("SGD-nesterov-wd"), batches((6, 6), (6, 3), count=len(values)), between=between)
    assert step.captures == 3


def test_added_parameter_group() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    def make() -> Made:
        model = TwoHeads()
        return model, torch.optim.AdamW(model.head.parameters())

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 2:
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.02})  # type: ignore[union-attr]

    step = same_as_eager(train, make, CALLS, between=between)
    assert step.captures == 3  # gradients of the body, which no zero_grad() resets, exist from the second call on


def test_loaded_optimizer_state_is_used() -> None:
    saved: dict[int, Any] = {}

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        import copy

        if i == 1:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if i == 3:
            optimizer.load_state_dict(saved[id(optimizer)])

    assert same_as_eager(train, tiny("Adam-amsgrad"), CALLS, between=between).captures == 1


def test_state_and_groups_that_change_between_calls() -> None:
    def make() -> Made:
        model = CASES["tiny"].build()
        params = list(model.parameters())
        return model, torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], 0.1, momentum=0.9)

    def between(i: int, model: nn.Module, optimizer: Any) -> None:
        first, second = optimizer.param_groups[0], optimizer.param_groups[-1]
        if i in (1, 3):
            optimizer.state.clear()
        if i == 2:
            del optimizer.state[first["params"][0]]
            first["params"], second["params"] = second["params"], first["params"]
        if i == 3:
            del optimizer.param_groups[0]

    same_as_eager(train, make, CALLS, between=between)


def test_eager_step_in_between() -> None:
    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i == 2:
            train(model, optimizer, *CALLS[0])

    same_as_eager(train, tiny("AdamW-foreach"), CALLS, between=between)


# -- clipping -----------------------------------------------------------------------------
@pytest.mark.crossed
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf"), 3.0])
def test_clip_grad_norm(norm: float, foreach: bool | None) -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm, foreach=foreach)
        optimizer.step()
        return loss.detach(), total

    same_as_eager(clipped, tiny("SGD-momentum"), CALLS)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_value(foreach: bool | None) -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        return loss.detach()

    same_as_eager(clipped, tiny("SGD-momentum"), CALLS)


# -- gradients that live on ---------------------------------------------------------------
def _at_end(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _never(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _by_model(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    return _never(model, optimizer, x, y)


def _to_zero(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    return _never(model, optimizer, x, y)


def _by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    for param in model.parameters():
        param.grad = None
    return _never(model, optimizer, x, y)


def _no_update(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


@pytest.mark.crossed
@pytest.mark.parametrize("fn", [_at_end, _never, _by_model, _to_zero, _by_hand, _no_update])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_between_calls(fn: Callable[..., Tensor], outside: bool) -> None:
    """Reset at the start, at the end, outside or never (they then add up): `param.grad` is as eager leaves it."""

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if outside and i % 2:
            optimizer.zero_grad()

    same_as_eager(fn, tiny("SGD-momentum"), CALLS, between=between, grads=True, keep_grads=True)


def test_gradients_stay_when_kept() -> None:
    same_as_eager(train, tiny(), CALLS, grads=True, keep_grads=True)


def test_gradients_go_when_not_kept() -> None:
    (model, optimizer), step = tiny()(), ws.compile(train)
    for call in range(3):
        step(model, optimizer, *CALLS[0])
        assert all(p.grad is None for p in model.parameters())
        for p in model.parameters() if call else ():
            p.grad = torch.ones_like(p)


def test_gradient_accumulation_over_calls_and_an_update_elsewhere() -> None:
    """One compiled step adds up gradients, an eager update follows every second call."""

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if i and i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    same_as_eager(_no_update, tiny("AdamW-plain"), batches((6, 6), (6, 3), count=5), between=between, grads=True)


@pytest.mark.parametrize("case", ["micro-batches", "micro-clip"])
def test_micro_batches(case: str) -> None:
    chosen = CASES[case]
    same_as_eager(chosen.step, tiny("AdamW-plain"), [(chosen.batches(i),) for i in range(3)])


def test_a_subclass_of_an_optimizer_and_one_of_ones_own() -> None:
    class Lion(Optimizer):
        def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
            super().__init__(params, {"lr": lr, "beta": beta})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        if "m" not in state:
                            state["m"] = torch.zeros_like(p)
                        p.sub_(group["lr"] * torch.sign(state["m"] * group["beta"] + p.grad * (1 - group["beta"])))
                        state["m"].lerp_(p.grad, 1 - group["beta"])

    step = same_as_eager(train, tiny(Recipe("Lion", Lion, {"lr": 0.02})), CALLS)
    assert step.captures <= 2


@pytest.mark.smoke
def test_the_comparison_can_fail() -> None:
    """What the other tests compare is really compared: a change made to one twin alone is seen."""
    ours: list[int] = []

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        if id(model) in ours or not ours:
            ours.append(id(model))
            optimizer.param_groups[0]["lr"] = 0.1

    with pytest.raises(AssertionError, match="result of call 1"):
        same_as_eager(train, tiny("SGD-plain"), CALLS, between=between)
