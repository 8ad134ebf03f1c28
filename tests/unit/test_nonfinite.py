"""`on_nonfinite`: a call whose loss or gradients are not finite changes nothing, and says what was not finite."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from wholestep.graph.graph import LocalGraph
from wholestep.runtime import nonfinite

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "AdamW-foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "AdamW-fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "Adagrad-fused": lambda p: Adagrad(p, lr=0.1, fused=True),
}
ALL = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
BAD = {
    "forward": ("loss", *ALL),
    "backward of all": ALL,
    "backward of the first layer": ("0.weight", "0.bias"),
    "loss": ("loss",),
}
"""What is not finite, in the order of the model, in each kind of bad batch."""


class Told:
    """What a step has told so far."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[str, ...]]] = []

    def __call__(self, number: int, names: tuple[str, ...]) -> None:
        self.calls.append((number, names))

    @property
    def names(self) -> list[tuple[str, ...]]:
        return [names for _, names in self.calls]


class Net(nn.Sequential):
    """Two layers and batch norm between them; `inner` and `outer` are ones, or zeros for a backward that is NaN."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def forward(self, x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self[0](x)
        out = self[2](self[1](hidden + (hidden * inner).abs().sqrt()))
        return out + (out * outer).abs().sqrt()


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def batch(seed: int, bad: str = "") -> Batch:
    """A batch for `Net`, and what is added to the loss."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    inner, outer, more = torch.ones(6, 1), torch.ones(6, 1), torch.zeros(())
    if bad == "forward":
        x[3, 1] = torch.inf
    elif bad == "backward of all":
        outer[2] = 0
    elif bad == "backward of the first layer":
        inner[1] = 0
    elif bad == "loss":
        more = torch.tensor(torch.inf)
    return x, inner, outer, more


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, inner: Tensor, outer: Tensor, more: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x, inner, outer).square().mean() + more
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def made(optimizer: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, OPTIMIZERS[optimizer](model.parameters())


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of parameters, buffers and optimizer state."""
    held = dict(model.state_dict())
    for i, param in enumerate(model.parameters()):
        held |= {f"{i}/{k}": v for k, v in optimizer.state[param].items() if isinstance(v, Tensor)}
    return {name: tensor.clone() for name, tensor in held.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bad_calls_leave_no_trace(optimizer: str) -> None:
    calls = [*BAD, "", *BAD, "", ""]
    told, ours, good = Told(), made(optimizer), made(optimizer)
    step = ws.compile(train_step, on_nonfinite=told)
    plain = ws.compile(train_step)
    for i, bad in enumerate(calls):
        before = state_of(*ours) if i else {}
        loss = step(*ours, *batch(i, bad))
        assert bool(loss.isfinite()) == (bad not in ("forward", "loss"))
        if bad and i:
            assert same(state_of(*ours), before), bad
        elif not bad:
            plain(*good, *batch(i))
            assert same(state_of(*ours), state_of(*good))
    step.flush()
    assert told.calls == [(i + 1, BAD[bad]) for i, bad in enumerate(calls) if bad]
    assert (step.captures, step.skipped) == (1, 2 * len(BAD))


def test_as_eager_with_checks_of_its_own() -> None:
    ours, (model, optimizer) = made("AdamW"), made("AdamW")
    step = ws.compile(train_step, on_nonfinite="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, bad in enumerate(["", "forward", "", "loss", "backward of all", "", ""]):
            step(*ours, *batch(i, bad))
            buffers = copy.deepcopy(dict(model.named_buffers()))
            optimizer.zero_grad()
            x, inner, outer, more = batch(i, bad)
            loss = model(x, inner, outer).square().mean() + more
            loss.backward()
            if loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            else:
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
    for name, tensor in state_of(model, optimizer).items():
        torch.testing.assert_close(state_of(*ours)[name], tensor, rtol=1e-4, atol=1e-6)


def test_skip_warns_once_and_counts() -> None:
    step, job = ws.compile(train_step, on_nonfinite="skip"), made("SGD")
    text = (
        "train_step skips call 2: the gradient of '0.weight' is not finite (and those of 1 more); "
        "step.skipped counts such calls"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, bad in enumerate(("", "backward of the first layer", "loss", "")):
            step(*job, *batch(i, bad))
    assert [str(one.message) for one in caught if "skips call" in str(one.message)] == [text]
    assert step.skipped == 2


def test_raise_names_the_first_and_keeps_the_last_good_state(tmp_path: Any) -> None:
    step, job = ws.compile(train_step, on_nonfinite="raise"), made("AdamW-fused")
    step(*job, *batch(0))
    kept = state_of(*job)
    step(*job, *batch(1, "forward"))
    with pytest.raises(ws.NonFiniteError) as caught:
        step(*job, *batch(2))
    assert str(caught.value) == (
        "call 2 of the step: the gradient of '0.weight' is not finite (and those of 5 more), nor is the loss\n"
        "  needed: a loss and gradients that are finite, with on_nonfinite='raise'\n"
        "  next: parameters and optimizer state are those before that call: look at its batch, or give "
        "on_nonfinite='skip'"
    )
    assert (caught.value.number, caught.value.names) == (2, BAD["forward"])
    assert same(state_of(*job), kept)

    step(*job, *batch(3))
    step(*job, *batch(4, "loss"))
    with pytest.raises(ws.NonFiniteError, match="call 4 of the step: the loss is not finite"):
        step.flush()
    step.flush()
    step(*job, *batch(5, "loss"))
    with pytest.raises(ws.NonFiniteError, match="call 5 of the step"):
        ws.save(tmp_path, step)
    assert not list(tmp_path.iterdir())
    ws.save(tmp_path, step)


def test_gradients_of_several_backwards() -> None:
    def micro(model: nn.Module, optimizer: Optimizer, *batches: Batch) -> None:
        optimizer.zero_grad()
        for x, inner, outer, more in batches:
            (model(x, inner, outer).square().mean() + more).backward()
        optimizer.step()

    told = Told()
    step, job = ws.compile(micro, on_nonfinite=told), made("AdamW")
    step(*job, batch(0), batch(1))
    before = state_of(*job)
    for pair in (("backward of the first layer", ""), ("", "backward of all"), ("loss", "")):
        step(*job, *(batch(i, bad) for i, bad in enumerate(pair)))
    assert same(state_of(*job), before)
    step(*job, batch(0), batch(1))
    assert not same(state_of(*job), before)
    assert told.names == [("0.weight", "0.bias"), ALL, ("loss",)]


def test_gradients_that_accumulate_over_calls_keep_their_value() -> None:
    def accumulate(model: nn.Module, x: Tensor, inner: Tensor, outer: Tensor, more: Tensor) -> None:
        (model(x, inner, outer).square().mean() + more).backward()

    model, _ = made("SGD")
    step = ws.compile(accumulate, on_nonfinite=Told(), keep_grads=True)
    step(model, *batch(0, "forward"))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    step(model, *batch(1))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step(model, *batch(2, "backward of all"))
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True) if p.grad is not None
    )


def test_two_optimizers_and_a_moving_average_keep_theirs() -> None:
    """A critic is updated before the generator's backward; the average follows the new parameters."""

    def train(models: list[nn.Module], optimizers: list[Optimizer], average: nn.Module, x: Tensor, by: Tensor) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            out = models[0](models[1](x)) if model is models[1] else model(x)
            (out * (by if model is models[1] else 1)).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), models[0].parameters(), strict=True):
                kept.lerp_(now, 0.1)

    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
    average = nn.Linear(4, 4).requires_grad_(False)
    optimizers: list[Optimizer] = [AdamW(models[0].parameters(), fused=True), SGD(models[1].parameters(), 0.1)]
    told = Told()
    step = ws.compile(train, on_nonfinite=told)
    x = torch.randn(3, 4)

    def held() -> list[Tensor]:
        tensors = [t for m in (*models, average) for t in m.state_dict().values()]
        return [t.clone() for t in (*tensors, *(v for s in optimizers[0].state.values() for v in s.values()))]

    step(models, optimizers, average, x, torch.ones(()))
    step(models, optimizers, average, x, torch.ones(()))
    before = held()
    step(models, optimizers, average, x, torch.tensor(torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(held(), before, strict=True))
    step(models, optimizers, average, x, torch.ones(()))
    assert not any(torch.equal(a, b) for a, b in zip(held(), before, strict=True))
    assert len(told.calls) == 1


def test_half_precision_gradients_whose_norm_is_no_half_are_finite() -> None:
    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x).float().sum() * 1000).backward()
        optimizer.step()

    model = nn.Linear(64, 64).half()
    told = Told()
    step = ws.compile(train, on_nonfinite=told)
    step(model, SGD(model.parameters(), lr=1e-6), torch.ones(1, 64).half())
    step.flush()
    assert not told.calls  # 64 * 64 * 1000 is more than a half holds


