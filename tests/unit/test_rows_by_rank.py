"""Rows that ranks send to the ranks of their experts: none is lost, doubled or at a wrong place, whatever the load."""

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.test_experts import Alone
from tests.hf_models import entries
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.unit.test_experts import TOKENS, Sorted, mixture, plain_products
from wholestep.backend.build import compiled
from wholestep.backend.inductor.inductor_backend import Inductor
from wholestep.backend.rank_binding import bound_arguments
from wholestep.errors import BackendError
from wholestep.graph import meta
from wholestep.graph.counted_rows import counts_rows
from wholestep.graph.graph import LocalGraph, Output
from wholestep.graph.meta import TensorMeta
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import collective_kind
from wholestep.graph.text import human
from wholestep.layout import Extent, chunk_range, extent
from wholestep.mesh import Mesh
from wholestep.partition.rows_by_rank import (
    counts_of_groups,
    groups_from_first,
    in_room,
    own_groups_in_room,
    places_in_room,
    rows_by_rank,
    stable_order,
    with_rows_sent,
)
from wholestep.proof.interpret import run_all
from wholestep.rules.aten.rows_in_groups import inverse_rows, received_groups, sent_rows

pytestmark = pytest.mark.usefixtures("double", plain_products.__name__)

ROOM = 200  # more rows than a rank has
SENT = [TOKENS, ws.ExpertParallel("dp", "rows")]
IN_ROOM = [TOKENS, ws.ExpertParallel("dp", "rows", host_reads=False)]


@cache
def _exchange(ranks: int, groups: int, apart: int = 0) -> LocalGraph:
    """A program that sends rows to their groups, adds the group to each, and sends them back."""
    graph, mesh = Graph(), Mesh(f"dp={ranks}")
    first, count = Extent(groups, (("dp", ranks),), start=True), extent(groups, ["dp"], mesh)
    rows, of = graph.placeholder("rows"), graph.placeholder("of")
    meta.set_tensors(rows, [TensorMeta((ROOM,), (1,), torch.int64, "cpu")])
    meta.set_tensors(of, meta.tensors(rows))

    def call(target: Any, *args: Any) -> Any:
        node = graph.call_function(target, args)
        meta.set_tensors(node, meta.tensors(rows))
        return node

    there = call(sent_rows, False, rows, of, first, count, groups, "dp", apart)
    keys = call(received_groups, of, first, count, groups, "dp", apart)
    back = call(sent_rows, True, call(torch.add, there, keys), of, first, count, groups, "dp", apart)
    graph.output((back, there, keys))
    with_rows_sent(graph, mesh)
    counts = graph.find_nodes(op="call_function", target=rows_by_rank)
    assert len(counts) == (not apart), "the host reads once, or never"
    (end,) = graph.find_nodes(op="output")
    end.args = ((*end.args[0], *counts),)
    outputs = tuple(Output("result", name) for name in ("back", "there", "keys", "counts")[: 3 + len(counts)])
    return LocalGraph(graph, mesh, (), outputs, ())


def _check_exchange(ranks: int, groups: int, routing: list[Tensor]) -> None:
    """Rows have distinct numbers, which come to the rank of their group and back; as many travel as the counts say.
    With room for all rows, zeros come behind them.
    """
    numbers = [100_000 * (rank + 1) + 100 * torch.arange(len(of)) for rank, of in enumerate(routing)]
    results = run_all(_exchange(ranks, groups), [*map(list, zip(numbers, routing, strict=True))], bound_arguments)
    pieces = [chunk_range(groups, ranks, rank) for rank in range(ranks)]
    group_of = {int(n): int(g) for n, g in zip(torch.cat(numbers), torch.cat(routing), strict=True)}
    matrix = [[sum(a <= int(g) < a + n for g in of) for a, n in pieces] for of in routing]
    with_room = run_all(_exchange(ranks, groups, 1), [*map(list, zip(numbers, routing, strict=True))], bound_arguments)
    for (back, there, keys, _), room in zip(results, with_room, strict=True):
        assert all(map(torch.equal, (back, there, keys), (room[0], *(x[: len(there)] for x in room[1:]))))
        assert not room[1][len(there) :].any()
    for rank, (back, there, keys, counts) in enumerate(results):
        assert torch.equal(back, numbers[rank] + routing[rank])
        first, count = pieces[rank]
        expected = sorted(n for n, group in group_of.items() if first <= group < first + count)
        assert sorted(there.tolist()) == expected
        assert [group_of[n] for n in there.tolist()] == keys.tolist() == sorted(keys.tolist())
        assert counts.tolist() == [matrix[rank], [row[rank] for row in matrix]]


