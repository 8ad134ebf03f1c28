"""Shards that are gathered together rest side by side, and are copied only where they do not."""

import pytest
import torch
from torch import nn
from torch.optim import Adam

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.passes.bucket import join_rows
from wholestep.passes.contiguous_shards import ContiguousShards, buckets, side_by_side
from wholestep.passes.reinplace import Reinplace
from wholestep.passes.schedule import Schedule
from wholestep.runtime.placement import pack_buckets


def program(reshard: bool, bucket_bytes: int = 40 << 10) -> ws.LocalGraph:
    """One of two ranks for four linear layers, fully sharded."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    graph = ws.capture(train, model, Adam(model.parameters()), torch.zeros(2, 64))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=reshard)))
    return ws.run_passes(local, [Schedule(bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes), Reinplace()])


def count(local: ws.LocalGraph, target: object) -> int:
    return sum(node.target is target for node in local.graph.nodes)


@pytest.mark.smoke
def test_gathers_of_the_forward_are_not_copied_together() -> None:
    for reshard in (False, True):
        before = program(reshard)
        after = ws.run_passes(before, [ContiguousShards()])
        assert count(after, side_by_side) == 2
        assert count(before, join_rows) - count(after, join_rows) == 2
        assert sorted(i for one in buckets(after) for i in one) == list(range(8))


def test_a_parameter_that_is_updated_while_it_may_be_read_is_copied() -> None:
    """Its update in place, moved from the end to between the gather and its wait."""
    local = program(False)
    join = next(n for n in local.graph.nodes if n.target is join_rows)
    piece = join.args[0][0]  # type: ignore[index]
    with local.graph.inserting_after(next(iter(join.users))):
        local.graph.call_function(torch.ops.aten.zero_.default, (piece,))
    after = ws.run_passes(local, [ContiguousShards()])
    assert count(after, side_by_side) == 1
    assert [after.inputs[i].name for i in buckets(after)[0]] == ["2.bias", "3.weight", "3.bias"]


def test_pieces_side_by_side_are_one_row_without_a_copy() -> None:
    held = [torch.randn(shape) for shape in ((3, 4), (0, 2), (5,), (2, 2), (1,), (2,), (3, 3), ())]
    kept = [piece.clone() for piece in held]
    local = ws.run_passes(program(False), [ContiguousShards()])
    pack_buckets(local, held)
    for piece, before in zip(held, kept, strict=True):
        assert torch.equal(piece, before)
    for numbers in buckets(local):
        pieces = [held[i] for i in numbers]
        row = side_by_side(pieces, 1)
        assert {p.untyped_storage().data_ptr() for p in pieces} == {row.untyped_storage().data_ptr()}
        pieces[0].add_(1)
        assert torch.equal(row, torch.cat([p.reshape(-1) for p in pieces]))


def test_pieces_elsewhere_are_copied() -> None:
    whole = torch.arange(12.0)
    for pieces in (
        [whole[:4], whole[5:]],
        [whole[4:], whole[:4]],
        [whole[:4], torch.ones(2)],
        [whole.view(3, 4).t(), whole[:0]],
    ):
        row = side_by_side(pieces, 1)
        assert torch.equal(row, join_rows(pieces, 1))
        assert row.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_what_is_part_of_something_larger_stays_there() -> None:
    local, whole = ws.run_passes(program(False), [ContiguousShards()]), torch.arange(12.0)
    held = [whole[:4], *[torch.ones(2, 3) for _ in range(7)]]
    memory = [piece.data_ptr() for piece in held]
    pack_buckets(local, held)
    assert [a == piece.data_ptr() for a, piece in zip(memory, held, strict=True)] == [True] * 5 + [False] * 3
    assert side_by_side(held[:5], 1).data_ptr() not in memory
