"""Optimizers inside wrappers of other libraries, and modules and optimizers in objects that a step reads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws
from tests.around import AROUND, bound
from tests.catalogue import CASES
from tests.eager import batches, same, same_holder
from wholestep.capture.wrappers import unwrapped

CALLS = batches((6, 6), (6, 3))
Made = tuple[nn.Module, Optimizer]


class Outer:
    """Hands all on to an optimizer, as Lightning's does; it is no Optimizer itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Slow(torch.optim.Optimizer):
    """An optimizer around another one with state of its own, as a Lookahead is."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


def make() -> Made:
    torch.manual_seed(0)
    model = CASES["tiny"].build()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(made: Made) -> tuple[Made, list[Tensor]]:
    return made, [train(*made, *call) for call in CALLS]


def check(step: Callable[..., Tensor], made: Made, call: Callable[..., tuple[Any, ...]] = lambda x, y: (x, y)) -> None:
    twin, losses = trained(make())
    for batch, loss in zip(CALLS, losses, strict=True):
        same(step(*call(*batch)), loss, 1e-12, "loss")
    same_holder(made[0], twin[0], 1e-12, False, "model")
    same_holder(made[1], twin[1], 1e-12, False, "optimizer")


@pytest.fixture
def accelerated() -> Iterator[Callable[[Optimizer], Any]]:
    """What `accelerator.prepare` makes of an optimizer."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    yield accelerator.prepare_optimizer
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_what_is_unwrapped(accelerated: Callable[[Optimizer], Any]) -> None:
    core = pytest.importorskip("lightning.pytorch.core.optimizer")
    _, optimizer = make()
    for wrapper in (accelerated, core.LightningOptimizer, Outer):
        assert unwrapped(wrapper(optimizer)) is optimizer
    assert unwrapped(Outer(accelerated(optimizer))) is optimizer
    slow = Slow(optimizer)
    assert unwrapped(slow) is slow
    assert unwrapped(None) is None


HIDDEN: list[Any] = []


def hidden() -> Any:
    """An optimizer where nothing looks for one."""
    return HIDDEN[-1]


@pytest.mark.parametrize("how", ["argument", "optimizer=", "in a list", "closure"])
def test_accelerated_optimizer_is_found(accelerated: Callable[[Optimizer], Any], how: str) -> None:
    made = make()
    model, optimizer = made[0], accelerated(made[1])
    if how == "argument":
        check(ws.compile(train), made, lambda x, y: (model, optimizer, x, y))
    elif how == "closure":
        check(ws.compile(lambda x, y: train(model, optimizer, x, y)), made)
    else:
        HIDDEN.append(optimizer)
        given = [optimizer] if how == "in a list" else optimizer
        step = ws.compile(lambda x, y: train(model, hidden(), x, y), optimizer=given)
        check(step, made)


class Loop:
    """A training loop of its own: what the step uses is an attribute, in a list, and in another object."""

    def __init__(self, made: Made) -> None:
        self.parts = SimpleNamespace(net=made[0], unused=nn.Linear(2, 2))
        self.optimizers = [Outer(made[1])]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return train(self.parts.net, self.optimizers[0], x, y)


def test_attributes_that_the_step_reads() -> None:
    made = make()
    loop = Loop(made)
    step = ws.compile(loop.step)
    check(step, made)
    assert step.state is not None
    assert list(step.state.modules.values()) == [made[0]]  # what it does not read stays where it is
    assert step.captures == 1
    made = make()
    loop = Loop(made)
    check(ws.compile(lambda x, y: train(loop.parts.net, loop.optimizers[0], x, y)), made)


