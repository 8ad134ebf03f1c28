"""Branches on values of tensors: each call takes those of eager, or raises what eager raises and changes nothing."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws
from wholestep.capture import branches

INF = float("inf")


class Codes(nn.Module):
    """Fills its table in its first call, as quantizers do, and draws random numbers."""

    initted: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("table", torch.zeros(2))
        self.lin, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.lin(x))
        if not self.initted:
            self.table.copy_(h.detach().mean(0))
            self.initted.fill_(True)
        return h - self.table


def update(optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clamped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = model(x)
    if not torch.isfinite(h).all():
        h = h.nan_to_num(0.0, 1.0, -1.0)
    return update(optimizer, h.square().mean())


def asserted(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    assert (x.detach() < 100).all(), "too large"
    return update(optimizer, model(x).square().mean())


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    optimizer.step()
    return loss.detach()


def skipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    return update(optimizer, loss) if torch.isfinite(loss) else loss.detach()


def several(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = F.dropout(model(x), 0.3)
    if h.mean() > 0 and h.max() > 1:
        h = h * 2
    elif h.min() < -1:
        h = h + torch.rand_like(h)
    loss = update(optimizer, h.square().mean())
    x.mul_(0.5)
    return loss


def looped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    h = model(x)
    while h.isfinite().all() and h.abs().max() > 1:
        h = h / 2
    return update(optimizer, h.square().mean())


def scheduled(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = update(optimizer, model(x).square().mean())
    optimizer.param_groups[0]["lr"] *= 0.9
    vars(optimizer)["calls"] = vars(optimizer).get("calls", 0) + 1
    if loss > 1:
        optimizer.param_groups[0]["lr"] *= 0.5
    return loss


def told(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """What the user says of a check that fails has the values of the call, also of what it computes and has counted."""
    h = model(x)
    loss = update(optimizer, h.square().mean())
    if not h.abs().max() < 4:
        weight = f"{model.weight.detach().sum():.4f} {model.bias.detach().round(decimals=4).tolist()}"
        raise ValueError(f"bad {x} {h.max().item():.4f} {h.argmax()} {weight}")
    return loss


def checked(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Functions of torch that only raise, or ask for one truth."""
    h = model(x)
    if not torch.allclose(h, h, equal_nan=True) or torch.equal(h, h > 0) or torch.is_nonzero(h.min() > 1e9):
        return h.sum().detach()
    torch._assert_async((h.abs() < 12).all(), "too large")
    torch._assert((h.detach().min() > -7), "too small")
    flag = (h.mean() > 0).item()
    torch._check_tensor_all(h > -6, lambda: f"below: {h.min().item():.4f}")
    return update(optimizer, h.square().mean() * (2 if flag else 1))


STEPS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    **{fn.__name__: (fn, lambda: nn.Linear(3, 2)) for fn in (clamped, asserted, clipped, skipped, several, looped)},
    **{fn.__name__: (fn, lambda: nn.Linear(3, 2)) for fn in (told, checked)},
    "scheduled": (scheduled, lambda: nn.Linear(3, 2)),
    "buffer": (clamped, Codes),
}  # fmt: skip


def inputs(call: int) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(call)) * (1 + 2 * (call % 3))
    if call == 3:
        x[0, 0] = INF
    return x


def outcome(fn: Callable[..., Tensor], *args: Any) -> Any:
    try:
        return fn(*args)
    except (RuntimeError, AssertionError, ValueError) as error:
        return repr(error)


@pytest.mark.crossed
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_the_branch_of_each_call_is_that_of_eager(kind: str, adam: bool) -> None:
    """With its random numbers, changes in place and host numbers; a call that raises leaves what was before it."""
    fn, make = STEPS[kind]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    kinds = torch.optim.AdamW if adam else torch.optim.SGD
    mine, expected = (kinds(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = ws.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(7):
            x, before = inputs(call), copy.deepcopy((theirs.state_dict(), expected.state_dict()))
            y = x.clone()
            torch.manual_seed(call)
            there, drawn = outcome(fn, theirs, expected, y), torch.get_rng_state()
            torch.manual_seed(call)
            here = outcome(step, ours, mine, x)
            if isinstance(there, str):
                assert isinstance(here, str)
                there, here = (text.replace('"', "'") for text in (there, here))  # pytest adds lines to assertions
                assert here == there or here[:25] == there[:25] == "AssertionError('too large"
                theirs.load_state_dict(before[0])
                expected.load_state_dict(before[1])
            else:
                torch.testing.assert_close(here, there, equal_nan=True)
                assert torch.equal(torch.get_rng_state(), drawn)
                torch.testing.assert_close(x, y)
            for name, value in theirs.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], value, equal_nan=True, msg=f"{name} in call {call}")
            assert mine.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


