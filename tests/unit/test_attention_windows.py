"""Keys and values travel only as far as a mask's window, which is proved by what computes the mask."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.optim import AdamW

import wholestep as ws
from tests.hf_models import entries, loss_of
from tests.steps import mean_square
from tests.together import OneDevice, compare, without_chance
from tests.unit.test_context_parallel import DATA, DIM, MASKS, TOLERANCE, Again, Attends
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import arithmetic
from wholestep.layout import OfOwner, sharded
from wholestep.passes.recompute_layers import RecomputeLayers
from wholestep.plan.attention_windows import reach_of

pytestmark = pytest.mark.usefixtures("double")


AGAIN = RecomputeLayers("full")


def _places(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None]


def _as_transformers(length: int) -> Tensor:
    q, k = torch.arange(length)[None, None, :, None], (torch.arange(length) + 0)[None, None, None]
    return q.new_ones((), dtype=torch.bool) & (k > q - 4) & (k <= q)


def _added(length: int) -> Tensor:
    q, k = _places(length)
    return torch.where((k - q > 0) | (q >= k + 5), -torch.inf, 0.0)


def _filled(length: int) -> Tensor:
    q, k = _places(length)
    return torch.randn(length, length).masked_fill(~((k - q).abs() <= 3), -torch.inf)


def _upper(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(2) + torch.zeros(length, length)


MASK_REACHES: dict[str, tuple[Callable[[int], Tensor], tuple[int, int] | None]] = {
    "transformers": (_as_transformers, (3, 0)),
    "transformers and padding": (lambda n: _as_transformers(n) & (torch.rand(2, 1, 1, n) > 0.1), (3, 0)),
    "bands": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(1).triu(-2), (2, 1)),
    "symmetric": (lambda n: (_places(n)[0] - _places(n)[1]).abs() < 3, (2, 2)),
    "added": (_added, (4, 0)),
    "filled": (_filled, (3, 3)),
    "several": (lambda n: _as_transformers(n) | torch.eye(n, dtype=torch.bool).tril(2).triu(-6), (6, 2)),
    "reversed": (lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-3).T, (0, 3)),
    "causal": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), None),
    "not a window": (lambda n: ~_as_transformers(n), None),
    "or all of a row": (lambda n: _as_transformers(n) | (torch.rand(2, 1, 1, n) > 0.9), None),
    "small numbers": (lambda n: torch.where(_as_transformers(n), 0.0, torch.finfo().min), None),
    "numbers of a mask": (lambda n: _as_transformers(n).double(), None),
    "other steps": (lambda n: 2 * _places(n)[1] < _places(n)[0], None),
    "a sum": (_upper, None),
    "one row for all": (lambda n: torch.ones(1, n, dtype=torch.bool).tril(3).triu(-2), None),
    "the first row for all": (lambda n: _as_transformers(n)[..., :1, :].expand(1, 1, n, n), None),
    "the first key for all": (lambda n: (_places(n)[0] - _places(n)[1][:, :1]).abs() < 3, None),
    "other dims exchanged": (lambda n: _as_transformers(n).transpose(0, 1), None),
    "not of numbers": (lambda n: _as_transformers(n) | torch.ones(n, n).triu(1).logical_not(), None),
    "and of numbers": (lambda n: _as_transformers(n) | torch.full((n, n), 2.0).logical_and(torch.ones(n, n)), None),
    "nothing": (lambda n: _as_transformers(n) & (_places(n)[1] > _places(n)[0]), None),
    "documents": (lambda n: MASKS["documents"](n)["attn_mask"], None),
}  # fmt: skip


def _attends(length: int, mask: Callable[[int], Tensor]) -> Any:
    def step(model: nn.Module, x: Tensor) -> None:
        q, k = model(x).unflatten(-1, (2, 1, 4)).movedim(2, 0)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), mask(length))
        attended.square().mean().backward()

    return ws.capture(step, nn.Linear(4, 8), torch.randn(2, length, 4))


def _calls(graph: Any) -> list[Node]:
    calls = (node for node in graph.graph.nodes if node.op == "call_function")
    return [node for node in calls if (op := arithmetic(node.target)) and op.kind == "attention"]


@pytest.mark.parametrize("name", MASK_REACHES)
def test_what_is_proved(name: str) -> None:
    """Of both calls, and never less than what the mask lets through."""
    mask, expected = MASK_REACHES[name]
    graph = _attends(12, mask)
    assert [reach_of(node) for node in _calls(graph)] == [expected] * 2
    seen = mask(12)
    seen = seen if seen.dtype == torch.bool else seen > -torch.inf
    before, behind = expected or (12, 12)
    distance = torch.arange(12)[None] - torch.arange(12)[:, None]
    assert not (seen & ((distance < -before) | (distance > behind))).any()
    sent = ws.partition(graph, ws.plan(graph, "cp=3", ws.ContextParallel(method="gather"))).collectives()
    assert ("all_to_all" in sent) == (expected is not None and sum(expected) < 8)


@pytest.mark.usual("window-8-2-gather", "symmetric window-7-4-ring", "bias-5-4-gather", "chunks-17-3-auto")
@pytest.mark.parametrize("method", ["gather", "ring", "auto"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [8, 7, 5, 17])
@pytest.mark.parametrize("mask", ["window", "symmetric window", "bias", "chunks"])
def test_windows_are_as_on_one_device(mask: str, length: int, ranks: int, method: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Attends(MASKS[mask], padded=mask == "window"), Again(MASKS[mask]))

    one = _one(make, 2, length)
    context = ws.ContextParallel(method=method)
    for comparison in (compare(one, f"cp={ranks}", context), compare(one, f"cp={ranks}", context, edit=AGAIN)):
        assert comparison.worst < TOLERANCE, comparison.where
        assert not comparison.plan.repeated
        assert ws.Plan.from_json(comparison.plan.to_json()) == comparison.plan


def _one(make: Callable[[], nn.Module], rows: int, length: int) -> OneDevice:
    def both() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(both, mean_square, [(torch.randint(0, 11, (rows, length)),) for _ in range(3)])


def test_a_causal_call_with_a_mask_is_not_cut() -> None:
    """Kernels have no call for a piece of it: ranks repeat it, and the plan says so."""
    one = _one(lambda: Attends(lambda length: {**MASKS["window"](length), "is_causal": True}), 2, 6)
    comparison = compare(one, "cp=3", ws.ContextParallel(method="gather"))
    assert comparison.worst < TOLERANCE, comparison.where
    assert comparison.plan.repeated
    with pytest.raises(PlanError, match="method='ring'"):
        compare(one, "cp=3", ws.ContextParallel(method="ring"))


@pytest.mark.usual("dp=2,cp=3-parallel0", "cp=2,tp=2-parallel1")
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("dp=2,cp=3", [DATA, ws.ContextParallel()]),
        ("cp=2,tp=2", [ws.ContextParallel(), ws.TensorParallel({"qkv": "colwise_gather_output", "out": "rowwise"})]),
        (
            "dp=2,cp=2",
            [ws.DataParallel("fully_shard", axis="dp", semantics="global", input_batch_dim=1), ws.ContextParallel()],
        ),
        ("cp=3", [ws.ContextParallel(), ws.MicroBatches(2)]),
        ("pp=2,cp=2", [ws.ContextParallel(style="replicate"), ws.Pipeline(micro_batches=2)]),
    ],
)
def test_composes(mesh: str, parallel: Any) -> None:
    """Where another axis shares the tokens too, keys are gathered."""

    def make() -> nn.Module:
        return nn.Sequential(Attends(MASKS["window"], padded=True), Again(MASKS["window"]))

    comparison = compare(_one(make, 4, 8), mesh, parallel)
    assert comparison.worst < TOLERANCE, comparison.where
    assert ("all_to_all" in comparison.local.collectives()) == (mesh != "dp=2,cp=2")


def _received(local: LocalGraph, ranks: int) -> list[int]:
    """The most rows that a rank gets, of each message."""
    messages = [n for n in local.graph.nodes if is_collective(n) and "all_to_all" in str(n.target)]
    splits = [cast("list[OfOwner]", node.args[1]) for node in messages]
    return [max(sum(part.at({"cp": rank}) for part in parts) for rank in range(ranks)) for parts in splits]


@pytest.mark.parametrize(("length", "ranks"), [(64, 2), (64, 4), (256, 4), (1024, 8), (1024, 64), (1001, 7)])
def test_what_is_sent_does_not_grow_with_the_sequence(length: int, ranks: int) -> None:
    """A rank of a window of w tokens gets w - 1 tokens of others, however many tokens and ranks there are, and gives
    back their gradients; once for forward and backward. Nothing gathers keys.
    """
    window = 25

    def mask(length: int) -> dict[str, Tensor]:
        return {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)}

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    graph = ws.capture(step, Again(mask), torch.randn(2, length, DIM))
    local = ws.partition(graph, plan := ws.plan(graph, f"cp={ranks}", ws.ContextParallel()))
    assert _received(local, ranks)[0] == min(window - 1, length - -(-length // ranks))
    assert len(_received(local, ranks)) == 2
    gathers = [n for n in local.graph.nodes if is_collective(n) and "all_gather" in str(n.target)]
    assert all(len(meta.one_tensor(node).shape) < 4 for node in gathers)
    assert "a window: queries stay" in plan.explain("scaled_dot_product_flash_attention_for_cpu")


def test_a_plan_that_cuts_keys_without_a_window_is_a_ring() -> None:
    graph = _attends(12, MASK_REACHES["documents"][0])
    plan = ws.plan(graph, "cp=3", ws.ContextParallel(method="gather"))
    name = _calls(graph)[0].name
    decision = plan.decisions[name]
    query, _, _, *others = decision.operands
    cut = replace(decision, operands=(query, sharded(4, 2, "cp"), sharded(4, 2, "cp"), *others))
    local = ws.partition(graph, replace(plan, decisions={**plan.decisions, name: cut}))
    assert local.collectives()["all_to_all"].count == 2


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_models_of_transformers(name: str) -> None:
    """Masks as transformers build them: 4 of 24 tokens."""
    (entry,) = entries([name])
    model: Any = without_chance(entry.build())

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    batch = {key: torch.cat([value, value], 1) for key, value in entry.batch(torch.Generator().manual_seed(5)).items()}
    graph = ws.capture(step, model.float(), batch)
    local = ws.partition(graph, ws.plan(graph, "cp=4", ws.ContextParallel()))
    reaches = [reach_of(node) for node in _calls(graph)]
    assert (3, 0) in reaches
    assert _received(local, 4) == [3] * 2 * (reaches.count((3, 0)) // 2)
