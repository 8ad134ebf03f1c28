"""Pieces lie anyhow in memory, as views with offsets and gaps: rules, views by strides, kernels that care."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.graph.ops import goes_by_memory
from wholestep.rules import registry
from wholestep.rules.pieces import FORMS, laid

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _double(double: None) -> None:
    """Everything here is float64, from one seed."""


@pytest.fixture
def table_restored() -> Iterator[None]:
    kept = dict(registry.RULES)
    yield
    registry.RULES.clear()
    registry.RULES.update(kept)
    registry._bound = {}


# -- the check -------------------------------------------------------------------------------
@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (4, 5, 6), (0, 3)])
def test_a_tensor_lies_as_asked(form: int, shape: tuple[int, ...]) -> None:
    given = torch.randn(shape)
    made = laid(given, form)
    assert torch.equal(made, given)
    assert made.data_ptr() != given.data_ptr() or not given.numel()
    if form and given.numel():
        assert made.storage_offset() > 0
        assert made.untyped_storage().nbytes() > given.nbytes
    if form > 1 and len(shape) > 1 and given.numel():
        assert not made.is_contiguous()


def test_elements_that_share_a_place_stay_together() -> None:
    given = torch.arange(6.0).unfold(0, 3, 1)
    made = laid(given, 1)
    assert torch.equal(made, given)
    assert (made.stride(), made.storage_offset()) == (given.stride(), 3)


@torch.library.custom_op("rules_test::from_the_start", mutates_args=())
def from_the_start(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, x.stride(), 0).clone()


def _row_by_row(start: int, length: int, x: Tensor) -> Tensor:
    return torch.as_strided(x, [length, x.shape[1]], [x.shape[1], 1]).clamp_min(0)


def _from_the_start(start: int, length: int, x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, x.stride(), 0).clamp_min(0)


@pytest.mark.usefixtures("table_restored")
@pytest.mark.parametrize("local", [_row_by_row, _from_the_start])
def test_a_rule_that_is_right_of_contiguous_pieces_alone_is_refused(local: Callable[..., Any]) -> None:
    ws.rule(aten.relu.default, "a b! -> a b!", local={"a": local})
    with pytest.raises(ws.RuleError) as caught:
        ws.check_rule(aten.relu.default, torch.randn(4, 6))
    assert "factor 'a' cut into 2, pieces that are views" in caught.value.found
    assert caught.value.next_step == (
        "correct the rule: read operands by index, not by their place in memory: a piece is a view of more"
    )


@pytest.mark.usefixtures("table_restored")
def test_an_op_that_counts_from_the_start_of_memory_is_refused() -> None:
    ws.rule(from_the_start, "a b -> a b")
    with pytest.raises(ws.RuleError, match="read operands by index"):
        ws.check_rule(from_the_start, torch.randn(4, 6))
    ws.rule(from_the_start, "a! b! -> a! b!")
    with pytest.raises(ws.RuleError, match="operands at an offset"):
        ws.check_rule(from_the_start, torch.randn(4, 6))


def test_ops_that_go_by_memory() -> None:
    assert goes_by_memory(aten.as_strided.default)
    assert goes_by_memory(aten._fused_adamw.tensor_lr)
    assert goes_by_memory(aten._foreach_addcdiv.Tensor)
    assert not goes_by_memory(aten._foreach_addcdiv.Scalar)
    assert not goes_by_memory(from_the_start)
