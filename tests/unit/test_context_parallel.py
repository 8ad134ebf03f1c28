"""Ranks of one axis share the tokens of each sequence: every mask, length and method equals one device."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from tests import simulate
from tests.hf_models import entries, loss_of
from tests.steps import mean_square
from tests.together import Comparison, Double, OneDevice, compare, without_chance
from wholestep.backend.rank_binding import bound_arguments
from wholestep.cost.compute import flops, work
from wholestep.errors import MeshError, PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.loop import loop_of
from wholestep.graph.op_kinds import arithmetic, collective_kind
from wholestep.graph.text import human
from wholestep.hardware.device import MeasuredDevice
from wholestep.rules.aten.query_pieces import key_piece, query_piece

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
HEADS, KEY_HEADS, WIDTH, DIM, CLASSES = 4, 2, 4, 16, 13
Mask = Callable[[int], Any]
aten = torch.ops.aten


def _banded(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().triu(-2)


def _documents(length: int) -> Tensor:
    of = torch.arange(length) // 4
    return (of[:, None] == of[None]).tril()


def _of_numbers(length: int) -> Tensor:
    """Made of one number, and of triangles along both dims, in steps that views are among."""
    near = torch.full((length, length), -torch.inf).triu(1).T[None]
    return torch.where(near.isinf().tril(2).transpose(-1, -2), 0.0, near.permute(0, 2, 1)).unsqueeze(1)


def _biased(length: int) -> Tensor:
    bias = torch.arange(length)[None] - torch.arange(length)[:, None]
    return bias.to(torch.float64).masked_fill(~_banded(length), -torch.inf)


def _lowest(length: int) -> Tensor:
    """As older models make masks: a row of lowest numbers alone sees all keys alike."""
    hidden = _documents(length).logical_not() | (torch.arange(length) % 5 == 2)[:, None]
    return hidden * torch.finfo(torch.float64).min


def _of_heads(length: int) -> Tensor:
    return _biased(length) * torch.arange(1, HEADS + 1)[:, None, None]


MASKS: dict[str, Mask] = {
    "none": lambda length: {},
    "causal": lambda length: {"is_causal": True},
    "window": lambda length: {"attn_mask": _banded(length)},
    "symmetric window": lambda length: {"attn_mask": _banded(length) | _banded(length).T},
    "prefix": lambda length: {"attn_mask": torch.ones(length, length, dtype=torch.bool).tril(length // 3)},
    "documents": lambda length: {"attn_mask": _documents(length)},
    "chunks": lambda length: {"attn_mask": _documents(length) & _banded(length)},
    "bias": lambda length: {"attn_mask": _biased(length)},
    "numbers": lambda length: {"attn_mask": _of_numbers(length)},
    "no keys": lambda length: {"attn_mask": _documents(length) & (torch.arange(length) % 3 != 1)[:, None]},
    "lowest": lambda length: {"attn_mask": _lowest(length)},
    "heads": lambda length: {"attn_mask": _of_heads(length)},
    "padding": lambda length: {"attn_mask": torch.arange(length).lt(max(2, length - 3))[None, None, None]},
}


class Attends(nn.Module):
    """Embeds tokens and their positions, and attends with grouped heads; `padded` masks the end of the last row."""

    def __init__(self, mask: Mask, padded: bool = False, keys: int = KEY_HEADS) -> None:
        super().__init__()
        self.mask, self.padded, self.sizes = mask, padded, [HEADS * WIDTH, keys * WIDTH, keys * WIDTH]
        self.tokens, self.places = nn.Embedding(11, DIM), nn.Embedding(320, DIM)
        self.qkv = nn.Linear(DIM, sum(self.sizes))
        self.out, self.norm = nn.Linear(HEADS * WIDTH, DIM), nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))

    def attend(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm(x)).split(self.sizes, -1)
        q, k, v = (t.view(rows, length, -1, WIDTH).transpose(1, 2) for t in parts)
        options = self.mask(length)
        if self.padded:
            there = torch.arange(length) < length - torch.arange(rows)[:, None]
            options = {"attn_mask": options["attn_mask"] & there[:, None, None]}
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return x + self.out(attended.transpose(1, 2).reshape(rows, length, -1))


class Again(Attends):
    """A second layer."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(ids)


def _one(make: Callable[[], nn.Module], rows: int, length: int, step: Any = mean_square) -> OneDevice:
    def both() -> tuple[nn.Module, Optimizer]:
        model = make()
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    return OneDevice(both, step, [(torch.randint(0, 11, (rows, length)),) for _ in range(3)])


def _same(one: OneDevice, mesh: str, parallel: Any) -> Comparison:
    comparison = compare(one, mesh, parallel)
    assert comparison.worst < TOLERANCE, f"{comparison.where} differs by {comparison.worst:.1e}"
    assert ws.Plan.from_json(comparison.plan.to_json()) == comparison.plan
    return comparison


