"""What an optimizer may keep, and what a call could not carry to the next one."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws


class Keeps(Optimizer):
    """Momentum, kept as `put` says and `get` finds it."""

    def __init__(self, params: Any, put: Callable[[Any, Tensor, Tensor], None], get: Callable[[Any, Tensor], Tensor]):
        super().__init__(params, {"lr": 0.1})
        self.put, self.get = put, get

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.put(self, p, torch.zeros_like(p))
                p.sub_(group["lr"] * self.get(self, p).mul_(0.9).add_(p.grad))


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.softplus(model(x)).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class _Object:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _beside(o: Any, p: Tensor, m: Tensor) -> None:
    o.state[p]["there"] = torch.zeros(())
    o.state["all"] = {**o.state.get("all", {}), "m": m}


def _shared(o: Any, p: Tensor, m: Tensor) -> None:
    first = next(iter(o.state.values())).get("count")
    o.state[p] = {"m": m, "count": torch.zeros(()) if first is None else first}


KEPT: dict[str, tuple[Any, Any, str]] = {
    "dict": (lambda o, p, m: o.state[p].update(m={0.9: m}), lambda o, p: o.state[p]["m"][0.9], "'m' in .* is a dict"),
    "list": (lambda o, p, m: o.state[p].update(m=[m]), lambda o, p: o.state[p]["m"][0], "'m' in .* is a list"),
    "deque": (lambda o, p, m: o.state[p].update(m=deque([m])), lambda o, p: o.state[p]["m"][0], "which is a deque"),
    "object": (
        lambda o, p, m: o.state[p].update(m=_Object(m)), lambda o, p: o.state[p]["m"].tensor, "a _Object",
    ),
    "beside": (_beside, lambda o, p: o.state["all"]["m"], "'all' in its state, which belongs to no parameter"),
    "number": (lambda o, p, m: o.state[p].update({0: m}), lambda o, p: o.state[p][0], "state under 0, which is no"),
    "path": (lambda o, p, m: o.state[p].update({"a/b": m}), lambda o, p: o.state[p]["a/b"], "state under 'a/b'"),
    "shared": (_shared, lambda o, p: o.state[p]["m"], "one tensor twice in its state, as 'count' and as 'count'"),
}  # fmt: skip


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_what_cannot_be_carried_is_refused(kind: str, made: bool) -> None:
    """At the first call, also where an eager step made the state before; and nothing was changed."""
    put, get, text = KEPT[kind]
    model, x = nn.Linear(3, 2), torch.ones(2, 3)
    optimizer = Keeps(model.parameters(), put, get)
    if made:
        train(model, optimizer, x)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ws.CaptureError, match=text) as found:
        ws.compile(train)(model, optimizer, x)
    assert "optimizer" in str(found.value).splitlines()[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert bool(optimizer.state) is made
