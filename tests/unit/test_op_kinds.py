"""Kinds of ops: rows for all ops that torch has, and for those of a captured step."""

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.rule_samples import overloads
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import (
    PRODUCTS,
    arithmetic,
    collective_kind,
    is_batch_norm_in_training,
    is_list_op,
    is_uninitialized,
    packet_name,
)

aten = torch.ops.aten
ATEN = overloads("aten")


@pytest.mark.parametrize("kind", ["attention", "convolution"])
def test_every_op_of_a_kind_has_its_row(kind: str) -> None:
    """Fails where a new version of torch has another attention or convolution: give it a row."""
    named = [op for op in ATEN if kind in packet_name(op)]
    assert len(named) > 10
    for op in named:
        found = arithmetic(op)
        assert found is not None, op
        assert (found.kind, found.backward) == (kind, "backward" in packet_name(op)), op
    assert not [op for op in ATEN if (found := arithmetic(op)) and found.kind == kind and op not in named]


def test_ops_that_leave_memory_as_it_is_have_their_row() -> None:
    assert [op for op in ATEN if is_uninitialized(op) != ("empty" in packet_name(op))] == []


def test_ops_on_lists() -> None:
    assert is_list_op(aten._foreach_add_.List)
    assert is_list_op(aten._fused_adamw_.default)
    assert not is_list_op(aten.cat.default)
    assert not is_list_op(len)


def test_batch_norms_in_training() -> None:
    assert is_batch_norm_in_training(aten.native_batch_norm.default)
    assert is_batch_norm_in_training(aten._native_batch_norm_legit.no_stats)
    assert not is_batch_norm_in_training(aten._native_batch_norm_legit_no_training.default)
    assert not is_batch_norm_in_training(aten.native_batch_norm_backward.default)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.picture = nn.Linear(16, 48), nn.Conv1d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.picture(mixed.transpose(1, 2).reshape(2, 8, 16))


def test_a_captured_step() -> None:
    with torch.device("meta"):
        model, x = Attention(), torch.empty(2, 8, 16)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph = ws.capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
    kinds = [found for n in local.graph.nodes if (found := arithmetic(n.target))]
    counts = {(one.kind, one.backward): kinds.count(one) for one in kinds}
    products = sum(n.target in PRODUCTS for n in local.graph.nodes)
    assert counts == {
        ("product", False): products, ("attention", False): 1, ("attention", True): 1, ("convolution", False): 1,
        ("convolution", True): 1,
    }  # fmt: skip
    assert products == 2, "the linear layer, and the gradient of its weight"
    sent = [collective_kind(n.target) for n in local.graph.nodes if is_collective(n)]
    assert set(sent) == {"all_gather", "reduce_scatter"}
    assert not [n for n in local.graph.nodes if collective_kind(n.target) and not is_collective(n)]
