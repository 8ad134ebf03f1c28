"""What a step holds stays bounded, however many kinds of calls it meets; a step that is deleted leaves nothing."""

import gc
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep import _torch
from wholestep.runtime import step as runtime_step
from wholestep.runtime.program import Program
from wholestep.tuning import TUNING


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def held() -> Counter[str]:
    """How many objects of each kind of a program are alive."""
    gc.collect()
    kinds: tuple[Any, ...] = (Program, Graph, torch.fx.GraphModule, ws.Plan, ws.TrainGraph, ws.LocalGraph)
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))


def meet(count: int) -> None:
    """Train on batches of `count` sizes, twice, with room for four programs; compare with eager. Steps of other tests
    may live on: an op that a test registers keeps the names around it.
    """
    before = held()
    ours, eager = job(), job()
    step = ws.compile(train_step, max_programs=4, dynamic=False)
    sizes = [*range(1, count + 1), *range(1, count + 1)]
    after: list[Counter[str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call, rows in enumerate(sizes):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(step(*ours, x), train_step(*eager, x))
            if call + 1 in (8, len(sizes)):
                after.append(held())
    assert after[0] == after[1]
    assert (after[0] - before)["Program"] == len(step.programs) == 4
    assert step.captures == len(sizes)
    assert [str(one.message) for one in caught if "max_programs" in str(one.message)] == [
        "mean_square met more than max_programs=4 kinds of calls, and keeps the latest programs. Why the last one was "
        "captured: argument x is a tensor (5, 3) torch.float32, it was (4, 3) torch.float32"
    ]


def test_programs_are_bounded() -> None:
    meet(8)


@pytest.mark.full
def test_programs_of_many_sizes_are_bounded() -> None:
    meet(300)


def test_the_program_that_was_not_used_for_longest_goes() -> None:
    step, state = ws.compile(train_step, max_programs=3, dynamic=False), job()
    x = torch.randn(9, 3)
    for rows, captures in ((1, 1), (2, 2), (3, 3), (1, 3), (4, 4), (1, 4), (3, 4), (2, 5), (4, 6)):
        step(*state, x[:rows])
        assert step.captures == captures, rows
    assert len(step.programs) == 3


def test_logs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_step, "TUNING", type("Few", (), {"kept_log": 3}))
    step, state = ws.compile(train_step, max_programs=1, dynamic=False), job()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in range(1, 7):
            step(*state, torch.randn(rows, 3))
    assert len(step.misses) == 3
    assert step.misses[-1].startswith("argument x is a tensor (6, 3)")


def test_comparisons_are_bounded_and_their_programs_go_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of parameters with other names are other comparisons."""
    monkeypatch.setattr("wholestep.runtime.consistency.TUNING", type("Few", (), {"kept_comparisons": 1}))
    step, x = ws.compile(train_step), torch.randn(4, 3)
    plain, nested = job(), (model := nn.Sequential(nn.Linear(3, 2)), torch.optim.SGD(model.parameters(), lr=0.01))
    for state, captures in ((plain, 1), (plain, 1), (nested, 2), (nested, 2), (plain, 3)):
        step(*state, x)
        assert (step.captures, len(step.programs)) == (captures, 1)


def test_torchs_table_of_fake_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20
    monkeypatch.setattr(_torch.tracing, "_MOST_FAKE_RESULTS", most)
    step, state = ws.compile(train_step), job()
    for rows in range(20, 23):
        step(*state, torch.randn(rows, 3))
        assert _torch.tracing.FakeTensorMode.cache_info().size <= most


def test_a_deleted_step_returns_its_memory() -> None:
    before = held()
    (model, optimizer), step = job(), ws.compile(train_step, on_nonfinite="skip")
    for rows in (2, 3):
        step(model, optimizer, torch.randn(rows, 3))
    inside: list[weakref.ref[Any]] = [weakref.ref(step), *(weakref.ref(program) for program in step.programs)]
    del step
    assert held() == before
    assert [one() for one in inside] == [None] * 3
    assert train_step(model, optimizer, torch.randn(2, 3)).isfinite()  # what it trained is still there
    parameter = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert parameter() is None


def test_room_for_no_program_is_refused() -> None:
    with pytest.raises(ws.PlanError, match="max_programs=0"):
        ws.compile(train_step, max_programs=0)
    assert TUNING.kept_comparisons > 32
