"""Calls of a model whose parameters rest elsewhere than it runs: `meta` stands for a GPU, as nothing is computed."""

import torch
from torch import nn

from wholestep.runtime.between_steps import gather_before_eager_call


def test_parameters_in_host_memory_are_moved_for_a_call() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = list(model.parameters())
    gather_before_eager_call({"": model}, 1.0, "meta")
    with torch.no_grad():
        assert model(torch.zeros(5, 3, device="meta")).is_meta
        assert model[1](torch.zeros(5, 4, device="meta")).is_meta
    assert all(p is q and not p.is_meta for p, q in zip(model.parameters(), before, strict=True))


def test_nothing_is_hooked_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    gather_before_eager_call({"": model}, 1.0)
    hooks = len(model._forward_pre_hooks), len(model[0]._forward_hooks)
    gather_before_eager_call({"": model}, 1.0)
    assert (len(model._forward_pre_hooks), len(model[0]._forward_hooks)) == hooks == (1, 1)