@pytest.mark.usual(
    "2-causal-8-2", "4-causal-8-2", "3-causal-7-2", "4-causal-3-2", "2-bias-8-2", "4-documents-7-1", "3-numbers-7-2"
)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("length", [8, 7, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_masks_lengths_and_rows(ranks: int, mask: str, length: int, rows: int) -> None:
    """A length that ranks divide or not, or that is shorter than they."""
    one = _one(lambda: Attends(MASKS[mask]), rows, length)
    methods: tuple[Any, ...] = ("gather", "ring", *["heads"] * (KEY_HEADS % ranks == 0))
    for method in methods:
        comparison = _same(one, f"cp={ranks}", ws.ContextParallel(method=method))
        assert not comparison.plan.repeated
        assert method == "heads" or length == 8 or not _pairs(comparison.local, length)


def _pairs(local: LocalGraph, length: int) -> list[str]:
    """What a rank makes for all pairs of tokens."""
    tensors = ((node.name, meta.tensor(node)) for node in local.graph.nodes)
    return [name for name, tensor in tensors if tensor and tensor.shape[-2:] == (length, length)]


def test_padded_rows() -> None:
    one = _one(lambda: Attends(MASKS["window"], padded=True), 3, 8)
    methods: tuple[Any, ...] = "gather", "heads", "ring"
    for method in methods:
        _same(one, "cp=2", ws.ContextParallel(method=method))


DATA = ws.DataParallel("fully_shard", axis="dp", semantics="global")
RING = ws.ContextParallel(method="ring")


@pytest.mark.usual("dp=2,cp=2-parallel0", "cp=2,tp=2-parallel8", "cp=2-parallel9", "cp=3-parallel14")
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("dp=2,cp=2", [DATA, ws.ContextParallel(method="heads")]),
        ("dp=2,cp=2", [ws.DataParallel("zero1", axis="dp", semantics="global"), ws.ContextParallel(method="gather")]),
        ("cp=2,tp=2", [ws.ContextParallel(), ws.TensorParallel({"qkv": "colwise_gather_output", "out": "rowwise"})]),
        ("cp=2", [ws.ContextParallel(style="zero2"), ws.MicroBatches(2)]),
        ("cp=2", ws.ContextParallel(style="replicate")),
        ("pp=2,cp=2", [ws.ContextParallel(style="replicate"), ws.Pipeline(micro_batches=2)]),
        ("cp=4", ws.ContextParallel(style="zero1")),
        ("dp=2,cp=2", [DATA, ws.ContextParallel(method="gather", balance=True)]),
        (
            "cp=2,tp=2",
            [
                ws.ContextParallel(method="gather", balance=True),
                ws.TensorParallel({"qkv": "colwise_gather_output", "out": "rowwise"}),
            ],
        ),
        ("cp=2", [ws.ContextParallel(method="gather", balance=True), ws.MicroBatches(2)]),
        (
            "pp=2,cp=2",
            [
                ws.ContextParallel(method="gather", style="replicate", balance=True),
                ws.Pipeline(micro_batches=2),
            ],
        ),
        ("context=2", ws.ContextParallel(axis="context")),
        ("dp=2,cp=3", [DATA, RING]),
        ("cp=2,tp=2", [RING, ws.TensorParallel({"qkv": "colwise_gather_output", "out": "rowwise"})]),
        ("cp=3", [RING, ws.MicroBatches(2)]),
        ("dp=2,cp=2", [DATA, ws.ContextParallel(method="ring", balance=True)]),
        (
            "pp=2,cp=2",
            [ws.ContextParallel(method="ring", style="replicate", balance=True), ws.Pipeline(micro_batches=2)],
        ),
        ("pp=2,cp=2", [ws.ContextParallel(method="ring", style="replicate"), ws.Pipeline(micro_batches=2)]),
    ],
)
def test_composes(mesh: str, parallel: Any) -> None:
    planned = _same(_one(lambda: Attends(MASKS["causal"]), 4, 8), mesh, parallel).plan
    assert planned.strategies is not None
    assert bool(planned.options.balanced) == any(c.balance for c in planned.strategies.of(ws.ContextParallel))


def _two_axes(outer: Any, inner: Any, **options: Any) -> list[ws.ContextParallel]:
    return [ws.ContextParallel(method=outer, **options), ws.ContextParallel("inner", method=inner)]


@pytest.mark.usual(
    "7-documents-ring-heads-3", "12-window-auto-heads-2", "3-causal-gather-heads-3", "7-bias-auto-auto-2"
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("ring", "heads"), ("gather", "heads"), ("auto", "heads"), ("gather", "gather"), ("auto", "auto")],
)
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "bias"])
@pytest.mark.parametrize("length", [12, 7, 3])
def test_two_axes_share_the_tokens(length: int, mask: str, outer: str, inner: str, ranks: int) -> None:
    """Heads inside a node (8 messages: queries, keys, values and the result, forward and backward), keys of other nodes
    by another method, also those of a window alone.
    """
    one = _one(lambda: Attends(MASKS[mask]), 2, length)
    comparison = _same(one, f"cp={ranks},inner=2", _two_axes(outer, inner))
    assert not comparison.plan.repeated
    if inner == "heads" and (length > 3 or mask in ("causal", "documents")):
        of_keys = 2 if mask in ("window", "bias") else 3 * (ranks - 1) if outer == "ring" else 0
        assert (
            comparison.local.collectives()["all_to_all"].count == 8 + of_keys
        )  # by heads: queries, keys, values, result


@pytest.mark.usual("True")
@pytest.mark.parametrize("balance", [True, None])
def test_two_axes_compose(balance: bool | None) -> None:
    both, one = _two_axes("ring", "heads", balance=balance), _one(lambda: Attends(MASKS["causal"]), 4, 13)
    staged: list[ws.Strategy] = [replace(part, style="replicate") for part in both]
    _same(one, "inner=2,cp=3", both)
    _same(one, "dp=2,cp=2,inner=2", [DATA, *both])
    _same(one, "pp=2,cp=2,inner=2", [*staged, ws.Pipeline(micro_batches=2)])
    planned = _same(one, "cp=3,inner=2", [*both, ws.MicroBatches(2)]).plan
    assert bool(planned.options.balanced) == bool(balance)