def test_an_evaluation_has_nothing_to_skip() -> None:
    def evaluate(model: nn.Module, *given: Tensor) -> Tensor:
        return model(*given)

    step, (model, _) = ws.compile(evaluate, on_nonfinite="raise"), made("SGD")
    assert not step(model, *batch(0, "forward")[:3]).isfinite().all()
    step.flush()


class Counting(Optimizer):
    """Keeps in its state a number of Python, a tensor that its first step creates, or one of another dtype then."""

    def __init__(self, params: Any, kept: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = kept
        for param in self.param_groups[0]["params"] if kept == "dtype" else ():
            self.state[param]["count"] = torch.zeros((), dtype=torch.long)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0 if self.kept == "number" else torch.zeros(())) + 1.0
                param.add_(param.grad, alpha=-0.1)


REFUSED = {
    "number": "a step that may be skipped changes the number optimizer.state['0.weight']['count'], "
    "which Python computes",
    "tensor": "a step that may be skipped creates 'count' of '0.weight', state of its optimizer",
    "dtype": "a step that may be skipped replaces '0.weight/count' by a tensor of another shape or dtype",
}


@pytest.mark.parametrize("kept", REFUSED)
def test_state_that_cannot_be_kept_is_refused(kept: str) -> None:
    model, _ = made("SGD")
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(train_step, on_nonfinite="skip")(model, Counting(model.parameters(), kept), *batch(0))
    assert caught.value.found == REFUSED[kept]


