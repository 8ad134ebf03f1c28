"""A call that raises leaves state as it was before it, or says that it has not."""

import copy
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep._torch import modes_now
from wholestep.backend.reached import Reached
from wholestep.runtime.failed_call import FailedCall


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with statistics and random numbers, and an optimizer with state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def rows(call: int, wrong: bool = False) -> Tensor:
    drawn = torch.randint(10, (6,), generator=torch.Generator().manual_seed(call))
    return torch.where(torch.arange(6) == 5, 100, drawn) if wrong else drawn


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    entries = [entry[key] for entry in optimizer.state.values() for key in sorted(entry)]
    return [t.detach().clone() for t in (*model.state_dict().values(), *entries, torch.get_rng_state())]


def test_a_call_with_a_wrong_index_has_not_happened() -> None:
    found: list[list[Tensor]] = []
    for wrong in ((), (0, 2, 3)):
        model, optimizer = made()
        step = ws.compile(train_step)
        for call in range(5):
            if call in wrong:
                before = state_of(model, optimizer)
                with pytest.raises(IndexError):
                    step(model, optimizer, rows(call, wrong=True))
                after = state_of(model, optimizer)
                assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            step(model, optimizer, rows(call))
        found.append(state_of(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def positive(h: Tensor, good: Tensor) -> Tensor:
    """A matrix that is positive if the numbers are good."""
    return torch.where(good, h.t() @ h + torch.eye(4), 0.0)


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class": lambda h, i: h * F.one_hot(i, 4),
    "class that is computed": lambda h, i: h * F.one_hot(i + h.detach()[:, 0].mul(0).long(), 4),
    "not positive": lambda h, i: torch.linalg.cholesky(positive(h, (i < 4).all())),
    "singular": lambda h, i: torch.linalg.inv(positive(h, (i < 4).all())),
    "no solution": lambda h, i: torch.linalg.solve(positive(h, (i < 4).all()), h.t()),
    "no factors": lambda h, i: torch.linalg.lu_factor(positive(h, (i < 4).all())).LU,
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("pieces", [1, 2])
def test_values_that_eager_refuses_are_refused(body: Callable[[Tensor, Tensor], Tensor], pieces: int) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, i: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for rows, numbers in zip(x.chunk(pieces), i.chunk(pieces), strict=True):
            part = body(model(rows), numbers).square().sum()
            part.backward()
            loss = loss + part.detach()
        optimizer.step()
        return loss

    state: list[list[Tensor]] = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        step = ws.compile(train) if compiled else train
        for call in range(4):
            x, i = torch.randn(12, 4, dtype=torch.float64), torch.randint(4, (12,))
            if call in (0, 2):
                before = state_of(model, optimizer)
                with pytest.raises((RuntimeError, IndexError)):
                    step(model, optimizer, x, torch.where(torch.arange(12) == 9, 4, i))
                assert not compiled or all(map(torch.equal, state_of(model, optimizer), before))
            else:
                step(model, optimizer, x, i)
        state.append([p.detach() for p in model.parameters()])
    for ours, plain in zip(*state, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.ASGD, torch.optim.AdamW])
def test_state_begins_with_the_learning_rate_of_the_call_that_makes_it(kind: Any) -> None:
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        model, _ = made()
        optimizer, step = kind(model.parameters(), lr=0.1), ws.compile(train_step) if compiled else train_step
        torch.manual_seed(1)
        for call in range(4):
            if call == 0:
                with pytest.raises(IndexError):
                    step(model.eval(), optimizer, rows(call, wrong=True))
                optimizer.param_groups[0]["lr"] = 0.01
            step(model.eval(), optimizer, rows(call))
        found.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def interrupted(call: Callable[[], Any], line: int) -> bool:
    """Make a call, with Ctrl-C at its `line`-th line of wholestep, counted from the generated function on."""
    left = line

    def trace_lines(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left <= 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace_lines

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        ours = frame.f_code.co_filename == "<wholestep eager>" or frame.f_code.co_name == "_act"
        return trace_lines if ours else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("begun", [(0, 1), (None, None), (2, 2)])
def test_ranks_go_on_that_have_begun_as_many_collectives(begun: tuple[int | None, int | None]) -> None:
    program: Any = SimpleNamespace(meets=True, capture=SimpleNamespace(state=SimpleNamespace(params={})))
    answers = [(3, n, f"KeyboardInterrupt {rank}") for rank, n in enumerate(begun)]
    ranks: Any = SimpleNamespace(size=2, gather=lambda label, own, what, kind: answers)
    failed = FailedCall("train_step", 3, "KeyboardInterrupt", Reached(begun=begun[0]))
    if begun == (2, 2):
        failed.agree([program], ranks, "label")
        return
    with pytest.raises(ws.RankMismatchError) as raised:
        failed.agree([program], ranks, "label")
    points = "rank 0 in call 3 (KeyboardInterrupt 0), rank 1 in call 3 (KeyboardInterrupt 1)"
    assert str(raised.value).startswith(f"ranks left a call of train_step at different points: {points}\n")


class Counted(nn.Module):
    """Counts its calls on the host, after the tensors have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.calls = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inside(x)


def test_a_call_that_is_interrupted_has_not_happened_or_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = ws.compile(train_step)
    x = torch.randn(6, 4)
    step(model, optimizer, x)
    ws.save(tmp_path, step)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()]), model.calls
    step(model, optimizer, x)
    expected, counted = state_of(model, optimizer), model.calls

    def again() -> None:
        ws.load(tmp_path, step)
        model.calls = before[1]

    torn = 0
    for line in range(1, 400, 7):
        again()
        if not interrupted(lambda: step(model, optimizer, x), line):
            break
        try:
            step(model, optimizer, x)
        except ws.StateError:
            torn += 1
            with pytest.raises(ws.CheckpointError, match=r"raised KeyboardInterrupt.*, after it had begun to change"):
                ws.save(tmp_path / "torn", step)
            continue
        now = state_of(model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(now, expected, strict=True)), line
        assert model.calls == counted
    assert line > 60
    assert torn
    again()
    step(model, optimizer, x)
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, optimizer), expected, strict=True))


def with_ctrl_c(call: Callable[[], Any], at: int, primes: list[int]) -> int:
    """Make a call with Ctrl-C when it has entered and left `at` functions; returns how many it had then, or has. Of
    these, `primes` are where an optimizer has made state.
    """
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if frame.f_code is with_ctrl_c.__code__:  # the call has ended
            return
        count += 1
        if event == "return" and frame.f_code.co_name == "_init_group":
            primes.append(count)
        if count == at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(note)
    try:
        call()
    except KeyboardInterrupt:
        assert count == at
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.timeout(900)  # of the 200 first calls
@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("points", [2, pytest.param(200, marks=pytest.mark.full)])
def test_ctrl_c_anywhere_in_a_call_leaves_all_of_it_or_nothing(points: int, begun: int) -> None:
    def trained(at: int) -> tuple[list[Tensor], int]:
        model, optimizer = made()
        step = ws.compile(train_step)
        params, modes = [*model.parameters()], modes_now()
        for call in range(begun):
            step(model, optimizer, rows(call))
        events = with_ctrl_c(lambda: step(model, optimizer, rows(begun)), at, primes)
        assert modes_now() == modes
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert len(optimizer.state) in (0, len(params))
        try:
            for call in range(step.calls, begun + 3):
                step(model, optimizer, rows(call))
        except ws.StateError:
            return [], events
        return state_of(model, optimizer), events

    primes: list[int] = []
    trained(0)  # what a first capture imports and keeps
    primes.clear()
    expected, events = trained(0)
    where = primes[:1]
    seed = 0 if points < 100 else random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for at in [*where, *(draw.randint(1, events) for _ in range(points))]:
        found, _ = trained(at)
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) if found else True
        assert same, f"Ctrl-C at {at} of {events} events, of seed {seed}"