class Predicts(nn.Module):
    """Scores of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attends, self.head = Attends(MASKS["causal"]), nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attends(ids))


def _next(scores: Tensor, ids: Tensor, ahead: int = 1) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), ids[..., ahead:].flatten())


def _behind_the_first(scores: Tensor) -> Tensor:
    return scores[:, 1:].square().sum() / 99 + scores[:, 1:-1].sum() / 50


PARTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "all but the last": lambda model, ids: _next(model(ids)[:, :-1], ids),
    "two ahead": lambda model, ids: _next(model(ids)[:, :-2], ids, 2),
    "behind the first": lambda model, ids: _behind_the_first(model(ids)),
    "of each row": lambda model, ids: sum(
        (_next(s[:-1], i) for s, i in zip(model(ids), ids, strict=True)), torch.zeros(())
    ),
    "of the ids": lambda model, ids: _next(model(ids[:, :-1]), ids) + _next(model(ids[:, :-2]), ids, 2),
}


def _predict(
    loss_of: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, optimizer: Optimizer, ids: Tensor
) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("length", [DIM, CLASSES])
def test_a_part_of_a_sequence_as_long_as_another_dim(length: int) -> None:
    one = _one(Predicts, 2, length, partial(_predict, PARTS["all but the last"]))
    assert not _same(one, "cp=2", ws.ContextParallel(method="gather")).plan.repeated


@pytest.mark.parametrize("part", ["all but the last", "of the ids"])
def test_a_part_of_the_tokens_of_two_axes(part: str) -> None:
    """Ranks of the outer axis send each other what is in other pieces; those of the inner one repeat the loss of it."""
    one = _one(Predicts, 2, 11, partial(_predict, PARTS[part]))
    planned = _same(one, "cp=2,inner=2", _two_axes("ring", "heads")).plan
    assert [work.axis for work in planned.repeated] == ["inner"] * (part != "of the ids")


@pytest.mark.usual(
    "2-8-all but the last", "3-8-of the ids", "3-11-two ahead", "4-11-all but the last", "4-7-behind the first"
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("length", [8, 7, 11, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_part_of_the_tokens_stays_where_it_is(ranks: int, length: int, part: str) -> None:
    """Pieces of 11 tokens and of 10 begin at other places: the few scores, or ids, between go to the rank that needs
    them. No rank has those of all tokens, or computes them.
    """
    one = _one(Predicts, 2, length, partial(_predict, PARTS[part]))
    methods: tuple[Any, ...] = ("gather", "ring", *["heads"] * (ranks == 2))
    for method in methods:
        comparison = _same(one, f"cp={ranks}", ws.ContextParallel(method=method))
        assert not comparison.plan.repeated
        tensors = [tensor for node in comparison.local.graph.nodes if (tensor := meta.tensor(node))]
        scores = [
            prod(t.shape[:-1])
            for t in tensors
            if t.shape[-1:] == (CLASSES,) and DIM not in t.shape and 0 not in t.stride
        ]
        assert max(scores) <= 2 * -(-length // ranks)


# -- work and bytes --------------------------------------------------------------------------------------
def _multiplications(graph: Graph) -> float:
    """Those of products and attention, as they are priced: a piece of the queries with all keys."""
    return sum(flops(node) for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("method", ["gather", "heads", "ring"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_rank_of_four_does_a_quarter(method: Any, rows: int) -> None:
    one = _one(lambda: Attends(MASKS["causal"], keys=4), rows, 16)
    comparison = _same(one, "cp=4", ws.ContextParallel(method=method))
    assert not comparison.plan.repeated
    assert _multiplications(comparison.local.graph) == _multiplications(one.capture.graph.graph) / 4


@pytest.mark.usual("8-2-eager", "80-1-eager", "8-2-sdpa")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", [8, 80])
def test_a_rank_of_four_does_a_quarter_of_llama(length: int, rows: int, attention: str) -> None:
    """Fewer and more tokens than its width, heads that are repeated: gradients of keys and values by hand, too."""
    (entry,) = entries(["llama"])

    def make() -> nn.Module:
        model: Any = without_chance(entry.build().double())
        model.set_attn_implementation(attention)
        return model

    def step(model: nn.Module, optimizer: Optimizer, ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        with Double():
            scores = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(scores.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = _one(make, rows, length, step)
    comparison = _same(one, "cp=4", ws.ContextParallel(method="gather"))
    assert not comparison.plan.repeated
    assert _multiplications(comparison.local.graph) == _multiplications(one.capture.graph.graph) / 4


class Scores(TorchDispatchMode):
    """Counts the scores of attention that no mask hides, by the rank that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.of_rank = 0, defaultdict[int, float](float)
        self.call, self.of_call = "", defaultdict[tuple[str, int], float](float)

    def bound(self, node: Node, coordinate: Mapping[str, int]) -> Any:
        """What a rank calls next."""
        self.rank, self.call = coordinate["cp"], node.name
        return bound_arguments(node, coordinate)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "dot_product_flash_attention" in name:
            backward = name.endswith("_backward")
            query, key = args[backward:][:2]
            seen = torch.ones(query.shape[-2], key.shape[-2])
            seen = seen.tril() if any(args[7:8] if backward else args[4:5]) else seen
            self.of_rank[self.rank] += seen.sum().item() * (2.5 if backward else 1.0)
            self.of_call[self.call, self.rank] += seen.sum().item()
        return func(*args, **(kwargs or {}))


