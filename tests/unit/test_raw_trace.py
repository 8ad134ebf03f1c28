"""Traces with the same digest have the same graph; what a graph depends on changes the digest."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getsourcelines
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.capture import capture_again, capture_step
from wholestep.capture.capture_options import CaptureOptions

KEPT = torch.ones(3)


def first(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = ((model(x) + 2).sum(-1) * KEPT).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _changed(old: str, new: str) -> Callable[..., torch.Tensor]:
    """`first` with another text, at the same lines of the same file."""
    lines, number = getsourcelines(first)
    scope: dict[str, Any] = {**globals()}
    exec(compile("\n" * (number - 1) + "".join(lines).replace(old, new), __file__, "exec"), scope)
    return scope["first"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 2", "+ 2.0"), ("+ 2", "+ 2 "), ("+ 2", "- -2"), ("sum(-1)", "sum(-2)"), ("sum(-1)", "sum(1)"),
        ("* KEPT", "* (KEPT + 1)"), ("KEPT", "torch.ones(3)"), ("mean()", "sum()"),
        ("loss.detach()", "loss.detach() + 0"),
        ("loss.detach()", "(loss.detach(), loss.detach())"), ("optimizer.zero_grad()", "pass"),
        ("optimizer.step()", "pass"), ("sum(-1)", "sum(dim=-1)"), ("KEPT)", "KEPT.clone())"), ("KEPT)", "KEPT * KEPT)"),
    ],
)  # fmt: skip
def test_equal_digests_are_of_equal_graphs(old: str, new: str) -> None:
    model, x = nn.Linear(2, 3), torch.ones(3, 2)
    given = model, torch.optim.AdamW(model.parameters()), x
    options = CaptureOptions(keep_grads=True)
    earlier = capture_step(first, given, {}, options, repeats=True)
    traced = capture_step(_changed(old, new), given, {}, options, repeats=True)
    assert earlier.raw is not None
    assert traced.raw is not None
    assert (earlier.raw.digest == traced.raw.digest) <= (str(earlier.graph) == str(traced.graph))
    again = capture_again(_changed(old, new), given, {}, options, earlier, {})
    assert str(again.graph) == str(traced.graph)
    assert [*again.graph.constants] == [*traced.graph.constants]
    pairs = zip(again.graph.constants.values(), traced.graph.constants.values(), strict=True)
    assert all(torch.equal(now, then) for now, then in pairs)


def test_the_graph_is_taken_and_what_the_step_reads_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(2, 3), torch.ones(3, 2)
    given = model, torch.optim.SGD(model.parameters()), x
    options = CaptureOptions()
    earlier = capture_step(first, given, {}, options, repeats=True)
    other = torch.full((3,), 2.0)
    monkeypatch.setitem(globals(), "KEPT", other)
    again = capture_again(first, given, {}, options, earlier, {})
    assert again.graph.graph is earlier.graph.graph
    assert [*again.graph.constants.values()] == [other]