def test_a_step_with_branches_is_captured_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are kept: a branch that was taken before costs no capture; a loop that nothing ends is refused."""
    monkeypatch.setattr(branches, "MOST", 10)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return update(optimizer, loss if x.sum() > 0 else -loss)

    step = ws.compile(fn)
    for sign in (-1, 1, -1, 1, 1, -1):
        step(model, optimizer, sign * torch.ones(2, 3))
    assert step.captures == 2

    def endless(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        while True:
            if loss > 3:
                return loss.detach()

    with pytest.raises(ws.CaptureError, match="reads the value of a tensor"):
        ws.compile(endless)(model, optimizer, torch.ones(2, 3))


def _either(model: Any, optimizer: Optimizer, x: Tensor, scale: Tensor) -> Tensor:
    h = model(x) * scale
    if not h.isfinite().all():
        raise ValueError(f"{tuple(h.shape)} is not finite")
    return update(optimizer, h.sum() if h.sum() > 0 else h.square().mean())


def test_each_branch_has_one_program_for_all_sizes() -> None:
    """What a call raises has its sizes, and changes nothing."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    step = ws.compile(_either)
    for rows, bias, scale in (
        (3, 5, 1),
        (5, 5, 1),
        (5, -5, 1),
        (6, 1, INF),
        (4, 5, 1),
        (6, -5, 1),
        (5, 1, INF),
        (7, 5, 1),
    ):
        batch = torch.randn(rows, 3).double() / 100, torch.tensor(scale).double()
        for one, optimizer, function in ((alone, optimizers[1], _either), (model, optimizers[0], step)):
            with torch.no_grad():
                one.bias.fill_(bias)
            if scale == INF:
                with pytest.raises(ValueError, match=rf"\({rows}, 2\) is not finite"):
                    function(one, optimizer, *batch)
            else:
                function(one, optimizer, *batch)
        torch.testing.assert_close(model.weight, alone.weight, rtol=1e-12, atol=0)
    assert len(step.programs) == 4, "two for the first size, two for all"


def _sampled(model: Any, optimizer: Optimizer, x: Tensor, scale: Tensor) -> Tensor:
    mean = model(x)
    normal = torch.distributions.Normal(mean, mean.exp() * scale)
    return update(optimizer, -normal.log_prob(torch.zeros_like(mean)).mean())


def test_distributions_validate_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # dynamo sets it to False
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    alone = copy.deepcopy(model)
    step = ws.compile(_sampled)
    pairs = [(f, m, torch.optim.SGD(m.parameters(), 0.1)) for f, m in ((_sampled, alone), (step, model))]
    for rows, scale in ((3, 1), (4, 2), (4, -1), (5, 1), (4, 1)):
        batch = torch.randn(rows, 3).double(), torch.tensor(scale).double()
        for function, one, optimizer in pairs:
            if scale < 0:
                with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
                    function(one, optimizer, *batch)
            else:
                function(one, optimizer, *batch)
        torch.testing.assert_close(model.weight, alone.weight, rtol=1e-12, atol=0)
    assert len(step.programs) == 2
    assert ws.capture(_sampled, alone, pairs[0][2], *batch).outputs, "offline, nothing is asked"


def test_conditions_on_the_batch_are_taken_as_they_are_in_the_call() -> None:
    """One capture for all of a call, as the times of a solver; another call that takes others has one of its own."""

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, times: Tensor) -> Tensor:
        h, times = model(x), times * 2.0
        assert (times[1:] > times[:-1]).all()
        for time in times:
            h = h * 0.5 if time > 1 else h + time
        return update(optimizer, h.square().mean())

    torch.manual_seed(0)
    ours = nn.Linear(3, 2).double()
    theirs = copy.deepcopy(ours)
    mine, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = ws.compile(fn)
    for call, captures in enumerate((1, 1, 2, 2, 2)):
        x, times = inputs(call % 3).double(), torch.linspace(0.0, 1.0, 6).double() + 0.01 * call + 0.3 * (call > 1)
        torch.testing.assert_close(step(ours, mine, x, times), fn(theirs, expected, x, times), rtol=1e-12, atol=0.0)
        assert step.captures == captures


def test_the_stages_assume_branches_only_if_they_are_told_to() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ws.CaptureError, match=r"with bool\(\), which"):
        ws.capture(clamped, model, optimizer, torch.ones(2, 3))
    graph = ws.capture(clamped, model, optimizer, torch.ones(2, 3), options=ws.CaptureOptions(branches=(False,)))
    assert "nan_to_num" in str(graph) or "where" in str(graph)
    assert graph.outputs[1].target == "branches"


def test_a_loop_that_ends_by_a_value_is_refused_in_the_call() -> None:
    """Each length is a program of its own: a call tries so many, not one for each pass of the loop."""
    model = nn.Linear(1, 1)

    def step(optimizer: Optimizer, limit: Tensor) -> Tensor:
        size = model(torch.ones(1, 1)).square().sum()
        total = size.detach() * 0
        while total < limit:
            total = total + 1
        return update(optimizer, size + total)

    compiled, optimizer = ws.compile(step), torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(optimizer, torch.tensor(0.0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ws.CaptureError, match="one call takes another branch than each of"):
        compiled(optimizer, torch.tensor(1000.0))
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    compiled(optimizer, torch.tensor(1.0))