def test_a_scaler_and_unknown_options_are_refused() -> None:
    def scaled(model: nn.Module, optimizer: Optimizer, scaler: GradScaler, *given: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(*given).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(ws.CaptureError, match="the step has a GradScaler, which skips a step"):
        ws.compile(scaled, on_nonfinite="skip")(*made("SGD"), GradScaler("cpu"), *batch(0)[:3])
    with pytest.raises(ws.PlanError, match="on_nonfinite='warn'"):
        ws.compile(train_step, on_nonfinite="warn")  # type: ignore[call-overload]


def local(style: str, skips: bool) -> LocalGraph:
    options = ws.CaptureOptions(skip_nonfinite=skips)
    graph = ws.capture(train_step, *made("AdamW-fused"), *batch(0), options=options)
    made_local = ws.partition(graph, ws.plan(graph, "dp=4", ws.DataParallel(style)))  # type: ignore[arg-type]
    return ws.run_passes(made_local, ws.default_passes(ws.Hardware.preset("dgx-h100")))


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_one_collective_of_one_number_for_each_value_more(style: str) -> None:
    plain, skipping = (local(style, skips).collectives() for skips in (False, True))
    before, after = plain.pop("all_reduce", None), skipping.pop("all_reduce")
    assert plain == skipping
    assert after.count == (before.count if before else 0) + 1
    assert after.bytes == (before.bytes if before else 0) + 2 * 3 / 4 * 4 * (len(ALL) + 1)  # a ring of four


def test_fused_updates_stay_in_place() -> None:
    text = str(local("fully_shard", True))
    assert "_fused_adamw_" in text
    assert "found_inf" in text
    assert text.count("aten.where") == 3  # the three buffers of batch norm


class Copies(TorchDispatchMode):
    """Counts copies into matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default and args[0].dim() == 2
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_updates_of_several_ops_are_computed_in_place(optimizer: Any) -> None:
    """In a call whose gradients are finite; one that is not finite writes nothing at all."""

    def train(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(16, 8, bias=False)
    made = optimizer(model.parameters(), foreach=False)
    step, x = ws.compile(train, on_nonfinite=lambda number, names: None), torch.randn(4, 16)
    step(model, made, x)
    for value in (1.0, math.nan):
        with Copies() as copies:
            step(model, made, x * value)
        assert copies.count == 0


def test_norms_with_which_gradients_are_clipped_are_taken() -> None:
    for style in ("replicate", "fully_shard"):
        targets = [str(node.target) for node in local(style, True).graph.nodes]
        assert targets.count("aten.linalg_vector_norm.default") == len(ALL) + 2  # of all norms, and of the loss
        assert "aten._foreach_norm.Scalar" not in targets


def test_counts_grow_by_nothing_in_a_skipped_call() -> None:
    text = str(local("replicate", True))
    assert "_foreach_add_.Tensor" in text
    assert "copy_" not in text


class Twice(nn.Module):
    """A square matrix, with which updates can read it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.register_buffer("mean", torch.arange(9.0).view(3, 3))


UPDATES: list[Callable[[Any], object]] = [
    lambda model: model.mean.copy_(model.mean + model.mean.t()),
    lambda model: model.weight.add_(model.weight, alpha=0.5),
    lambda model: model.mean.lerp_(model.weight.t(), 0.1),
    lambda model: model.mean.copy_(model.weight.double() @ model.weight.double()),
    lambda model: model.mean.copy_(model.mean.t() + 1),
]


@pytest.mark.parametrize("update", UPDATES)
def test_updates_that_are_left_out_on_the_host_are_those_of_eager(update: Callable[[Any], object]) -> None:
    def train(model: Twice, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (x @ model.weight).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            update(model)
        return loss.detach()

    ours, eager, step = Twice(), Twice(), ws.compile(train, on_nonfinite=Told())
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    for i in range(6):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i))
        before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
        step(ours, optimizers[0], x * torch.nan if i % 3 == 1 else x)
        if i % 3 == 1:
            assert same(dict(ours.state_dict()), before)
        else:
            train(eager, optimizers[1], x)
            torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()), rtol=1e-6, atol=1e-6)
    step.flush()
    assert step.skipped == 2


class OnDevice:
    """A flag in the memory of a device."""

    is_cuda = True

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Event:
    """Counts how often the host waits for the device."""

    waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Event.waits += 1


def test_on_a_gpu_a_call_is_reported_before_the_call_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_host(made: Any) -> Tensor:
        return made.value

    monkeypatch.setattr(nonfinite, "_to_host", to_host)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    told = Told()
    watch = nonfinite.NonfiniteWatch("step", told)
    reported: list[int] = []
    for call in range(1, 5):
        watch.before_call()
        reported.append(len(told.calls))
        bad = torch.tensor(call == 1)
        watch.note(call, ("w",), OnDevice(bad), OnDevice(bad[None]))  # type: ignore[arg-type]
    assert reported == [0, 0, 1, 1]
    assert Event.waits == 2  # for the first and the second call, while the one after each was at work
    watch.read_all()
    assert Event.waits == 4
    assert told.calls == [(1, ("w",))]