def test_places_are_computed_without_reading_them() -> None:
    """Of tensors without values."""
    of = torch.empty(8, dtype=torch.int64, device="meta")
    counts = counts_of_groups(of, 6)
    own = own_groups_in_room(counts.repeat(2), 0, 3, 6, 8)
    places = places_in_room(of, 6, 2, 8)
    assert in_room(of, places, 16)[inverse_rows(stable_order(own))][places].shape == of.shape
    assert groups_from_first(own, 0, 6, of.dtype).shape == (16,)
    with pytest.raises(NotImplementedError):
        rows_by_rank(counts, counts.repeat(2), 0, 3)


def _routing(random: Random, ranks: int, groups: int) -> list[Tensor]:
    """Sorted groups of the rows of each rank: some ranks may have no rows, and some groups may be hot or empty."""
    weights = [random.choice([0.0, 1.0, random.random(), 50.0]) for _ in range(groups)]
    weights = weights if any(weights) else [1.0] * groups
    sizes = [random.choice([0, random.randrange(4), random.randrange(40)]) for _ in range(ranks)]
    return [torch.tensor(sorted(random.choices(range(groups), weights, k=n)), dtype=torch.int64) for n in sizes]


@pytest.mark.usual("0")
@pytest.mark.parametrize("seed", range(20))
def test_each_row_goes_and_comes_back(seed: int) -> None:
    random = Random(seed)
    for _ in range(500):
        ranks = random.randint(2, 5)
        groups = random.randint(ranks, 3 * ranks)
        _check_exchange(ranks, groups, _routing(random, ranks, groups))


LOADS: dict[str, list[list[int]]] = {
    "balanced": [[0, 1, 2] * 4] * 3,
    "one expert": [[1] * 12] * 3,
    "an expert without tokens": [[0, 2] * 6] * 3,
    "a hot rank": [[0, 1] * 5 + [2, 2]] * 3,
    "nothing for a rank": [[0, 1] * 6] * 3,
    "a hot expert that rotates": [[expert] * 10 + [0, 1] for expert in range(3)],
    "a burst": [[0, 1, 2] * 4, [2] * 12, [0, 1, 2] * 4],
    "nothing from a rank": [[0, 2]] * 3,
}


@cache
def _with_load(load: str) -> OneDevice:
    """A layer of three experts that sends token number i of a call to the expert that the load says."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Sorted()
        with torch.no_grad():
            model.gate.weight.copy_(5 * torch.eye(3, 8))
            model.gate.bias.zero_()
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def batch(experts: list[int]) -> Tensor:
        return torch.cat([torch.eye(3)[experts], 0.1 * torch.randn(len(experts), 5)], -1)[None]

    return OneDevice(make, mean_square, [(batch(experts),) for experts in LOADS[load]])


@pytest.mark.parametrize("parallel", [SENT, IN_ROOM], ids=["counted", "in room"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("load", LOADS)
def test_any_load(load: str, ranks: int, parallel: list[Any]) -> None:
    comparison = compare(_with_load(load), f"dp={ranks}", parallel)
    assert comparison.worst < 1e-10, f"{comparison.where} differs by {comparison.worst:.1e}"
    assert (counts_rows(comparison.local.graph) is None) == (parallel is IN_ROOM)


def test_the_host_reads_once_a_layer() -> None:
    """Rows and scores of tokens go there, results come back, and the same backward; counts are gathered once. The plan
    says how many bytes that is if experts have as many rows each.
    """
    comparison = compare(mixture("mixtral", 2, layers=2), "dp=2", SENT)
    local, all_to_all = comparison.local, comparison.local.collectives()["all_to_all"]
    assert any(f", {human(all_to_all.bytes / 2)} by rows" in note for note in comparison.plan.notes)
    assert len(local.graph.find_nodes(op="call_function", target=rows_by_rank)) == 2
    sent = [n for n in local.graph.nodes if is_collective(n) and collective_kind(n.target) == "all_to_all"]
    assert len(sent) == all_to_all.count == 2 * (3 + 3)


@pytest.mark.parametrize(("length", "sent"), [(4, True), (5, False)])
def test_tokens_that_ranks_cannot_share_are_gathered(length: int, sent: bool) -> None:
    """Three sequences of odd length, merged, are no two pieces that have both rows of each of their tokens."""
    (entry,) = entries(["mixtral"])

    def make() -> tuple[nn.Module, Optimizer]:
        built: Any = entry.build().double()
        built.set_experts_implementation("grouped_mm")
        model = Alone(built.model.layers[0].mlp)
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    comparison = compare(OneDevice(make, mean_square, [(torch.randn(3, length, 32),)]), "dp=2", SENT)
    assert comparison.worst < 1e-10
    assert any("rows are sent" in note for note in comparison.plan.notes) == sent


def test_other_backends_do_not_send_rows() -> None:
    with pytest.raises(BackendError) as error:
        compiled(Inductor(), _exchange(2, 3).graph, (), ())
    assert str(error.value).startswith("the step counts rows while it runs, with backend 'inductor'\n")