def _slowest_over_mean(
    one: OneDevice, ranks: int, parallel: Any, patch: pytest.MonkeyPatch
) -> tuple[float, LocalGraph]:
    """By the scores that each rank computes in the calls that it makes."""
    with Scores() as counted, patch.context() as here:
        here.setattr(simulate, "bound_arguments", counted.bound)
        local = _same(one, f"cp={ranks}", parallel).local
    assert counted.of_rank
    return max(counted.of_rank.values()) * ranks / sum(counted.of_rank.values()), local


def _arithmetic_us(graph: Graph) -> float:
    """Microseconds of attention where nothing but its arithmetic takes time."""
    device = MeasuredDevice("", 1.0, 1e30, 0.0)
    calls = (node for node in graph.nodes if node.op == "call_function" and meta.tensors(node))
    attend = (node for node in calls if (op := arithmetic(node.target)) and op.kind == "attention")
    return sum(device.work_us(node_work) for node in attend if (node_work := work(node)) is not None)


@pytest.mark.usual("2-128-gather", "4-131-gather", "3-131-ring")
@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("length", [128, 131])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_causal_attention_takes_what_the_last_rank_does(
    ranks: int, length: int, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 - 1/n times the mean."""
    one = _one(lambda: Attends(MASKS["causal"]), 1, length)
    slowest, local = _slowest_over_mean(one, ranks, ws.ContextParallel(method=method), monkeypatch)
    priced = _arithmetic_us(local.graph) * ranks / _arithmetic_us(one.capture.graph.graph)
    lockstep = 0.02 * (method == "ring")  # the rank that does most is another one in other steps
    assert priced == pytest.approx(slowest, rel=0.01 + lockstep)
    assert slowest == pytest.approx(2 - 1 / ranks, rel=0.05)


BALANCED = ws.ContextParallel(method="gather", balance=True)
BALANCED_RING = ws.ContextParallel(method="ring", balance=True)


@pytest.mark.usual("2-128-gather", "3-194-gather", "4-258-ring", "3-307-ring")
@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("length", [128, 129, 194, 258, 307])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanged_queries_are_as_much_work_for_all(
    ranks: int, length: int, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 64 tokens a rank on: each attends to as many keys as the others, and this is what is priced."""
    if length < 64 * ranks:
        return
    one = _one(lambda: Attends(MASKS["causal"]), 1, length)
    context = ws.ContextParallel(method=method, balance=True)
    slowest, local = _slowest_over_mean(one, ranks, context, monkeypatch)
    priced = _arithmetic_us(local.graph) * ranks / _arithmetic_us(one.capture.graph.graph)
    assert slowest <= 1.02
    lockstep = 0.02 * (method == "ring")  # the rank that does most is another one in other steps
    assert priced == pytest.approx(slowest, rel=0.01 + lockstep)


@pytest.mark.parametrize(("ranks", "length"), [(2, 128), (3, 195), (4, 272)])
def test_each_step_of_a_balanced_ring_is_as_much_work_for_all(
    ranks: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S/n x S/n / 2 scores of each rank, with its own keys and those that are passed on: half of all pairs."""
    one = _one(lambda: Attends(MASKS["causal"]), 1, length)
    with Scores() as counted, monkeypatch.context() as here:
        here.setattr(simulate, "bound_arguments", counted.bound)
        _same(one, f"cp={ranks}", BALANCED_RING)
    assert len(counted.of_call) == 2 * ranks * ranks
    for scores in counted.of_call.values():
        assert scores == pytest.approx(3 * (length / ranks) ** 2 / 2, rel=0.04)  # in three steps of training


@pytest.mark.usual("2-8-2", "3-7-1", "4-3-3", "3-3-3")
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("length", [8, 7, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanged_queries_give_what_one_device_does(ranks: int, length: int, rows: int) -> None:
    one = _one(lambda: nn.Sequential(Attends(MASKS["causal"]), Again(MASKS["causal"])), rows, length)
    for context in (BALANCED, BALANCED_RING):
        comparison = _same(one, f"cp={ranks}", context)
        assert comparison.worst < 1e-12
        assert len(comparison.plan.options.balanced) == 4
        assert not comparison.plan.repeated


def _attends_causally(model: nn.Module, x: Tensor) -> None:
    q, k = model(x).split([4 * 16, 2 * 16], -1)
    q, k = q.unflatten(-1, (4, 16)).transpose(1, 2), k.unflatten(-1, (2, 16)).transpose(1, 2)
    F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).square().mean().backward()


def test_queries_are_exchanged_where_that_saves_time() -> None:
    """By the attention of the slowest rank, forward and backward, on this hardware; plan and program say so."""
    hardware = ws.Hardware.preset("dgx-h100")
    for length, does in ((64, False), (1 << 15, True)):
        graph = ws.capture(_attends_causally, nn.Linear(8, 96).float(), torch.randn(1, length, 8, dtype=torch.float32))
        plans = {
            balance: ws.plan(graph, "cp=4", ws.ContextParallel(method="gather", balance=balance), hardware=hardware)
            for balance in (None, True, False)
        }
        assert plans[None].decisions == plans[does].decisions
        assert plans[None].options == plans[does].options
        assert ("queries of 2 calls of causal attention are exchanged" in str(plans[None])) == does
        forward = "scaled_dot_product_flash_attention_for_cpu"
        text = plans[None].explain(forward)
        assert (
            f"queries are {'' if does else 'not '}exchanged along cp, so that ranks attend to as many keys: the "
            in text
        )
        times = {b: ws.simulate(ws.partition(graph, p), hardware).step_us for b, p in plans.items()}
        assert times[None] == min(times.values()) < max(times.values())
        kinds = ws.partition(graph, plans[None]).collectives()
        assert kinds["all_to_all"].count == 4 if does else "all_to_all" not in kinds


def test_what_is_exchanged() -> None:
    """Queries and results, their gradients, S/n Hq d each; nothing without a causal mask, nothing by heads."""
    length, ranks = 64, 2
    one = _one(lambda: Attends(MASKS["causal"]), 1, length)
    local = _same(one, f"cp={ranks}", BALANCED).local
    assert _attention_bytes(local, "all_to_all") == 4 * (length // ranks) * HEADS * WIDTH * 8
    for mask, method in (("none", "gather"), ("window", "gather"), ("causal", "heads")):
        one = _one(lambda mask=mask: Attends(MASKS[mask]), 1, length)
        plan = _same(one, f"cp={ranks}", ws.ContextParallel(method=method, balance=True)).plan  # type: ignore[arg-type]
        assert not plan.options.balanced


@pytest.mark.parametrize("length", [16, 14])
@pytest.mark.parametrize("context", [BALANCED, RING], ids=["exchanged", "ring"])
def test_rows_can_be_tiled_behind_exchanges(length: int, context: ws.ContextParallel) -> None:
    """Where ranks have as many tokens they get as many queries, from others in other numbers."""

    def make() -> nn.Module:
        return nn.Sequential(Attends(MASKS["causal"]), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    one = _one(make, 1, length)
    with pytest.warns(UserWarning, match=r"TileRows\(2\) leaves") as said:
        comparison = compare(one, "cp=2", context, edit=ws.TileRows(2, 1))
    assert comparison.worst < TOLERANCE
    assert [loop.pieces for node in comparison.local.graph.nodes if (loop := loop_of(node))] == [2]
    assert "other sizes on other ranks" not in str(said[0].message)


def _attention_bytes(local: LocalGraph, *kinds: str) -> int:
    """Bytes of collectives on tensors of four dims: on what attention reads and returns."""
    nodes = [n for n in local.graph.nodes if n.op == "call_function" and collective_kind(n.target) in kinds]
    return sum(meta.size_bytes(n) for n in nodes if len(meta.one_tensor(n).shape) == 4)


def test_what_is_sent_is_printed() -> None:
    """By the method that calls take, and by each other one: what the programs of these send."""
    length, size, sent = 64, 8, dict[str, str]()
    one = _one(lambda: Attends(MASKS["window"]), 1, length)
    for method, taken in (("heads", "heads"), ("gather", "window")):
        plan = ws.plan(one.capture.graph, "cp=2", ws.ContextParallel(method=cast(Any, method)))
        (sent[taken],) = (note for note in plan.notes if "calls of attention" in note)
        assert f"  note: {sent[taken]}" in str(plan)
        assert sent[taken].startswith(f"1 calls of attention along cp by {taken}: a rank sends for each ")
    keys, queries = length * 2 * KEY_HEADS * WIDTH * size, length * HEADS * WIDTH * size
    each = {"gather": keys, "ring": 3 * keys // 2, "heads": (keys + 2 * queries) // 2, "window": 2 * keys * 2 // length}
    texts = ", ".join(f"{human(count)} by {method}" for method, count in each.items())
    assert sent["window"].endswith(texts)


class ByHand(Attends):
    """Attention without its op."""

    def attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (t.view(*x.shape[:2], -1, WIDTH).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        attended = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return x + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("method", ["heads", "ring", "gather", "auto"])
def test_attention_by_hand_is_said_to_gather(method: Any) -> None:
    one = _one(lambda: ByHand(MASKS["none"]), 2, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compare(one, "cp=2", ws.ContextParallel(method=method)).worst < TOLERANCE
    texts = [text for w in said if (text := str(w.message)).startswith("ContextParallel(method=")]
    assert bool(texts) == (method in ("heads", "ring"))
    for text in texts:
        assert "gathers keys and values of attention by hand: %softmax (aten._softmax) at " in text
        assert "softmax(-1) @ v" in text


def test_keys_travel_with_their_own_heads() -> None:
    """Gathered keys and values of a layer, S x 2 Hkv d; four all-to-alls of a rank's S/n x (2 Hq + 2 Hkv) d."""
    length, size = 8, 8
    one = _one(lambda: Attends(MASKS["causal"]), 1, length)
    gathered = _same(one, "cp=2", ws.ContextParallel(method="gather")).local
    assert _attention_bytes(gathered, "all_gather") == length * 2 * KEY_HEADS * WIDTH * size
    by_heads = _same(one, "cp=2", ws.ContextParallel(method="heads")).local
    there_and_back = 2 * (length // 2) * (2 * HEADS + 2 * KEY_HEADS) * WIDTH * size
    assert _attention_bytes(by_heads, "all_to_all") == there_and_back


@pytest.mark.parametrize(("heads", "keys", "ranks", "by_heads"), [
    (32, 8, 4, False), (32, 8, 8, True), (8, 8, 2, True), (8, 8, 4, True), (8, 2, 4, False),
])  # fmt: skip
def test_auto_takes_what_sends_less(heads: int, keys: int, ranks: int, by_heads: bool) -> None:
    """Gathering costs n Hkv / (Hq + Hkv) times the all-to-alls; two heads of keys do not divide by four."""

    def step(model: nn.Module, x: Tensor) -> None:
        q, k = model(x).split([heads * 4, keys * 4], -1)
        q, k = q.unflatten(-1, (heads, 4)).transpose(1, 2), k.unflatten(-1, (keys, 4)).transpose(1, 2)
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).square().mean().backward()

    graph = ws.capture(step, nn.Linear(4, (heads + keys) * 4), torch.randn(1, 64, 4))
    planned = ws.plan(graph, f"cp={ranks}", ws.ContextParallel())
    kinds = ws.partition(graph, planned).collectives()
    assert ("all_to_all" in kinds) == by_heads


@pytest.mark.parametrize(("length", "by_heads"), [(32, True), (512, False)])
@pytest.mark.parametrize("per_head", [True, False])
def test_auto_weighs_a_mask(length: int, by_heads: bool, per_head: bool) -> None:
    """All of a mask on each rank, where heads share it: from some length on it is more than keys and values."""

    def step(model: nn.Module, x: Tensor) -> None:
        q, k = (t.unflatten(-1, (8, 16)).transpose(1, 2) for t in model(x).chunk(2, -1))
        mask = torch.ones(1, 8 if per_head else 1, length, length, dtype=torch.bool).tril(5)
        F.scaled_dot_product_attention(q, k, k, mask).square().mean().backward()

    graph = ws.capture(step, nn.Linear(4, 256), torch.randn(1, length, 4))
    kinds = ws.partition(graph, ws.plan(graph, "cp=8", ws.ContextParallel())).collectives()
    assert ("all_to_all" in kinds) == (by_heads or per_head)


# -- kernels that are not here ---------------------------------------------------------------------------
def _reference(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of its sums, by products."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _derived(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, out: Tensor, grad: Tensor, is_causal: bool) -> list[Tensor]:
    """Gradients by the sums that are given, as kernels compute them."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    weights = (scores - sums[..., None]).exp()
    if is_causal:
        weights = weights.tril()
    inner = weights * (grad @ v.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return [inner @ k, inner.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad]


@pytest.fixture
def cuda_kernels() -> Iterator[None]:
    """The ops of flash and efficient attention, computed by products on the CPU."""
    library: Any = torch.library.Library("aten", "IMPL")
    none, seed = torch.zeros(0), torch.zeros((), dtype=torch.int64)

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any) -> Any:
        out, sums = _reference(q, k, v, causal)
        return out, sums, none, none, q.shape[-2], k.shape[-2], none, none, none

    def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *args: Any) -> Any:
        assert args[2:4] == (q.shape[-2], k.shape[-2]), "the lengths of this call"
        return tuple(_derived(q, k, v, sums, out, grad, args[5]))

    def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Any, trains: bool, dropout: float = 0.0, *rest: Any) -> Any:
        out, sums = _reference(q, k, v, *(rest or (False,)))
        padded = torch.full((*sums.shape[:2], -(-sums.shape[2] // 32) * 32), torch.inf, dtype=sums.dtype)
        padded[..., : sums.shape[2]] = sums
        return out, padded, seed, seed

    def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, *rest: Any) -> Any:
        sums, *_, needed, causal = cast("tuple[Any, ...]", (*rest, *[False] * (6 - len(rest))))
        assert needed == [True, True, True, False]
        return (*_derived(q, k, v, sums[..., : q.shape[2]], out, grad, causal), torch.zeros(0))

    for name, function in (
        ("flash_attention", flash), ("flash_attention_backward", flash_backward),
        ("efficient_attention", efficient), ("efficient_attention_backward", efficient_backward),
    ):  # fmt: skip
        library.impl(f"_scaled_dot_product_{name}", function, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("queries", [7, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_kernels_of_a_piece_of_the_queries(causal: bool, queries: int) -> None:
    """What ranks call in place of the op, put together, is what the op returns."""
    q, k, v, grad = (torch.randn(2, 3, queries, 8) for _ in range(4))
    op: Any = aten._scaled_dot_product_flash_attention.default
    backward: Any = aten._scaled_dot_product_flash_attention_backward.default
    out, sums, *others = op(q, k, v, 0.0, causal, False)
    torch.testing.assert_close(_in_pieces(op, [q, k, v, 0.0, causal, False], [0]), [out])
    args = [grad, q, k, v, out, sums, *others[:2], queries, queries, 0.0, causal, others[4], others[5]]
    torch.testing.assert_close(_in_pieces(backward, args, [0, 1, 4, 5], of=q), list(backward(*args)[:3]))


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_kernels_of_a_piece_of_the_keys(causal: bool) -> None:
    """Two pieces of the queries attend to one piece of the keys after another, of which one is empty."""
    q, k, v, grad = (torch.randn(2, 3, 7, 8) for _ in range(4))
    op: Any = aten._scaled_dot_product_flash_attention.default
    backward: Any = aten._scaled_dot_product_flash_attention_backward.default
    out, sums, *others = op(q, k, v, 0.0, causal, False)
    rest = [*others[:2], 7, 7, 0.0, causal, others[4], others[5]]
    expected = backward(grad, q, k, v, out, sums, *rest)
    of_keys, of_values = torch.zeros_like(k), torch.zeros_like(v)
    for first, last in ((0, 2), (2, 7)):
        queries, grads, outs, logs = (tensor[:, :, first:last] for tensor in (q, grad, out, sums))
        merged, of_queries = list[Tensor](), list[Tensor]()
        for start, end in ((3, 5), (0, 3), (5, 7), (7, 7)):
            attend = max(last - max(start, first), 0) if causal else last - first
            place, keys = (max(first - start, 0), attend), (k[:, :, start:end], v[:, :, start:end])
            merged = list(key_piece(op)(*place, queries, *keys, 0.0, causal, False, merged=merged)[:2])
            args = (grads, queries, *keys, outs, logs, *rest)
            of_query, of_key, of_value = key_piece(backward)(*place, *args, merged=of_queries)
            of_queries = [of_query]
            of_keys[:, :, start:end] += of_key
            of_values[:, :, start:end] += of_value
        torch.testing.assert_close(merged, [outs, logs])
        torch.testing.assert_close(of_queries[0], expected[0][:, :, first:last])
    torch.testing.assert_close([of_keys, of_values], list(expected[1:3]))


@pytest.mark.usual("no keys-float16", "lowest-bfloat16", "bias-float32", "lowest-float16")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("none", "causal")])
def test_masks_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """By pieces of the keys, of which one is empty, results are as near to those in double precision as of one call."""
    count, mask = 24, torch.as_tensor(MASKS[name](24)["attn_mask"])
    mask = torch.where(mask, 0.0, -torch.inf) if mask.dtype is torch.bool else mask.clamp(min=torch.finfo(dtype).min)
    bias = (mask if name != "bias" else _biased(count)).expand(2, HEADS if mask.dim() > 2 else 1, count, count)
    q, k, v, grad = (torch.randn(2, HEADS, count, 16) for _ in range(4))
    op: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def at_once(dtype: torch.dtype) -> list[Tensor]:
        queries, keys, values, grads, scores = (t.to(dtype) for t in (q, k, v, grad, bias))
        out, sums = op(queries, keys, values, 0.0, False, attn_mask=scores)
        gradients = backward(grads, queries, keys, values, out, sums, 0.0, False, attn_mask=scores)
        return [t.double() for t in (out, *gradients[:3])]

    def by_pieces(ends: list[int]) -> list[Tensor]:
        queries, keys, values, grads, scores = (t.to(dtype) for t in (q, k, v, grad, bias))
        most, spans = scores.amax(-1, keepdim=True), list(zip([0, *ends], ends, strict=False))
        pieces = [(keys[:, :, a:b], values[:, :, a:b], scores[..., a:b].contiguous()) for a, b in spans]
        merged, of_queries, of_keys, of_values = (list[Tensor]() for _ in range(4))
        for key, value, there in pieces:
            options: Any = {"attn_mask": there, "merged": merged, "most": most}
            merged = list(key_piece(op)(0, count, queries, key, value, 0.0, False, **options)[:2])
        for key, value, there in pieces:
            options = {"attn_mask": there, "merged": of_queries, "most": most}
            args = grads, queries, key, value, merged[0].to(dtype), merged[1], 0.0, False
            of_query, *others = key_piece(backward)(0, count, *args, **options)[:3]
            of_queries, of_keys, of_values = [of_query], [*of_keys, others[0]], [*of_values, others[1]]
        return [t.double() for t in (merged[0], of_queries[0], torch.cat(of_keys, 2), torch.cat(of_values, 2))]

    q, k, v, grad = (t.to(dtype).double() for t in (q, k, v, grad))
    for expected, near, joined in zip(
        at_once(torch.float64), at_once(dtype), by_pieces([7, 7, 20, count]), strict=True
    ):
        assert not expected.isnan().any()
        assert (joined - expected).abs().max() <= 4 * (near - expected).abs().max() + torch.finfo(dtype).eps


class Padding(nn.Module):
    """Attention by the memory-efficient kernel, whose sums of pieces are no pieces of the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(11, DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        attended = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
        return x + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("length", [8, 35])
def test_the_kernel_that_pads_its_sums(length: int) -> None:
    """Heads are shared out; by "gather" every rank repeats the call, and the plan says so."""
    one = _one(Padding, 2, length)
    methods: tuple[Any, ...] = ("auto", "heads", "gather")
    for method in methods:
        repeated = _same(one, "cp=2", ws.ContextParallel(method=method)).plan.repeated
        assert [op for work in repeated for op, *_ in work.causes if "efficient" in op] or method != "gather"
        assert not repeated or method == "gather"


def _in_pieces(op: Any, args: list[Any], cut: list[int], of: Tensor | None = None) -> list[Tensor]:
    """Results of ranks together: pieces of what has queries, sums of the gradients of keys and values. A rank has two
    ranges, and one none.
    """
    count, starts, returned = args[cut[0]].shape[2], [0, 2, 5], list[Any]()
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        local = [a[:, :, start:end].clone() if i in cut else a for i, a in enumerate(args)]
        middle = (start + end) // 2
        returned.append(query_piece(op)([start, middle], [middle - start, end - middle], *local))
    none = query_piece(op)([3, 9], [0, 0], *(a[:, :, :0].clone() if i in cut else a for i, a in enumerate(args)))
    assert none[0].shape[2] == 0
    assert of is None or not torch.stack(none[1:3]).any()
    by_query = torch.cat([r[0] for r in returned], 2)
    return [by_query] if of is None else [by_query, *(torch.stack([r[i] for r in returned]).sum(0) for i in (1, 2))]


# -- models as they are -----------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [
    "llama", "mistral", "gemma3", "qwen3", "gpt2", "t5", "vit", "gpt_oss", "deepseek_v3", "falcon_alibi",
    "phi3", "bert",
])  # fmt: skip
def test_models_of_transformers(name: str) -> None:
    """Grouped heads, windows, sinks, biases of T5, cross attention, latents; 12 tokens on two ranks and on five."""
    (entry,) = entries([name])
    generator = torch.Generator().manual_seed(5)

    def make() -> tuple[nn.Module, Optimizer]:
        model: Any = without_chance(entry.build().double())
        if name in ("gpt_oss", "deepseek_v3"):
            model.set_experts_implementation("batched_mm")  # grouped products do not take float64
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        with Double():
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(make, step, [(entry.batch(generator),) for _ in range(2)])
    for ranks in (2, 5):
        _same(one, f"cp={ranks}", ws.ContextParallel())
    _same(one, "cp=3", BALANCED)


@pytest.mark.usual("mistral-eager", "llama-sdpa", "t5-eager")
@pytest.mark.parametrize(("name", "attention"), [*product(("llama", "mistral"), ("eager", "sdpa")), ("t5", "eager")])
def test_masks_are_made_in_the_rows_of_a_rank(name: str, attention: str) -> None:
    """Windows, padding, documents that begin where position ids do, biases of T5: no rank makes S x S elements. The
    shifted labels that T5's decoder reads are whole; what is looked up by them is not.
    """
    (entry,), length = entries([name]), 13

    def make() -> tuple[nn.Module, Optimizer]:
        model: Any = without_chance(entry.build().double())
        model.set_attn_implementation(attention)
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def step(model: Any, optimizer: Optimizer, ids: Tensor, places: Tensor | None, there: Tensor | None) -> Tensor:
        optimizer.zero_grad()
        options = {"attention_mask": there, "use_cache": False} | ({"position_ids": places} if name != "t5" else {})
        with Double():
            loss = model(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    places = torch.stack([torch.arange(length) % 5, torch.arange(length) % 8])
    there = (torch.arange(length) < torch.tensor([[length], [9]])).long()
    for ranks, *ids_of in [(3, None, there), *[(2, None, None), (3, places, None)] * (name != "t5")]:
        batches = [(torch.randint(1, 96, (2, length)), *ids_of) for _ in range(2)]
        comparison = _same(OneDevice(make, step, batches), f"cp={ranks}", ws.ContextParallel(method="gather"))
        assert not _pairs(comparison.local, length)
        assert not comparison.plan.repeated or name == "t5"


# -- bad input ---------------------------------------------------------------------------------------------
def test_what_is_refused() -> None:
    model = Attends(MASKS["causal"])
    graph = ws.capture(mean_square, model, AdamW(model.parameters()), torch.ones(2, 8).long())
    cases: list[tuple[str, Any, str]] = [
        ("cp=4", ws.ContextParallel(method="heads"), "the heads of .* do not divide"),
        ("cp=2", ws.ContextParallel(input_dim=2), r"no tensor of the batch has dim 2 \(x \[2, 8\]\)"),
        ("cp=2", ws.DataParallel(), "axis 'cp' is used by DataParallel"),
        ("dp=2,cp=2", ws.DataParallel(axis="dp"), "axis 'cp' is used by no strategy"),
        ("cp=2", [ws.ContextParallel(), ws.ContextParallel()], "axis 'cp' is used by ContextParallel and by"),
    ]
    for mesh, parallel, text in cases:
        with pytest.raises(PlanError, match=text):
            ws.plan(graph, mesh, parallel)
    with pytest.raises(MeshError, match="no axis 'cp'"):
        ws.plan(graph, "dp=2", ws.ContextParallel())


@pytest.mark.parametrize("rows", [3, 4])
def test_rows_and_tokens_that_do_not_divide(rows: int) -> None:
    """Pieces of tokens behind rows may differ in length; those of rows around them may not, and are gathered."""
    one = _one(lambda: Attends(MASKS["causal"]), rows, 7)
    comparison = _same(one, "dp=2,cp=2", [DATA, ws.ContextParallel(method="gather")])
    assert bool(comparison.plan.repeated) == (rows == 3)


def test_tokens_merged_behind_choices() -> None:
    """x.T.reshape(-1): blocks of a dim are cut anywhere, tokens of rows that do not divide between rows."""

    class Choices(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, 1)).T.reshape(-1)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Choices(8, 2)
        return model, AdamW(model.parameters(), lr=0.05, eps=1e-4, fused=True)

    for rows in (3, 4):
        one = OneDevice(make, mean_square, [(torch.randn(rows, 4, 8),) for _ in range(2)])
        for mesh, parallel in (("dp=2,cp=2", [DATA, ws.ContextParallel()]), ("dp=2", DATA)):
            _same(one, mesh, parallel)
