"""Mixtures of experts: ranks that share tokens share the rows that are sorted by expert, and equal one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.hf_models import entries, loss_of
from tests.oracle import twin
from tests.steps import mean_square
from tests.together import Comparison, Double, OneDevice, compare, without_chance
from wholestep.cost.compute import flops
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.nodes import operands
from wholestep.layout import replicated

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
TOKENS = ws.DataParallel("fully_shard", semantics="global", input_batch_dim=1)
ROWS = ws.DataParallel("fully_shard", semantics="global")


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's grouped product knows no double precision."""
    moe = pytest.importorskip("transformers.integrations.moe")

    def uses_torch(*arguments: Tensor) -> bool:
        return False

    monkeypatch.setattr(moe, "_can_use_grouped_mm", uses_torch)


def _rows(graph: Graph) -> int:
    """Rows of all grouped products, which multiply each by matrices of one size."""
    calls = [n for n in graph.nodes if n.name.startswith("grouped_mm")]
    return sum(meta.one_tensor(operands(n)[0]).shape[0] for n in calls)


def _same(one: OneDevice, mesh: str, parallel: Any) -> Comparison:
    comparison = compare(one, mesh, parallel)
    assert comparison.worst < TOLERANCE, f"{comparison.where} differs by {comparison.worst:.1e}"
    assert ws.Plan.from_json(comparison.plan.to_json()) == comparison.plan
    return comparison


def _as_built(model: nn.Module) -> None:
    """Changes nothing."""