class Holder(nn.Module):
    """A module with its optimizer beside it."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.net, self.optimizer = made

    def fitted(self, x: Tensor, y: Tensor) -> Tensor:
        return train(self.net, self.optimizer, x, y)


@pytest.mark.smoke
def test_optimizer_of_a_module() -> None:
    made = make()
    check(ws.compile(Holder(made).fitted), made)


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.filterwarnings("ignore:.*captured a third time")
def test_optimizers_around_others(name: str) -> None:
    """Where a model and an optimizer are does not matter, nor that two optimizers have the same groups."""
    (ours, step), (theirs, expected) = [(model := make()[0], bound(name, model)) for _ in range(2)]
    compiled = ws.compile(step)
    for call in CALLS:
        same(compiled(*call), expected(*call), 1e-12, "loss")
    same_holder(ours, theirs, 1e-12, False, "model")
    assert compiled.captures <= 3
    assert compiled.state is not None
    assert list(compiled.state.modules.values()) == [ours]


# -- what wrappers do besides ------------------------------------------------------------------------------------------


def test_complete_gradients(accelerated: Callable[[Optimizer], Any], tmp_path: Path) -> None:
    """Accelerate's optimizer updates in the calls in which it would, also with programs from the cache."""
    from accelerate.state import GradientState

    def fn(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(2):
        made, twin = make(), make()
        ours, theirs = accelerated(made[1]), accelerated(twin[1])
        step = ws.compile(fn, cache=str(tmp_path))
        for number in range(8):
            GradientState()._set_sync_gradients(number % 3 == 2 or number == 7)
            call = CALLS[number % len(CALLS)]
            same(step(made[0], ours, *call), fn(twin[0], theirs, *call), 1e-12, f"loss {number}")
            same_holder(made[0], twin[0], 1e-12, False, "model")
            same_holder(made[1], twin[1], 1e-12, False, "optimizer")
        assert len(step.programs) <= 4, step.misses


def test_counting_of_updates_is_refused() -> None:
    core = pytest.importorskip("lightning.pytorch.core.optimizer")
    model, optimizer = make()
    counted: list[int] = []
    wrapper = core.LightningOptimizer(optimizer)
    wrapper._on_before_step = lambda: counted.append(1)
    wrapper._strategy = SimpleNamespace(optimizer_step=lambda optimizer, closure: optimizer.step(closure))
    before = wrapper._on_before_step
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(train)(model, wrapper, *CALLS[0])
    assert str(caught.value).replace(__file__, "<here>") == (
        "the step calls step() of a Lightning optimizer, which counts `trainer.global_step` in Python\n"
        f"  at: <here>:{train.__code__.co_firstlineno + 4}  optimizer.step()\n"
        "  needed: step() of the wrapped optimizer, and the count outside of the step\n"
        "  next: write `self.optimizers().optimizer.step()` in the step, and `self.optimizers().step()` after it: "
        "without gradients it only counts"
    )
    assert wrapper._on_before_step is before
    assert not counted


def test_accumulate_in_the_step_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = make()
    optimizer = accelerator.prepare_optimizer(optimizer)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            return train(model, optimizer, x, y)

    try:
        with pytest.raises(ws.CaptureError) as caught:
            ws.compile(fn)(*CALLS[0])
        assert str(caught.value).replace(__file__, "<here>") == (
            "the step changes Accelerate's sync_gradients: True -> False\n"
            f"  at: <here>:{fn.__code__.co_firstlineno + 1}  with accelerator.accumulate(model):\n"
            "  needed: a setting that is constant during a call of the step\n"
            "  next: write `with accelerator.accumulate(model):` around the call of the step, not inside the step"
        )
        assert "_set_sync_gradients" not in vars(accelerator.gradient_state)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


def test_a_wrapped_module_is_refused() -> None:
    model, optimizer = make()
    with pytest.raises(ws.StateError) as caught:
        ws.compile(train)(nn.DataParallel(model), optimizer, *CALLS[0])
    assert str(caught.value) == (
        "module 'DataParallel' is wrapped in DataParallel\n"
        "  needed: the plain module for one device: wholestep adds the communication\n"
        "  next: remove the wrapper; Accelerate, and the Trainer through it, add none with "
        "`accelerator.prepare_model(model, evaluation_mode=True)`"
    )
