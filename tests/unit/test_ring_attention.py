"""`ContextParallel(method="ring")`: what is sent, held and hidden. Values are in `test_context_parallel.py`."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.optim import AdamW

import wholestep as ws
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.tp_models import VOCAB, Llama, next_token, step_of
from tests.unit.test_context_parallel import (
    DIM,
    HEADS,
    KEY_HEADS,
    MASKS,
    RING,
    TOLERANCE,
    WIDTH,
    Again,
    Attends,
    Padding,
)  # fmt: skip
from wholestep.cost.compute import flops
from wholestep.cost.simulation import sent_us, whole_bytes
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import arithmetic
from wholestep.partition import rank_ops
from wholestep.passes.recompute_layers import RecomputeLayers

pytestmark = pytest.mark.usefixtures("double")

H100 = ws.Hardware.preset("dgx-h100")


@pytest.mark.usual("3-7-2", "4-3-1")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", [8, 7, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_llama(ranks: int, length: int, rows: int) -> None:
    """Three steps of AdamW, with fewer heads of keys than of queries; also where layers are recomputed."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Llama(layers=2)
        return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)

    batches = [tuple(torch.randint(VOCAB, (2, rows, length))) for _ in range(3)]
    one = OneDevice(make, step_of(next_token), batches)
    comparison = compare(one, f"cp={ranks}", RING)
    assert comparison.worst < TOLERANCE, comparison.where
    assert not comparison.plan.repeated
    assert ws.Plan.from_json(comparison.plan.to_json()) == comparison.plan
    assert compare(one, f"cp={ranks}", RING, edit=RecomputeLayers("full")).worst < TOLERANCE


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_one_head_of_keys(mask: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Attends(MASKS[mask], keys=1)
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    comparison = compare(OneDevice(make, mean_square, [(torch.randint(11, (2, 7)),) for _ in range(3)]), "cp=3", RING)
    assert comparison.worst < TOLERANCE, comparison.where
    assert not comparison.plan.repeated
    assert comparison.local.collectives()["all_to_all"].count == 3 * 2


def _training(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, AdamW(model.parameters())


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def _layers(length: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """The forward and backward of two layers."""
    layers = [Again(MASKS["causal"]).to(dtype) for _ in range(2)]
    return ws.capture(_step, nn.Sequential(*layers), torch.randn(rows, length, DIM, dtype=dtype))


def _messages(local: LocalGraph) -> list[Node]:
    return [n for n in local.graph.nodes if is_collective(n) and "all_to_all" in str(n.target)]


@pytest.mark.parametrize(("ranks", "length"), [(2, 64), (4, 64), (3, 65)])
def test_what_is_sent(ranks: int, length: int) -> None:
    """(n-1)/n S 2 Hkv d in the forward, twice in the backward: keys and values again, and their gradients. Each rank
    sends a piece to one other, and is priced so.
    """
    local = ws.partition(graph := _layers(length, rows=2), ws.plan(graph, f"cp={ranks}", RING))
    piece = -(-length // ranks) * 2 * KEY_HEADS * WIDTH * 2 * 4
    total = local.collectives()["all_to_all"]
    assert total.count == 2 * 3 * (ranks - 1)
    assert total.bytes <= total.count * piece
    if length % ranks == 0:
        assert total.bytes == total.count * piece
        assert {whole_bytes(node) * (ranks - 1) // ranks for node in _messages(local)} == {piece}


def test_a_rank_never_has_all_keys() -> None:
    """Of 8 ranks: those of two layers are not held, nor one layer's where layers are recomputed."""
    length, ranks = 1 << 14, 8
    graph = _layers(length)
    of_layer = length * 2 * KEY_HEADS * WIDTH * 4
    for times, passes in ((2, ()), (1, (RecomputeLayers("full"),))):
        peaks = dict[str, int]()
        for method in ("gather", "ring"):
            context = ws.ContextParallel(method=cast(Any, method), balance=False if method == "gather" else None)
            local = ws.partition(graph, ws.plan(graph, f"cp={ranks}", context))
            local = ws.run_passes(local, (*passes, *ws.default_passes(H100)))
            peaks[method] = ws.peak_memory(local).size_bytes
        assert peaks["ring"] + times * of_layer * (ranks - 4) // ranks <= peaks["gather"]


def test_auto_takes_a_ring_where_memory_needs_it() -> None:
    """And otherwise what is simulated to be quickest; where attention has no ring, the others are tried."""
    graph, plans = _layers(1 << 14), list[ws.Plan]()
    for memory_bytes in (None, 5 << 20):
        auto = ws.Auto(hardware=H100, context=ws.ContextParallel(), memory_bytes=memory_bytes)
        plans.append(auto.search(graph, "cp=8").plan)
    methods = [part.method for plan in plans if plan.strategies for part in plan.strategies.of(ws.ContextParallel)]
    assert methods == ["auto", "ring"]
    padding = ws.capture(mean_square, *_training(Padding), torch.ones(1, 64).long())
    plan = ws.Auto(hardware=H100, context=ws.ContextParallel()).search(padding, "cp=2").plan
    assert "attention by auto" in plan.strategy


def test_messages_are_hidden() -> None:
    """A rank computes while the next piece is on its way; no more than this piece, and gradients of one, are."""
    graph, programs = _layers(1 << 17), list[LocalGraph]()
    for balance in (None, False):
        context = ws.ContextParallel(method="ring", balance=balance)
        program = ws.partition(graph, ws.plan(graph, "cp=4", context, hardware=H100))
        programs.append(ws.run_passes(program, ws.default_passes(H100)))
    balanced, local = programs
    assert ws.simulate(balanced, H100).step_us < 0.7 * ws.simulate(local, H100).step_us
    messages = _messages(local)
    sent = sum(sent_us(node, H100, local.mesh) for node in messages)
    assert ws.simulate(local, H100).exposed_us < sent / 4
    on_way, most = set[Node](), 0
    for node in local.graph.nodes:
        if node in messages:
            on_way.add(node)
        elif node.op == "call_function" and (op := arithmetic(node.target)) and op.kind == "attention":
            most = max(most, len(on_way))
        on_way -= {*node.all_input_nodes}
    assert most == 2


def test_products_of_16_bits_are_priced_as_such() -> None:
    """Results are merged in single precision, of the same products as those of gathered keys."""
    graph, times = _layers(1 << 16, dtype=torch.bfloat16), list[float]()
    for method, balance in (("gather", False), ("ring", None)):
        plan = ws.plan(graph, "cp=4", ws.ContextParallel(method=cast(Any, method), balance=balance), hardware=H100)
        times.append(ws.simulate(ws.run_passes(ws.partition(graph, plan), ws.default_passes(H100)), H100).step_us)
    assert times[1] < 1.5 * times[0]


class Crosses(nn.Module):
    """Attends to other tokens than those of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(DIM, HEADS * WIDTH), nn.Linear(DIM, 2 * HEADS * WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        k, v = self.keys(y).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        return F.scaled_dot_product_attention(self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2), k, v)


@pytest.mark.parametrize(("queries", "keys"), [(7, 5), (3, 9)])
def test_cross_attention(queries: int, keys: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Crosses()
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    batches = [(torch.randn(2, queries, DIM), torch.randn(2, keys, DIM)) for _ in range(3)]
    comparison = compare(OneDevice(make, step, batches), "cp=3", RING)
    assert comparison.worst < TOLERANCE, comparison.where
    assert comparison.local.collectives()["all_to_all"].count == 3 * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_the_columns_of_a_step(ranks: int) -> None:
    """By a mask, each step reads that of one rank's keys; scores, sent bytes and kept keys are those without a mask."""
    length, programs = 64, list[LocalGraph]()
    for mask in ("none", "documents"):
        graph = ws.capture(_step, Again(MASKS[mask]), torch.randn(2, length, DIM))
        programs.append(ws.partition(graph, ws.plan(graph, f"cp={ranks}", RING)))
    plain, masked = programs
    assert masked.collectives()["all_to_all"] == plain.collectives()["all_to_all"]
    assert sum(map(flops, plain.graph.nodes)) == sum(map(flops, masked.graph.nodes))
    widths = {meta.one_tensor(n).shape[-1] for n in masked.graph.nodes if n.target is rank_ops.columns}
    assert widths == {length // ranks}


def test_what_is_refused() -> None:
    graph = ws.capture(mean_square, *_training(Padding), torch.ones(2, 8).long())
    with pytest.raises(PlanError) as caught:
        ws.plan(graph, "cp=2", RING)
    text = str(caught.value)
    assert text.startswith("ContextParallel(method='ring'): %scaled_dot_product_efficient_attention")
    assert "attended = aten._scaled_dot_product_efficient_attention(" in text
    assert text.endswith("next: give method='gather'")
    one = OneDevice(
        lambda: (m := Attends(MASKS["none"]), AdamW(m.parameters())), mean_square, [(torch.ones(2, 8).long(),)]
    )
    tokens = ws.DataParallel("fully_shard", axis="dp", semantics="global", input_batch_dim=1)
    with pytest.raises(PlanError, match="attends in a ring, and other axes than cp share its tokens too"):
        compare(one, "dp=2,cp=2", [tokens, RING])