@cache
def mixture(
    name: str, rows: int = 2, edit: Callable[[Any], None] = _as_built, experts: str = "grouped_mm", layers: int = 1
) -> OneDevice:
    """A tiny model of Hugging Face, captured once for all tests that ask for it."""
    (entry,) = entries([name])
    entry = replace(entry, config={**entry.config, "num_hidden_layers": layers})
    generator = torch.Generator().manual_seed(5)

    def make() -> tuple[nn.Module, Optimizer]:
        model: Any = without_chance(entry.build().double())
        model.set_experts_implementation(experts)
        edit(model)
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        with Double():
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batch() -> dict[str, Tensor]:
        ids = torch.randint(3, 96, (rows, 12), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return OneDevice(make, step, [(batch(),) for _ in range(3)])


def _check(one: OneDevice, mesh: str, parallel: Any, share: float) -> None:
    """The plan equals one device, and no rank has more than a share of all rows."""
    comparison = _same(one, mesh, parallel)
    assert _rows(comparison.local.graph) <= share * _rows(one.capture.graph.graph)


@pytest.mark.usual("3-mixtral-2", "2-qwen3_moe-3", "4-qwen3_moe-3")
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tokens_and_rows(ranks: int, name: str, rows: int) -> None:
    """Rows of the batch or tokens of each over two, three and four ranks, which they divide or not."""
    one = mixture(name, rows, layers=2 if name == "mixtral" else 1)
    _check(one, f"dp={ranks}", TOKENS, 1 / ranks + 0.01)
    if rows > 1:
        _check(one, f"dp={ranks}", ROWS, -(-rows // ranks) / rows)


@pytest.mark.usual("dp=2,cp=2-parallel0")
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("dp=2,cp=2", [ws.DataParallel("fully_shard", axis="dp", semantics="global"), ws.ContextParallel()]),
        ("cp=4", ws.ContextParallel(style="zero1")),
    ],
)
def test_composes(mesh: str, parallel: Any) -> None:
    _check(mixture("mixtral", 4), mesh, parallel, 0.26)


def test_pieces_of_the_batch_have_their_own_rows() -> None:
    parallel = [ws.DataParallel("zero2", semantics="global"), ws.MicroBatches(2)]
    _same(mixture("mixtral", 4), "dp=2", parallel)


def test_batched_products() -> None:
    """Rows with a copy of their expert each, in the order of tokens."""
    one = mixture("mixtral", 2, experts="batched_mm")
    for ranks, parallel in ((4, TOKENS), (2, ROWS)):
        assert not _same(one, f"dp={ranks}", parallel).plan.repeated


@pytest.mark.parametrize("kind", ["whole", "in pieces", "twice", "computed again"])
def test_rows_of_experts_are_counted(kind: str) -> None:
    """Those that the router of an uncompiled model chooses in each call: of all forwards of a layer, each once."""
    layers = 2 if kind == "whole" else 1
    one, expected = mixture("mixtral", 4, layers=layers), dict[str, Tensor]()
    (model, optimizer), (other, plain) = twin(one.make)
    if kind == "computed again":  # in single precision: the backward has left `Double`
        model.float().gradient_checkpointing_enable({"use_reentrant": False})
        other.float()

    def train(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        if kind == "twice":
            one.step(model, optimizer, batch)
        if kind != "computed again":
            return one.step(model, optimizer, batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def note(name: str, module: Any, arguments: tuple[Tensor, ...]) -> None:
        rows = torch.bincount(arguments[1].flatten(), minlength=module.num_experts)
        expected[name] = rows + expected.get(name, torch.zeros_like(rows))

    for name, module in other.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(partial(note, name))
    parallel = [ws.DataParallel(), ws.MicroBatches(2)] if kind == "in pieces" else None
    step = ws.compile(train, parallel=parallel, count_expert_rows=True)
    for batch in one.batches:
        expected.clear()
        step(model, optimizer, *batch)
        train(other, plain, *batch)
        rows = step.metrics()
        assert [*rows] == [*expected] == [f"model.layers.{n}.mlp.experts" for n in range(layers)]
        assert all(torch.equal(rows[name], expected[name]) for name in expected)
    assert step.captures == 1


def test_rows_that_are_not_counted() -> None:
    with pytest.raises(ws.StateError, match="needed: count_expert_rows=True"):
        ws.compile(mean_square).metrics()
    with pytest.raises(PlanError, match="count_expert_rows with pad_to"):
        ws.compile(mean_square, count_expert_rows=True, pad_to=ws.PadTo((8,), {"x": 0}))


class Grouped(nn.Module):
    """Rows sorted by group, and torch's own product of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.Parameter(torch.randn(3, 16, 16) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 16)
        of, order = torch.sort(self.gate(tokens).argmax(-1))
        ends = torch.cumsum(torch.histc(of.float(), 3, 0, 2), 0, dtype=torch.int32)
        rows, experts = tokens[order].bfloat16(), self.experts.bfloat16()
        rows = nn.functional.grouped_mm(rows, experts.transpose(-2, -1), offs=ends).float()
        return x + torch.zeros_like(tokens).index_put((order,), rows).reshape(x.shape)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped product")
def test_the_product_of_torch() -> None:
    """In 16 bits, of which sums over ranks have another order; a rank has one of the seven tokens."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Grouped().float()
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-2, fused=True)

    one = OneDevice(make, mean_square, [(torch.randn(1, 7, 16).float(),) for _ in range(3)])
    comparison = compare(one, "dp=4", TOKENS)
    assert comparison.worst < 2e-2
    assert not comparison.plan.repeated
    priced = sum(flops(n) for n in comparison.local.graph.nodes if "grouped" in n.name)
    assert 0 < priced <= 2 / 7 * sum(flops(n) for n in one.capture.graph.graph.nodes if "grouped" in n.name)


@cache
def to_few(top: int) -> Callable[[Any], None]:
    """All tokens to the first `top` experts: equal scores."""

    def edit(model: nn.Module) -> None:
        modules: list[Any] = [*model.modules()]
        for module in modules:
            if hasattr(module, "top_k") and isinstance(getattr(module, "weight", None), Tensor):
                module.top_k = top
                nn.init.zeros_(module.weight)

    return edit


@pytest.mark.parametrize("top", [1, 2])
def test_experts_without_tokens(top: int) -> None:
    _check(mixture("mixtral", 2, to_few(top)), "dp=4", TOKENS, 0.26)


@pytest.mark.usual("gpt_oss")
@pytest.mark.parametrize("name", ["gpt_oss", "olmoe", "deepseek_v3", "granitemoe", "qwen2_moe", "jamba", "phimoe"])
def test_other_models(name: str) -> None:
    _check(mixture(name, 2, layers=2), "dp=4", TOKENS, 0.26)


class Sorted(nn.Module):
    """Rows sorted by group, multiplied by a matrix for each, scaled by what `scale` makes of them, and put back.
    `keys`: what is sorted, by groups; `counted`: what groups are counted by, of sorted keys.
    """

    def __init__(
        self,
        scale: Callable[[Tensor], Tensor] | None = None,
        inverse: str = "put",
        keys: Callable[[Tensor], Tensor] = lambda groups: groups,
        counted: Callable[[Tensor], Tensor] = lambda of: of,
    ) -> None:
        super().__init__()
        self.scale, self.inverse, self.keys, self.counted = scale, inverse, keys, counted
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        groups = self.keys(self.gate(tokens).argmax(-1))
        of, order = (None, torch.argsort(groups)) if self.inverse == "argsort" else torch.sort(groups)
        of = groups[order] if of is None else of
        ends = torch.cumsum(torch.histc(self.counted(of).double(), 3, 0, 2), 0, dtype=torch.int32)
        rows = torch.ops.transformers.grouped_mm_fallback(tokens[order], self.experts, ends)
        rows = rows if self.scale is None else self.scale(rows)
        if self.inverse == "argsort":
            rows = rows[torch.argsort(order)]
        else:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
            rows = rows[back]
        if self.inverse == "number":
            scales = rows.new_zeros(order.shape)
            scales[order] = 2.0
            rows = rows * scales[:, None]
        return rows.reshape(x.shape) + x


def _sorted(**options: Any) -> OneDevice:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Sorted(**options)
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(make, mean_square, [(torch.randn(2, 12, 8),) for _ in range(3)])


@pytest.mark.parametrize("inverse", ["put", "argsort"])
def test_a_permutation_and_its_inverse(inverse: str) -> None:
    _check(_sorted(inverse=inverse), "dp=4", TOKENS, 0.26)


class CountsFirst(nn.Module):
    """Rows of the experts that are chosen for each token, counted before they are sorted, as torchtitan does; the
    sorted keys are not read. `count`: what is counted of the chosen experts, and of those of another router; `last`:
    the last number.
    """

    def __init__(self, count: Callable[[Tensor, Tensor], Tensor] = lambda chosen, other: chosen, last: int = 5) -> None:
        super().__init__()
        self.count, self.last = count, last
        self.gate, self.other, self.out = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(5, 8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        scores, chosen = self.gate(tokens).softmax(-1).topk(2, 1)
        counted = self.count(chosen.view(-1), self.other(tokens).topk(2, 1)[1].view(-1))
        ends = torch.cumsum(torch.histc(counted.double(), 5, 0, self.last), 0, dtype=torch.int32)
        order = torch.argsort(chosen.view(-1), stable=True)
        rows = tokens[order // 2] * scores.view(-1)[order, None]
        rows = torch.ops.transformers.grouped_mm_fallback(rows, self.experts, ends)
        back = torch.zeros_like(rows)
        back[order] = rows
        return self.out(back.reshape(-1, 2, 8).sum(1)).reshape(x.shape) + x


@cache
def counts_first(**options: Any) -> OneDevice:
    """Five experts, four rows of six tokens."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = CountsFirst(**options)
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(make, mean_square, [(torch.randn(4, 6, 8),) for _ in range(3)])


@pytest.mark.parametrize("last", [4, 5])
@pytest.mark.parametrize("ranks", [2, 3])
def test_groups_that_are_counted_before_the_sort(ranks: int, last: int) -> None:
    _check(counts_first(last=last), f"dp={ranks}", TOKENS, 1 / ranks + 0.01)


NOT_COUNTED: dict[str, dict[str, Any]] = {
    "those of another router": {"count": lambda chosen, other: other},
    "as bool": {"count": lambda chosen, other: chosen.bool()},
    "one more": {"count": lambda chosen, other: chosen + 1},
    "half a group": {"last": 9},
}


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_where_other_numbers_are_counted_all_is_as_it_is(name: str) -> None:
    one = counts_first(**NOT_COUNTED[name])
    local = _same(one, "dp=2", TOKENS).local
    assert _rows(local.graph) == _rows(one.capture.graph.graph)


ORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "places": lambda rows: rows * torch.arange(rows.shape[0])[:, None],
    "running sum": lambda rows: rows.cumsum(0),
    "neighbours": lambda rows: rows + rows.roll(1, 0),
    "first row": lambda rows: rows + rows[0],
    "dropout": lambda rows: rows * torch.bernoulli(torch.full_like(rows, 1.0)),
}


@pytest.mark.parametrize("name", ORDERED)
def test_where_the_order_counts_all_is_as_it_is(name: str) -> None:
    one = _sorted(scale=ORDERED[name])
    local = _same(one, "dp=2", TOKENS).local
    assert _rows(local.graph) == _rows(one.capture.graph.graph)


GROUPS: dict[str, dict[str, Any]] = {
    "negative": {"keys": lambda groups: groups - 1},
    "dropped": {"keys": lambda groups: torch.where(groups == 1, -1, groups)},
    "wrapped": {"keys": lambda groups: (groups + 127).to(torch.int8)},
    "bool": {"keys": lambda groups: groups > 1},
    "counted as bool": {"counted": lambda of: of.bool()},
    "a number is written": {"inverse": "number"},
    "a product without groups": {"scale": lambda rows: rows + _product(rows[None])[0]},
}


def _product(rows: Tensor) -> Tensor:
    if not hasattr(nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    return nn.functional.grouped_mm(rows.bfloat16(), torch.ones(1, 8, 8).bfloat16()).double()


@pytest.mark.parametrize("name", GROUPS)
def test_where_groups_are_not_proved_all_is_as_it_is(name: str) -> None:
    """Rows of negative keys shift all groups: the product multiplies the first rows by the first matrix."""
    one = _sorted(**GROUPS[name])
    local = _same(one, "dp=2", TOKENS).local
    assert _rows(local.graph) == _rows(one.capture.graph.graph)


def test_a_plan_in_which_an_op_has_other_rows_is_refused() -> None:
    one = _sorted()
    plan = ws.plan(one.capture.graph, "dp=2", TOKENS)
    (product,) = [n for n in plan.decisions if n == "grouped_mm_fallback"]
    decision = plan.decisions[product]
    whole = tuple(replicated(len(layout.dims)) for layout in decision.operands)
    edited = replace(decision, operands=whole, outputs=(replicated(2),))
    with pytest.raises(PlanError, match=f"%{product} has other rows than the sort before it"):
        ws.partition(one.capture.graph, replace(plan, decisions={**plan.decisions, product: edited}))
