"""Memory of buckets that is kept from step to step: when it is used again, how much is kept, what is written there."""

import pytest
import torch
from torch import Tensor

from wholestep.backend.gloo.buffers import Buffers
from wholestep.backend.gloo.exchange import add_parts
from wholestep.passes import bucket

MANY = 1 << 16  # elements: 256 KiB of float32
LIKE = torch.empty(0)


def test_memory_is_used_again_once_nothing_in_it_is_left() -> None:
    buffers = Buffers()
    first = buffers.take(MANY, LIKE)
    view, at = first[10:20].view(2, 5), first.data_ptr()
    del first
    second = buffers.take(MANY, LIKE)
    assert second.data_ptr() != at, "a view of the first is left"
    del view
    assert buffers.take(MANY, LIKE).data_ptr() == at
    assert buffers.kept_bytes == 2 * MANY * 4


def test_smaller_tensors_take_memory_that_fits_and_others_their_own() -> None:
    buffers = Buffers()
    at = buffers.take(MANY, LIKE).data_ptr()
    assert buffers.take(MANY - MANY // 8, LIKE).data_ptr() == at
    assert buffers.take(MANY // 2, LIKE).data_ptr() != at, "most of it would lie idle"
    assert buffers.take(MANY, LIKE.double()).data_ptr() != at
    before = buffers.kept_bytes
    assert buffers.take(100, LIKE).shape == (100,)
    assert buffers.kept_bytes == before, "small tensors are not kept"


def test_no_more_than_twice_of_what_was_in_use_is_kept() -> None:
    buffers = Buffers()
    for step in range(50):  # a tensor of another size each time, one at a time
        buffers.take(MANY * (1 + step), LIKE)
        assert buffers.kept_bytes <= 2 * buffers.most_bytes
    assert buffers.most_bytes == 50 * MANY * 4


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_written_there_is_what_the_plain_functions_make(parts: int) -> None:
    buffers = Buffers()
    shapes = [(6 * parts, 1000), (parts, 7), (600 * parts, 60)]
    for seed in range(2):  # the second time in used memory
        torch.manual_seed(seed)
        pieces = [torch.randn(shape) for shape in shapes]
        joined = buffers.join_rows(pieces, parts)
        assert torch.equal(joined, bucket.join_rows(pieces, parts))
        own: list[Tensor | tuple[int, ...]] = [(n // parts, *rest) for n, *rest in shapes]
        for number in range(3):
            made = buffers.part_of_gather(joined, own, number, parts)
            assert torch.equal(made, bucket.part_of_gather(joined, own, number, parts))
            assert made.is_contiguous()
        if parts > 1:
            for number in range(3):
                parted = bucket.part_of_scatter(joined, shapes, number, parts)
                assert torch.equal(parted, bucket.part_of_scatter(joined, *bucket.of_one(shapes, number), parts))
            for op in ("sum", "avg", "max"):
                assert torch.equal(buffers.add_parts(joined, parts, op), add_parts(joined, parts, op))
